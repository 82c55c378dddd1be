"""OpenRequests: the requests without a reply yet, and every way in which a request ends.

OpenRequests is part of BatchState, which holds all that a Batcher's parts share.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass

import trio

from genbatch.actors.batcher.counters import StallWatch
from genbatch.actors.batcher.journal import Flight, Journal
from genbatch.actors.batcher.messages import Draining
from genbatch.actors.batcher.requests import Request, Sequence
from genbatch.actors.batcher.slots import HeldPrompts, Slots, Swap
from genbatch.actors.runtime.actor import Monitor
from genbatch.actors.scheduling.request import FairShare, Phase
from genbatch.nif.context import Context
from genbatch.nif.errors import NativeError
from genbatch.proto.errors import DeadlineExceeded, EngineError, GenbatchError
from genbatch.proto.messages import FinishReason


class OpenRequests:
    """Every request from its acceptance to its one reply.

    Sequences are freed before the reply, so that a caller with the reply finds the slots free. Methods that free
    a sequence run only between two steps.

    Args:
        slots: the slots that the requests' sequences hold.
        fair: charges accounts for the requests.
        journal: books the ends.
        on_end: called after a request was answered and removed.
        now: the clock of decisions.
    """

    def __init__(
        self,
        slots: Slots,
        fair: FairShare,
        journal: Journal,
        on_end: Callable[[], None],
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self._slots = slots
        self._fair = fair
        self._journal = journal
        self._on_end = on_end
        self._now = now
        self._requests: dict[Monitor, Request] = {}
        self._deferred: list[Callable[[], None]] | None = None  # ends of requests while the context is in use

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.monitor in self._requests

    def add(self, request: Request) -> None:
        """Add a request under its monitor."""
        self._requests[request.monitor] = request
        if request.payer is not None:
            # guard: what a client had elsewhere
            self._fair.owe(request.account, request.payer.served)
        self._fair.enter(request.account)

    def find(self, monitor: Monitor) -> Request | None:
        """Return the request of a caller that has left; None if it was answered before."""
        return self._requests.get(monitor)

    def open_of(self) -> Counter[str]:
        """Count the sequences that have not ended, by account."""
        counts: Counter[str] = Counter()
        for request in self._requests.values():
            ended = sum([sequence.phase is Phase.FINISHED for sequence in request.sequences])
            counts[request.account] += request.width - ended
        return counts

    def waiting_of(self) -> Counter[str]:
        """Count the sequences that wait for a slot, including those still being tokenized, by account."""
        counts: Counter[str] = Counter()
        for request in self._requests.values():
            waiting = sum([sequence.phase is Phase.PENDING for sequence in request.sequences])
            counts[request.account] += waiting if request.sequences else request.width
        return counts

    def interrupt(self, tags: Set[Hashable]) -> None:
        """Mark the requests with these tags as cancelled."""
        for request in self._requests.values():
            if request.tag in tags:
                request.abandoned = "cancelled"

    def end_abandoned(self) -> None:
        """End cancelled requests and requests past their deadline."""
        now = self._now()
        for request in self:
            # guard: deadline at each step
            if request.abandoned is None and request.expires_at is not None and now >= request.expires_at:
                request.abandoned = request.expiry
            if request.abandoned is not None:
                self._abandon(request, request.abandoned)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline in seconds on the event loop's clock; None for none."""
        return min((r.expires_at for r in self._requests.values() if r.expires_at is not None), default=None)

    def overdue(self) -> bool:
        """Return whether a request must end before the next step."""
        now = self._now()
        return bool(self._deferred) or any(
            # guard: deadline during a run
            request.abandoned is not None or (request.expires_at is not None and now >= request.expires_at)
            for request in self._requests.values()
        )

    def defer(self) -> None:
        """Note ends from now on, since the context is in use; `settle` carries them out."""
        self._deferred = []

    def settle(self) -> None:
        """Carry out the noted ends, since the context is free again."""
        deferred, self._deferred = self._deferred or [], None
        for end in deferred:
            end()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, and its request if that was the last sequence."""
        sequence.ended = True
        if self._deferred is not None:
            self._deferred.append(lambda: self._finish(sequence, reason))
        else:
            self._finish(sequence, reason)

    def fail(self, request: Request, error: GenbatchError) -> None:
        """End a request and all its sequences with an error."""
        for sequence in request.sequences:
            sequence.ended = True
        if self._deferred is not None:
            self._deferred.append(lambda: self._fail(request, error))
        else:
            self._fail(request, error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        self._slots.release(sequence)
        try:
            is_whole = sequence.conclude(reason)
        except NativeError as error:  # the model's tokenizer has no text for these tokens
            self._fail(request, EngineError(str(error)))
            return
        if is_whole:
            self._journal.ended(request, reason)
            self.end(request, None)
            return
        following = request.next_sequence(self._now())
        if following is not None:
            self._slots.enqueue(following)

    def _fail(self, request: Request, error: GenbatchError) -> None:
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._slots.release(sequence)
        self._journal.ended(request, "error", error)
        self.end(request, error)

    def end(self, request: Request, error: GenbatchError | None) -> None:
        """Remove a request and answer its caller; no other place does so."""
        del self._requests[request.monitor]
        self._fair.leave(request.account, output_tokens=request.num_generated)
        if error is not None:
            request.fail(error)
        else:
            request.reply()
        self._on_end()

    def end_all(self, error: GenbatchError) -> None:
        """Answer every caller; the context is about to close, so no slot is freed."""
        for request in self:
            self._journal.ended(request, "error", error)
            request.fail(error)
        self._requests.clear()

    def _abandon(self, request: Request, reason: FinishReason) -> None:
        """End a request early, and answer its caller with the text generated so far."""
        if reason == "deadline" and request.limits.deadline_s is None:  # the operator's bound concerns the wait only
            self._fail(request, self._waited_in_vain(request))
            return
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._slots.release(sequence)
                sequence.cut(reason)
        self._journal.ended(request, reason)
        self.end(request, request.cut_error(reason))

    def _waited_in_vain(self, request: Request) -> DeadlineExceeded:
        waited_s, service_s = request.limits.wait_s or 0.0, self._journal.stats.median_service()
        return DeadlineExceeded(
            f"no slot was free for {waited_s:g} s, and this service lets no request wait longer for one",
            retry_after_ms=max(1, round(1000 * (waited_s if service_s is None else service_s))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The state that a Batcher's parts share.

    Args:
        ctx: the context, which evaluates.
        held, swap: the held prompts in the context, and the KV swapped out of it.
        slots, requests: the running sequences, and the requests without a reply.
        draining: whether new requests are refused.
        journal, watch, flight: the observers.
    """

    ctx: Context
    held: HeldPrompts
    swap: Swap
    slots: Slots
    requests: OpenRequests
    draining: Draining
    journal: Journal
    watch: StallWatch
    flight: Flight
