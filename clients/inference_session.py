"""InferenceSession: one offline generation, its tokens and when it ends."""

import torch

from genbatch.nif.models.model import Model
from genbatch.nif.sampling.sampler import Sampled, SamplerState, sample
from genbatch.nif.sampling.sampling_params import SamplingParams
from genbatch.nif.text.detokenizer import Detokenizer


class InferenceSession:
    """What one prompt became.

    Args:
        model: gives the tokenizer and the end-of-sequence tokens.
        prompt_tokens: at least one.
        max_new_tokens: tokens to generate at most; 0 is unlimited.
        temperature, top_k, top_p: how to draw; they count only with `do_sample`, which is off for greedy.
        seed: makes the draws repeatable, whatever else is in the batch.
        stop_on_eos: end at the model's end-of-sequence tokens.
        max_positions: most positions the engine can hold; the session ends there in any case.
    """

    def __init__(
        self,
        model: Model,
        prompt_tokens: list[int],
        *,
        max_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int = 0,
        stop_on_eos: bool = True,
        max_positions: int,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.generated_ids: list[int] = []
        self.finished = False
        self.seq_id: int | None = None  # its place in the context; None while it waits and once it has ended
        self._max_new_tokens = max_new_tokens
        self._stop_ids = model.eos_token_ids if stop_on_eos else frozenset[int]()
        self._max_positions = max_positions
        self._text = Detokenizer(model.tokenizer.backend, prompt_tokens)
        self._pieces: list[str] = []
        params = SamplingParams(seed=seed, temperature=temperature if do_sample else 0.0, top_k=top_k, top_p=top_p)
        self._sampler = SamplerState(params, prompt_tokens)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_tokens + self.generated_ids

    def apply_batch_logits(self, last_logits: torch.Tensor) -> int | None:
        """Draws the next token from this session's row of logits, [vocab_size].

        Returns:
            The token id; None, and nothing changes, once the session has finished.

        Raises:
            ValueError: the logits hold nothing that could be drawn.
        """
        if self.finished:
            return None
        position = len(self.prompt_tokens) + len(self.generated_ids)
        [drawn] = sample(last_logits.view(1, -1), [self._sampler], [position])
        if not isinstance(drawn, Sampled):
            raise ValueError(drawn.reason)
        self._sampler.accept(drawn.token_id)
        self.generated_ids.append(drawn.token_id)
        self._pieces.append(self._text.push(drawn.token_id))
        num_generated = len(self.generated_ids)
        self.finished = (
            drawn.token_id in self._stop_ids
            or num_generated == self._max_new_tokens
            # The token drawn last needs no place: its KV is never computed.
            or position >= self._max_positions
        )
        if self.finished:
            self._pieces.append(self._text.flush())
        return drawn.token_id

    def decode_text(self) -> str:
        """The text generated so far, special tokens left out."""
        return "".join(self._pieces)
