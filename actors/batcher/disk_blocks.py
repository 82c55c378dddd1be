"""DiskBlocks: requests that wait for blocks of their prompt from the prefix cache on disk.

    blocks.begin(request)               # if there are some on disk, its first sequence waits for them in the queue
    blocks.read(message)                # the thread has read them
    work, end = blocks.next()           # copies some of them into the pool, in place of a step
    blocks.late(message)                # the disk takes too long: the request waits no more

The blocks are read while the request is in the queue, on a thread of their own, and no plan starts the request
meanwhile. They are copied into the pool in portions, with a step between two of them. After that, the request finds
them like every other cached block.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import outcome

from genbatch.actors.batcher.calls import End, Work
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.requests import Request, Sequence
from genbatch.actors.runtime.actor import Timer
from genbatch.actors.runtime.worker import Worker
from genbatch.nif.context import Context

log = logging.getLogger("genbatch")

# Bytes of blocks that are read at a time, for all requests; a request beyond evaluates its prompt.
MAX_READ_BYTES = 512 * 2**20
# Bytes that are copied between two steps: 4 ms.
PORTION_BYTES = 16 * 2**20
# Seconds that a request waits for a disk at most.
LATE_S = 3.0


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
    """A request that waits.

    Args:
        first: its first sequence, which the others follow.
        names: of its prompt's first blocks, the cached ones and those from the disk.
        cached: how many of them were cached already.
        done: how many are cached now.
        contents: of those from the disk, once they were read.
    """

    request: Request
    first: Sequence
    names: list[bytes]
    cached: int
    timer: Timer
    done: int = 0
    contents: list[bytes] = field(default_factory=list)


class DiskBlocks:
    """Reads blocks for requests; the length counts the requests that wait. Use this object on the event loop.

    Args:
        ctx: the context with the pool and the disk.
        requests: the open requests, to which a request that was cancelled belongs no more.
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
        self._late: set[int] = set()  # of those, the requests that wait no more
        self._read: deque[_Reading] = deque()  # to be copied
        self._is_turn = False

    def __len__(self) -> int:
        return len(self._readings)

    def begin(self, request: Request) -> None:
        """Begin to read the blocks of a request's prompt, if the disk has some."""
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
        """Take what the thread has read."""
        del self._unread[message.number]
        self._late.discard(message.number)
        reading = self._readings.get(message.number)
        if reading is None:  # it was late
            return
        reading.timer.cancel()
        reading.contents = [] if isinstance(message.contents, outcome.Error) else message.contents.unwrap()
        if not reading.contents or reading.request not in self._requests:
            self._finish(reading)
        else:
            self._read.append(reading)

    def late(self, message: BlocksLate) -> None:
        """Let the request go on without the disk's blocks."""
        reading = self._readings.get(message.number)
        if reading is None or message.number not in self._unread:  # its blocks are being copied
            return
        if not self._late:
            log.warning("the prefix cache on disk has not answered for %g s, and is not asked until it does", LATE_S)
        self._late.add(message.number)
        self._finish(reading)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are to be copied."""
        return bool(self._read)

    def takes_turn(self) -> bool:
        """Whether blocks are copied now, before the next step: every other time that is asked."""
        self._is_turn = bool(self._read) and not self._is_turn
        return self._is_turn

    def next(self) -> tuple[Work, End]:
        """Return the work of copying the next portion, and the function that takes its outcome."""
        reading = self._read.popleft()
        begin = reading.cached + reading.done
        count = max(1, PORTION_BYTES // self._ctx.block_bytes)
        contents = reading.contents[reading.done : reading.done + count]
        work = partial(self._ctx.restore_prefix, reading.names[: begin + len(contents)], contents)

        def end(result: "outcome.Outcome[int]") -> None:
            reading.done += len(contents)
            if isinstance(result, outcome.Error):
                log.error("blocks from the disk cannot be copied: %r", result.error)
            is_whole = isinstance(result, outcome.Value) and result.value == begin + len(contents)
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
