"""The oracle: transformers' own `generate`, greedy, in float32, one prompt at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class Oracle:
    """A second copy of a model with transformers' own attention; answers are remembered."""

    def __init__(self, directory: Path) -> None:
        self._hf: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The new token ids, the end-of-sequence token included."""
        key = (tuple(prompt), max_tokens)
        if key not in self._answers:
            ids = torch.tensor([list(prompt)])
            out = self._hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
            self._answers[key] = out[0, len(prompt) :].tolist()
        return self._answers[key]

    @torch.inference_mode()
    def log_probs(self, tokens: Sequence[int]) -> torch.Tensor:
        """log_softmax of the logits after every token, [len(tokens), vocab_size]."""
        logits = self._hf(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)
