"""OpenRequests: the requests without a reply yet, and every way in which a request ends. Admission bounds their queue.

DiskBlocks knows the requests that wait for blocks of their prompt from the prefix cache on disk:

    blocks.begin(request)               # if the disk has blocks of it, its first sequence waits in the queue for them
    blocks.read(message)                # the thread has read them
    work, end = blocks.next()           # copies some of them into the pool, in place of a step
    blocks.late(message)                # the disk takes too long: the request no longer waits

The blocks are read while the request is in the queue, on a thread of their own, and no plan starts the request
meanwhile. They are copied into the pool in portions, with a step between two of them. After that, the request finds
them like every other cached block.

BatchState holds all that a Batcher's parts share.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeAlias

import outcome
import trio

from genbatch.actors.batcher.journal import Flight, Journal, StallWatch
from genbatch.actors.batcher.messages import DRAINING, RETRY_AFTER_DRAIN_MS, DrainOver
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Request, Sequence
from genbatch.actors.batcher.slots import HeldPrompts, Slots, Swap
from genbatch.actors.runtime.actor import From, Monitor, Timer, reply
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.request import FairShare, Phase, ahead_in_turn, most_waiting
from genbatch.nif.context import Context
from genbatch.nif.errors import NativeError
from genbatch.proto.errors import DeadlineExceeded, EngineError, GenbatchError, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.messages import FinishReason
from genbatch.proto.service_messages import Drained

log = logging.getLogger("genbatch")

# Work that needs the context to itself, between two steps, and the function that gets its outcome.
Work: TypeAlias = Callable[[], Any]
End: TypeAlias = "Callable[[outcome.Outcome[Any]], None]"

# The most bytes of blocks that are read at a time, for all requests. A request beyond this evaluates its prompt.
MAX_READ_BYTES = 512 * 2**20
# Bytes that are copied between two steps, which takes 4 ms.
PORTION_BYTES = 16 * 2**20
# The most seconds that a request waits for the disk.
LATE_S = 3.0


# Retry hint per sequence that must get its slot first, until a pace has been measured.
RETRY_MS_PER_SEQUENCE = 50
# The least retry hint: a refusal costs more than a shorter wait saves.
LEAST_RETRY_MS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of the Batcher when a request arrives.

    Args:
        free_slots: sequences that could start at once.
        waiting: sequences that wait for a slot, including those still being tokenized.
        waiting_of: the same by client.
        open_of: sequences accepted and not ended, by client.
        service_s: recent seconds that a sequence held its slot; None before the first ended.
    """

    free_slots: int
    waiting: int
    waiting_of: Mapping[str, int]
    open_of: Mapping[str, int]
    service_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The bounds of admission.

    Args:
        n_parallel: slots.
        max_queue: most sequences that wait.
        max_client_queue_share: one client's share of the places in the queue that the other clients leave free.
        max_client_open: sequences that one client may have open while others are there, per slot.
        in_turn: whether clients take turns; else all wait in one queue.
    """

    n_parallel: int
    max_queue: int
    max_client_queue_share: float
    max_client_open: float
    in_turn: bool = True

    @classmethod
    def by(cls, options: BatcherOptions, *, of_clients: bool) -> "Admission":
        """Return the bounds that the options set, for clients or for the program that runs the Batcher."""
        return cls(
            n_parallel=options.n_parallel,
            max_queue=options.queue_size(of_clients=of_clients),
            max_client_queue_share=options.max_client_queue_share,
            max_client_open=options.max_client_open,
            in_turn=options.fair_share,
        )

    def check(self, *, num_sequences: int, client: str, patience_s: float | None, load: Load) -> None:
        """Admit `num_sequences` more sequences of `client`, which may wait for `patience_s` seconds.

        Raises:
            InvalidRequest: this many sequences never fit, not even into an empty queue.
            QueueFull: the queue, or this client's share of it, is full; with retry_after_ms.
            DeadlineExceeded: the request would expire before its turn.
        """
        if num_sequences > self.max_queue + self.n_parallel:
            places = f"{self.n_parallel} slots and {self.max_queue} places in the queue"
            raise InvalidRequest("n", f"{num_sequences} answers never fit: this service has {places}")
        # guard: bound of the queue
        if load.waiting + num_sequences > self.max_queue + load.free_slots:
            retry_ms = self._retry_ms(load.waiting + num_sequences - self.max_queue - load.free_slots, load)
            raise QueueFull(
                f"{load.waiting} requests are waiting; at most {self.max_queue} may wait", retry_after_ms=retry_ms
            )
        # A client's only request needs a place and no share. In-process requests have no client name, and no share
        # applies.
        if client and load.open_of.get(client):
            self._check_share(num_sequences, client, load)
        expected_s = self._expected_wait_s(num_sequences, client, load)
        # guard: hopeless deadline
        if patience_s is not None and expected_s is not None and expected_s > patience_s:
            raise DeadlineExceeded(
                f"the expected wait is {expected_s:.1f} s, and the request allows {patience_s:.1f} s",
                retry_after_ms=max(LEAST_RETRY_MS, round(1000 * (expected_s - patience_s))),
            )

    def _check_share(self, num_sequences: int, client: str, load: Load) -> None:
        mine = load.waiting_of.get(client, 0)
        most = most_waiting(self.max_queue, load.waiting - mine, self.max_client_queue_share)
        # guard: a client's share of the queue
        if mine + num_sequences > most + load.free_slots:
            raise QueueFull(
                f"this client has {mine} waiting requests; at most {most:g} may wait, so that others find room",
                retry_after_ms=self._retry_ms(
                    self._turns(mine + num_sequences - most - load.free_slots, client, load), load
                ),
            )
        if load.open_of.keys() <= {client}:
            return
        num_open = load.open_of[client]
        most = self.max_client_open * self.n_parallel
        # guard: a client's open requests
        if num_open + num_sequences > most:
            raise QueueFull(
                f"this client has {num_open} open requests; at most {most:g} may be open while others are served",
                # Its own sequences must end first, and other clients' sequences end meanwhile.
                retry_after_ms=self._retry_ms(
                    (num_open + num_sequences - most) * self.n_parallel / max(1, num_open - mine), load
                ),
            )

    def _expected_wait_s(self, num_sequences: int, client: str, load: Load) -> float | None:
        """Return the wait of this client's last sequence at the recent pace; None before a pace was measured."""
        if load.free_slots > load.waiting:
            return 0.0
        if load.service_s is None:
            return None
        ahead = load.waiting
        if self.in_turn and client:
            ahead = min(ahead, ahead_in_turn(load.waiting_of, client, num_sequences))
        return load.service_s * (ahead + 1) / self.n_parallel

    def _turns(self, excess: float, client: str, load: Load) -> float:
        """Return how many sequences get a slot before `excess` of the client's waiting sequences have one."""
        if not self.in_turn:
            return excess * load.waiting / max(1, load.waiting_of.get(client, 0))
        return excess + sum([min(count, excess) for other, count in load.waiting_of.items() if other != client])

    def _retry_ms(self, num_slots: float, load: Load) -> int:
        """Return the time until `num_slots` slots become free, at the recent pace."""
        pace_ms = RETRY_MS_PER_SEQUENCE if load.service_s is None else 1000 * load.service_s / self.n_parallel
        return max(LEAST_RETRY_MS, round(pace_ms * num_slots))


class OpenRequests:
    """Every request from its acceptance to its one reply, and the drain, which waits until every request has ended.

    Sequences are freed before the reply, so that a caller with the reply finds the slots free. Methods that free
    a sequence run only between two steps.

    Args:
        slots: the slots that the requests' sequences hold.
        fair: charges accounts for the requests.
        journal: books the ends.
        send_after: sends DrainOver to the Batcher after a number of seconds.
        now: the clock of decisions.
    """

    def __init__(
        self,
        slots: Slots,
        fair: FairShare,
        journal: Journal,
        send_after: Callable[[float, DrainOver], object],
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self._slots = slots
        self._fair = fair
        self._journal = journal
        self._send_after = send_after
        self._now = now
        self._requests: dict[Monitor, Request] = {}
        # The ends that wait until the context is free: ended sequences, and failed requests.
        self._deferred: dict[Sequence, FinishReason] | None = None
        self._failed: list[tuple[Request, GenbatchError]] = []
        self._soonest = inf  # no request has an earlier deadline
        self.is_draining = False
        self._draining: list[From[Any]] = []  # callers that wait for the end of the drain
        self._num_cancelled = 0  # requests cancelled at the timeout of the drain

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.monitor in self._requests

    def add(self, request: Request) -> None:
        """Add a request under its monitor."""
        self._requests[request.monitor] = request
        if request.expires_at is not None:
            self._soonest = min(self._soonest, request.expires_at)
        if request.payer is not None:
            # guard: tokens of a client at other replicas
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
        soonest = self._next_deadline()
        return None if soonest == inf else soonest

    def _next_deadline(self) -> float:
        return min((r.expires_at for r in self._requests.values() if r.expires_at is not None), default=inf)

    def overdue(self) -> bool:
        """Return whether a request must end before the next step, because it has failed or its deadline has passed."""
        if self._failed:
            return True
        now = self._now()
        if now < self._soonest:
            return False
        self._soonest = self._next_deadline()
        # guard: deadline during a run
        return now >= self._soonest

    def defer(self) -> None:
        """Collect the ends from now on, since the context is in use; `freed` and `settle` carry them out."""
        self._deferred = {}
        self._soonest = self._next_deadline()

    def freed(self, sequences: Iterable[Sequence]) -> None:
        """Carry out the collected ends of these sequences. Their blocks were freed while the context is in use."""
        for sequence in sequences:
            assert self._deferred is not None and (sequence.ended or sequence.request.abandoned)
            reason = self._deferred.pop(sequence, None)
            if reason is not None:  # else its request has failed, or is about to be cancelled
                self._finish(sequence, reason, is_freed=True)

    def settle(self) -> None:
        """Carry out the collected ends, since the context is free again."""
        deferred, self._deferred = self._deferred or {}, None
        failed, self._failed = self._failed, []
        for sequence, reason in deferred.items():
            self._finish(sequence, reason)
        for request, error in failed:
            if request in self:
                self._fail(request, error)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, and its request if that was the last sequence."""
        sequence.ended = True
        if self._deferred is not None and sequence.seq_id is not None:
            self._deferred[sequence] = reason
        else:
            self._finish(sequence, reason)

    def fail(self, request: Request, error: GenbatchError) -> None:
        """End a request and all its sequences with an error."""
        for sequence in request.sequences:
            sequence.ended = True
        if self._deferred is not None:
            self._failed.append((request, error))
        else:
            self._fail(request, error)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, is_freed: bool = False) -> None:
        request = sequence.request
        self._slots.release(sequence, is_freed=is_freed)
        try:
            is_whole = sequence.conclude(reason)
        except NativeError as error:  # the model's tokenizer has no text for these tokens
            self.fail(request, EngineError(str(error)))
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
        self._end_drain()

    def end_all(self, error: GenbatchError) -> None:
        """Answer every caller; the context is about to close, so no slot is freed."""
        for request in self:
            self._journal.ended(request, "error", error)
            request.fail(error)
        self._requests.clear()

    def _abandon(self, request: Request, reason: FinishReason) -> None:
        """End a request early, and answer its caller with the text generated so far."""
        if reason == "deadline" and request.limits.deadline_s is None:  # the operator's limit is on the wait only
            self._fail(request, self._waited_in_vain(request))
            return
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._slots.release(sequence)
                sequence.cut(reason)
        self._journal.ended(request, reason)
        self.end(request, request.cut_error(reason))

    def check_open(self) -> None:
        """Refuse new requests while draining.

        Raises:
            Unavailable: a drain has begun.
        """
        if self.is_draining:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)

    def drain(self, from_: "From[Any]", timeout_s: float) -> None:
        """Refuse new requests, and reply to the caller once no request is open; DrainOver comes at the timeout."""
        self.is_draining = True
        self._draining.append(from_)
        if self._requests:
            self._send_after(timeout_s, DrainOver())
        else:
            self._end_drain()

    def cancel_all(self) -> None:
        """Mark every open request as cancelled, at the timeout of a drain."""
        for request in self._requests.values():
            if request.abandoned is None:
                request.abandoned = "cancelled"
                self._num_cancelled += 1

    def _end_drain(self) -> None:
        if not self._requests:
            callers, self._draining = self._draining, []
            for from_ in callers:
                reply(from_, Drained(num_cancelled=self._num_cancelled))

    def _waited_in_vain(self, request: Request) -> DeadlineExceeded:
        waited_s, service_s = request.limits.wait_s or 0.0, self._journal.stats.median_service()
        return DeadlineExceeded(
            f"no slot was free for {waited_s:g} s, the longest wait of this service",
            retry_after_ms=max(1, round(1000 * (waited_s if service_s is None else service_s))),
        )


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """The disk has given the blocks of a request's prompt."""

    number: int
    contents: "outcome.Outcome[list[bytes]]"


@dataclass(frozen=True, slots=True)
class BlocksLate:
    """A request has waited for the disk long enough."""

    number: int


@dataclass(slots=True)
class _Reading:
    """A request that waits for blocks.

    Args:
        first: the first sequence; the others follow it.
        names: the names of the prompt's first blocks: the cached blocks, then the blocks on disk.
        cached: number of cached blocks among these.
        done: number of blocks from the disk that are in the pool by now.
        contents: the content of the blocks from the disk, once they were read.
    """

    request: Request
    first: Sequence
    names: list[bytes]
    cached: int
    timer: Timer
    done: int = 0
    contents: list[bytes] = field(default_factory=list)


class DiskBlocks:
    """Read blocks for requests. Its length is the number of waiting requests. Use this object on the event loop.

    Args:
        ctx: the context with the pool and the disk.
        requests: the open requests; a cancelled request is not among them.
        open_worker: makes the thread that reads, on the first read.
        send: delivers BlocksRead to the actor that owns this object.
        send_after: delivers BlocksLate after a number of seconds.
    """

    def __init__(
        self,
        ctx: Context,
        requests: OpenRequests,
        open_worker: Callable[[str], Worker],
        send: Callable[[BlocksRead], None],
        send_after: Callable[[float, BlocksLate], Timer],
    ) -> None:
        self._ctx = ctx
        self._requests = requests
        self._open_worker = open_worker
        self._send = send
        self._send_after = send_after
        self._worker: Worker | None = None
        self._readings: dict[int, _Reading] = {}  # by the request's number
        self._unread: dict[int, int] = {}  # bytes that are being read, by the request's number
        self._late: set[int] = set()  # numbers of requests that no longer wait for their reads
        self._read: deque[_Reading] = deque()  # requests with blocks to copy
        self._is_turn = False

    def __len__(self) -> int:
        return len(self._readings)

    def begin(self, request: Request) -> None:
        """Begin to read the blocks of a request's prompt that are on disk, if any."""
        disk, first = self._ctx.disk, request.sequences[0]
        if disk is None or self._late or first.scores_prompt or len(first.tokens) < 2:
            return
        names, cached = self._ctx.kv.on_disk(disk, first.tokens, first.cache_key)
        size = (len(names) - cached) * self._ctx.block_bytes
        if not size or sum(self._unread.values()) + size > MAX_READ_BYTES:
            return
        number = request.number
        if self._worker is None:
            self._worker = self._open_worker("genbatch-disk")
        timer = self._send_after(LATE_S, BlocksLate(number))
        self._readings[number] = _Reading(request, first, names, cached, timer)
        self._unread[number] = size
        first.waits_for_blocks = True
        self._worker.submit(
            disk.read, names[cached:], on_done=lambda contents: self._send(BlocksRead(number, contents))
        )

    def read(self, message: BlocksRead) -> None:
        """Take the blocks that the thread has read."""
        del self._unread[message.number]
        self._late.discard(message.number)
        reading = self._readings.get(message.number)
        if reading is None:  # it was late
            return
        reading.timer.cancel()
        with suppress(Exception):  # blocks that cannot be read are computed
            reading.contents = message.contents.unwrap()
        if not reading.contents or reading.request not in self._requests:
            self._finish(reading)
        else:
            self._read.append(reading)

    def late(self, message: BlocksLate) -> None:
        """Let a request go on without the blocks on disk."""
        reading = self._readings.get(message.number)
        if reading is None or message.number not in self._unread:  # its blocks are being copied
            return
        if not self._late:
            log.warning("the prefix cache on disk has not answered for %g s, and is not used until it answers", LATE_S)
        self._late.add(message.number)
        self._finish(reading)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are to be copied."""
        return bool(self._read)

    def takes_turn(self) -> bool:
        """Return whether to copy blocks before the next step. After a turn, a step comes first."""
        self._is_turn = bool(self._read) and not self._is_turn
        return self._is_turn

    def next(self) -> tuple[Work, End]:
        """Return the work that copies the next portion, and the function that takes its outcome."""
        reading = self._read.popleft()
        begin = reading.cached + reading.done
        count = max(1, PORTION_BYTES // self._ctx.block_bytes)
        contents = reading.contents[reading.done : reading.done + count]
        work = partial(self._ctx.restore_prefix, reading.names[: begin + len(contents)], contents)

        def end(result: "outcome.Outcome[int]") -> None:
            reading.done += len(contents)
            is_whole = False
            try:
                is_whole = result.unwrap() == begin + len(contents)
            except Exception as error:
                log.error("blocks from the disk cannot be copied: %r", error)
            if is_whole and reading.done < len(reading.contents) and reading.request in self._requests:
                self._read.append(reading)
            else:
                self._finish(reading)

        return work, end

    async def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            await self._worker.close()

    def _finish(self, reading: _Reading) -> None:
        """Let a request go on, with the blocks that are cached now."""
        reading.timer.cancel()
        reading.first.waits_for_blocks = False
        del self._readings[reading.request.number]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The state that a Batcher's parts share.

    Args:
        ctx: the model's context.
        held_prompts, swap: the held prompts in the context, and the KV swapped out of it.
        slots, requests: the running sequences, and the requests without a reply.
        journal, watch, flight: the observers.
    """

    ctx: Context
    held_prompts: HeldPrompts
    swap: Swap
    slots: Slots
    requests: OpenRequests
    journal: Journal
    watch: StallWatch
    flight: Flight
