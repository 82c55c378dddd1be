"""OfflineScheduler: many prompts through one model without a service.

    scheduler = OfflineScheduler("smollm2")
    ids = [scheduler.add_request(prompt, max_new_tokens=32) for prompt in prompts]
    texts = scheduler.run()                    # or: while scheduler.has_unfinished(): scheduler.step()

Requests may be added between two steps: they join the batch in mid decode, and nobody's output changes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genbatch.clients.inference_engine import InferenceEngine
from genbatch.clients.inference_session import InferenceSession
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.models.model import Model
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.request_limits import RequestLimits
from genbatch.proto.validation import validate_request


class OfflineScheduler:
    """Runs as many sessions at once as there are slots; the others wait in their order.

    Args:
        model: a loaded model, what `load_model` takes, or a ready InferenceEngine.
        options: further arguments of InferenceEngine.
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
        """Queues a prompt, text or token ids; returns its id. The options are InferenceSession's.

        Raises:
            InvalidRequest: an option is out of range; the error names it.
            PromptTooLong: no token fits after the prompt.
        """
        text = isinstance(prompt, str)
        wanted = GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else list(prompt),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        validate_request(wanted, RequestLimits())
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
        session = InferenceSession(
            model,
            tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            do_sample=do_sample,
            seed=seed,
            stop_on_eos=stop_on_eos,
            max_positions=room,
        )
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._sessions[request_id] = session
        self._ids[session] = request_id
        self._waiting.append(session)
        return request_id

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def step(self) -> dict[int, int]:
        """Lets waiting requests join, then draws one token for every running one; {} when nothing is left.

        Returns:
            Token ids by request id.

        Raises:
            OutOfBlocks: the KV pool cannot hold even one request.
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
        """Steps until nothing is left; the texts of all requests by id."""
        while self.has_unfinished():
            self.step()
        return {request_id: session.decode_text() for request_id, session in self._sessions.items()}

    def session(self, request_id: int) -> InferenceSession:
        """The session of a request, running or finished."""
        return self._sessions[request_id]

    def close(self) -> None:
        """Releases the engine's KV pool."""
        self.engine.close()

    def _decode(self) -> tuple[list[InferenceSession], torch.Tensor]:
        """One forward over those running; the newest are paused until the others fit."""
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
            # A block to grow into for everybody who runs: else one would join only to be paused at once.
            if self._running and not self.engine.has_room(len(session.tokens), spare=len(self._running) + 1):
                return
            self.engine.prefill(session)
            self._waiting.pop(0)
            self._running[self._ids[session]] = session

    def _pause(self, session: InferenceSession) -> None:
        """Frees the newest session's blocks; it goes on from its own tokens once there is room."""
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
    """The texts for all prompts, in their order; `params` are those of `OfflineScheduler.add_request`."""
    scheduler = OfflineScheduler(model)
    ids = [scheduler.add_request(prompt, **params) for prompt in prompts]
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not show_progress) as progress:
        task = progress.add_task("generating", total=len(ids))
        while scheduler.has_unfinished():
            scheduler.step()
            progress.update(task, completed=sum(scheduler.session(i).finished for i in ids))
    return [scheduler.session(request_id).decode_text() for request_id in ids]
