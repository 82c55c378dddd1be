"""LlamaSlots: continuous batching over a LlamaDecoder. Runs in the peers' environment.

Every step is one llama_decode: a token of each answer, then as much of the waiting prompts as n_batch has room for.
Requests join and leave at every step. A prompt that begins as a kept prefix does starts from a copy of it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # llama_cpp is in the peers' environment only
    from tests.benchmarks.compare.llama_decoder import Entry, LlamaDecoder

OnToken = Callable[[int, int], None]


@dataclass(eq=False)
class SlotRequest:
    """A request.

    Args:
        on_token: called with the index of the token and the token.
        on_end: called after the last token.
    """

    prompt: Sequence[int]
    max_tokens: int
    on_token: OnToken
    on_end: Callable[["SlotRequest"], None]
    seq_id: int = -1
    n_past: int = 0
    cached_tokens: int = 0
    answer: list[int] = field(default_factory=list)


class LlamaSlots:
    """Slots and the requests that wait for one, first come first served.

    Args:
        n_slots: sequences 0 to n_slots - 1 of the decoder; the one after them holds the kept prefix.
    """

    def __init__(self, decoder: "LlamaDecoder", n_slots: int) -> None:
        self._decoder = decoder
        self._n_batch = decoder.n_batch
        self._free = list(range(n_slots))
        self._prefix_seq = n_slots
        self._prefix: tuple[int, ...] = ()
        self._waiting: deque[SlotRequest] = deque()
        self._active: list[SlotRequest] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done."""
        return not self._waiting and not self._active

    def add(self, request: SlotRequest) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def cancel(self, request: SlotRequest) -> None:
        """Frees what a request holds; it is called back no more."""
        if request in self._active:
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def keep_prefix(self, tokens: Sequence[int]) -> None:
        """Evaluates what prompts have in common once, ahead of them; replaces the prefix before it."""
        self._decoder.seq_rm(self._prefix_seq)
        self._prefix = tuple(tokens)
        for start in range(0, len(tokens), self._n_batch):
            self._decoder.step([(self._prefix_seq, tokens[start : start + self._n_batch], start, False)])

    def step(self) -> None:
        """One llama_decode, and what follows from it."""
        while self._waiting and self._free:
            self._join(self._waiting.popleft())
        stepping = list(self._entries())
        drawn = iter(self._decoder.step([entry for _, entry in stepping]))
        for request, (_, tokens, _, wanted) in stepping:
            request.n_past += len(tokens)
            if wanted:
                token = next(drawn)
                request.answer.append(token)
                request.on_token(len(request.answer) - 1, token)
        for request in [one for one in self._active if len(one.answer) == one.max_tokens]:
            self._leave(request)
            request.on_end(request)

    def _entries(self) -> Iterator[tuple[SlotRequest, "Entry"]]:
        room = self._n_batch
        for request in self._active:
            if request.answer:
                room -= 1
                yield request, (request.seq_id, (request.answer[-1],), request.n_past, True)
        for request in self._active:
            if not request.answer and room > 0:
                chunk = request.prompt[request.n_past : request.n_past + room]
                room -= len(chunk)
                last = request.n_past + len(chunk) == len(request.prompt)
                yield request, (request.seq_id, chunk, request.n_past, last)

    def _join(self, request: SlotRequest) -> None:
        request.seq_id = self._free.pop()
        self._active.append(request)
        length = len(self._prefix)
        if length and len(request.prompt) > length and tuple(request.prompt[:length]) == self._prefix:
            self._decoder.seq_cp(self._prefix_seq, request.seq_id)
            request.n_past = request.cached_tokens = length

    def _leave(self, request: SlotRequest) -> None:
        self._active.remove(request)
        self._decoder.seq_rm(request.seq_id)
        self._free.append(request.seq_id)
