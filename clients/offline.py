"""OfflineScheduler: run many prompts through one model without a service.

    scheduler = OfflineScheduler("smollm2")
    ids = [scheduler.add_request(prompt, max_new_tokens=32) for prompt in prompts]
    texts = scheduler.run()                    # or: while scheduler.has_unfinished(): scheduler.step()

Requests may be added between two steps. They join the batch while others decode and change no other output. An
InferenceEngine is a model with its KV cache, for programs that step it themselves. An InferenceSession is one
generation: its tokens, and its end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genbatch.nif.context.engine import Engine, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import BatchError, OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.choice import sample
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams
from genbatch.nif.text.detokenizer import open_detokenizer
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.validation import RequestLimits, validate_request


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The options of one generation.

    Args:
        max_new_tokens: most tokens to generate; 0 is unlimited.
        temperature, top_k, top_p: the sampling parameters; without `do_sample` the generation is greedy.
        seed: makes the draws repeatable in every batch.
        stop_on_eos: end at the model's end-of-sequence tokens.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    stop_on_eos: bool = True


class InferenceSession:
    """One generation.

    Args:
        model: has the tokenizer and the end-of-sequence tokens.
        prompt_tokens: at least one token.
        options: the options of the generation.
        max_positions: most positions of a sequence; the session ends there.
    """

    def __init__(self, model: Model, prompt_tokens: list[int], options: SessionOptions, *, max_positions: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.generated_ids: list[int] = []
        self.finished = False
        self.seq_id: int | None = None  # its slot in the context; None while it waits and after its end
        self._max_new_tokens = options.max_new_tokens
        self._stop_ids = model.eos_token_ids if options.stop_on_eos else frozenset[int]()
        self._max_positions = max_positions
        self._text = open_detokenizer(model.tokenizer.backend, prompt_tokens)
        self._pieces: list[str] = []
        temperature = options.temperature if options.do_sample else 0.0
        params = SamplingParams(seed=options.seed, temperature=temperature, top_k=options.top_k, top_p=options.top_p)
        self._sampler = SamplerState(params, prompt_tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the output."""
        return self.prompt_tokens + self.generated_ids

    def apply_batch_logits(self, last_logits: torch.Tensor) -> int | None:
        """Draw the next token from this session's row of logits, [vocab_size].

        Returns:
            The token id; None for a finished session, which does not change.

        Raises:
            ValueError: no token can be drawn from the logits.
        """
        if self.finished:
            return None
        position = len(self.prompt_tokens) + len(self.generated_ids)
        [drawn] = sample(last_logits.cpu().numpy()[None], [self._sampler], [position])
        if not isinstance(drawn, Sampled):
            raise ValueError(drawn.reason)
        self._sampler.accept(drawn.token_id)
        self.generated_ids.append(drawn.token_id)
        self._pieces.append(self._text.push(drawn.token_id))
        num_generated = len(self.generated_ids)
        self.finished = (
            drawn.token_id in self._stop_ids
            or num_generated == self._max_new_tokens
            # The last token needs no position, because its KV is never computed.
            or position >= self._max_positions
        )
        if self.finished:
            self._pieces.append(self._text.flush())
        return drawn.token_id

    def decode_text(self) -> str:
        """Return the text generated so far, without special tokens."""
        return "".join(self._pieces)


N_BATCH = 512  # most tokens of a prompt in one forward


class InferenceEngine:
    """Evaluates sessions of different lengths in one forward, without padding.

    Args:
        model: a loaded model; or a name or path for `load_model`, with the runner that a service would choose.
        n_ctx: positions in the KV pool, for all sessions together.
        n_parallel: most sessions that run at once.
        use_amp: run the forward in torch under autocast.
        amp_dtype: the precision of autocast.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: Model | str = "smollm2",
        *,
        n_ctx: int = 8192,
        n_parallel: int = 8,
        use_amp: bool = False,
        amp_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        runner = "torch" if use_amp else "auto"
        options = EngineOptions(model_path=model if isinstance(model, str) else model.name, runner=runner, n_ctx=n_ctx)
        engine = load_engine(options) if isinstance(model, str) else Engine(model, options)
        self.model = engine.model
        self.use_amp = use_amp
        self.amp_dtype = amp_dtype
        self.context = engine.open_context(n_parallel=n_parallel, n_held=0, n_batch=N_BATCH)
        self.free_slots = list(range(n_parallel))

    @property
    def max_positions(self) -> int:
        """The most positions of one session."""
        return self.context.max_positions

    def has_room(self, num_positions: int, *, spare: int) -> bool:
        """Return whether the pool has the blocks for so many positions, and `spare` more blocks."""
        kv = self.context.kv
        needed = kv.most_held(num_positions, self.context.n_batch)
        return all(count + spare <= free for count, free in zip(needed, kv.free_blocks, strict=True))

    def prefill(self, session: InferenceSession) -> None:
        """Give a session a slot, and evaluate all its tokens except the last token, which the next step evaluates.

        Raises:
            OutOfBlocks: the pool has too few free blocks now; the session gets no slot.
        """
        slot = self.free_slots.pop(0)
        tokens = session.tokens
        try:
            cached = self.context.attach_prefix(slot, tokens)
            if cached < len(tokens) - 1:
                with self._autocast():
                    self.context.prefill(tokens[cached:-1], slot, cached)
        except BaseException:
            self.context.seq_rm(slot)
            self.free_slots.insert(0, slot)
            raise
        session.seq_id = slot

    @torch.inference_mode()
    def decode_step_sessions(self, sessions: Sequence[InferenceSession]) -> torch.Tensor:
        """Evaluate the last token of every session in one forward.

        Args:
            sessions: prefilled sessions that have not finished; at least one.

        Returns:
            The logits of each session's next token, [len(sessions), vocab_size] float32.

        Raises:
            BatchError: a session has finished or was not prefilled; nothing was changed.
            OutOfBlocks: the pool has too few free blocks for the new tokens; nothing was changed.
        """
        batch = []
        for session in sessions:
            if session.finished or session.seq_id is None:
                raise BatchError("a session has finished or was not prefilled")
            tokens = session.tokens
            batch.append(Entry(session.seq_id, tokens[-1:], len(tokens) - 1))
        with self._autocast():
            return torch.cat([torch.as_tensor(rows) for rows in self.context.eval(batch)])

    def release_kv_blocks(self, session: InferenceSession) -> None:
        """Return a session's slot and blocks to the pool; a session without a slot does not change."""
        if session.seq_id is not None:
            self.context.seq_rm(session.seq_id)
            self.free_slots.append(session.seq_id)
            session.seq_id = None

    def close(self) -> None:
        """Release the KV pool."""
        self.context.close()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, dtype=self.amp_dtype, enabled=self.use_amp)


class OfflineScheduler:
    """Runs a session in each slot; further sessions wait in their order.

    Args:
        model: a loaded model, a name or path for `load_model`, or an InferenceEngine.
        options: other arguments of InferenceEngine.
    """

    def __init__(self, model: InferenceEngine | Model | str = "smollm2", **options: Any) -> None:
        self.engine = model if isinstance(model, InferenceEngine) else InferenceEngine(model, **options)
        self._sessions: dict[int, InferenceSession] = {}
        self._waiting: list[InferenceSession] = []
        self._running: dict[int, InferenceSession] = {}  # by request id, longest running first
        self._ids: dict[InferenceSession, int] = {}
        self._next_id = 0

    def add_request(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int = 0,
        stop_on_eos: bool = True,
    ) -> int:
        """Queue a prompt, a text or token ids, and return the request's id. The options are those of SessionOptions.

        Raises:
            InvalidRequest: an option is out of range; the error names it.
            PromptTooLong: no token fits after the prompt.
        """
        text = isinstance(prompt, str)
        request = GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else list(prompt),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        validate_request(request, RequestLimits(), is_typed=False)
        if max_new_tokens < 0:
            raise InvalidRequest("max_new_tokens", f"{max_new_tokens} is negative; 0 is unlimited")
        model, room = self.engine.model, self.engine.max_positions
        tokens = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for index, token_id in enumerate(tokens):
            if token_id >= model.vocab_size:
                raise InvalidRequest(f"token_ids[{index}]", f"{token_id} is outside 0..{model.vocab_size - 1}")
        if not tokens or len(tokens) >= room:
            field = "prompt" if text else "token_ids"
            raise PromptTooLong(f"{len(tokens)} tokens leave no room among {room} positions", field=field)
        options = SessionOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            do_sample=do_sample,
            seed=seed,
            stop_on_eos=stop_on_eos,
        )
        session = InferenceSession(model, tokens, options, max_positions=room)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._sessions[request_id] = session
        self._ids[session] = request_id
        self._waiting.append(session)
        return request_id

    def has_unfinished(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def step(self) -> dict[int, int]:
        """Start waiting requests, then draw one token for every running request.

        Returns:
            Token ids by request id; {} without unfinished requests.

        Raises:
            OutOfBlocks: the KV pool is too small for one request.
        """
        self._join()
        if not self._running:
            return {}
        sessions, logits = self._decode()
        tokens: dict[int, int] = {}
        for session, row in zip(sessions, logits, strict=True):
            request_id = self._ids[session]
            token_id = session.apply_batch_logits(row)
            if token_id is not None:
                tokens[request_id] = token_id
            if session.finished:
                del self._running[request_id]
                self.engine.release_kv_blocks(session)
        return tokens

    def run(self) -> dict[int, str]:
        """Step until all requests have finished, and return their texts by id."""
        while self.has_unfinished():
            self.step()
        return {request_id: session.decode_text() for request_id, session in self._sessions.items()}

    def session(self, request_id: int) -> InferenceSession:
        """Return the session of a request, running or finished."""
        return self._sessions[request_id]

    def close(self) -> None:
        """Release the engine's KV pool."""
        self.engine.close()

    def _decode(self) -> tuple[list[InferenceSession], torch.Tensor]:
        """Evaluate the running sessions in one forward; pause the newest sessions until the others fit."""
        while True:
            sessions = list(self._running.values())
            try:
                return sessions, self.engine.decode_step_sessions(sessions)
            except OutOfBlocks:
                if len(sessions) == 1:
                    raise
                self._pause(sessions[-1])

    def _join(self) -> None:
        while self._waiting and self.engine.free_slots:
            session = self._waiting[0]
            # Leave a block for the growth of each running session, or the new session would be paused at once.
            if self._running and not self.engine.has_room(len(session.tokens), spare=len(self._running) + 1):
                return
            self.engine.prefill(session)
            self._waiting.pop(0)
            self._running[self._ids[session]] = session

    def _pause(self, session: InferenceSession) -> None:
        """Free the blocks of a session. It resumes from its tokens when the pool has room."""
        del self._running[self._ids[session]]
        self.engine.release_kv_blocks(session)
        self._waiting.insert(0, session)


def generate_batch(
    prompts: Iterable[str],
    model: InferenceEngine | Model | str = "smollm2",
    *,
    show_progress: bool = True,
    **params: Any,
) -> list[str]:
    """Return the texts for all prompts in their order; `params` are those of `OfflineScheduler.add_request`."""
    scheduler = OfflineScheduler(model)
    ids = [scheduler.add_request(prompt, **params) for prompt in prompts]
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not show_progress) as progress:
        task = progress.add_task("generating", total=len(ids))
        while scheduler.has_unfinished():
            scheduler.step()
            progress.update(task, completed=sum(scheduler.session(i).finished for i in ids))
    return [scheduler.session(request_id).decode_text() for request_id in ids]
