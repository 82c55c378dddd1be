"""run_load: sends a load to a service and notes when everything came back.

run = await run_load(client, load, arrivals=arrival_times(64, 2.5, seed=1))
print(len(run.times), run.duration_s)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import trio

from genbatch.clients.bench.load import Load, LoadRequest
from genbatch.clients.bench.request_times import RequestTimes
from genbatch.clients.interface import Stream
from genbatch.proto.errors import GenbatchError

INCOMPLETE = "incomplete"
"""The error of a request that ended with fewer tokens than were asked for."""


class Streams(Protocol):
    """The part of a client that a load needs."""

    def stream(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Client.stream`."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A load that has been sent.

    Args:
        times: one for each request, in the load's order.
        duration_s: from the first one sent to the last one ended.
    """

    load: Load
    times: Sequence[RequestTimes]
    duration_s: float


async def run_load(
    client: Streams,
    load: Load,
    *,
    arrivals: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Sends every request at its time and reads its tokens as they come.

    Args:
        arrivals: seconds from the start for each request; None sends all at once.
        max_concurrency: most requests under way at once. One that has to wait for others is sent late, and its
            latencies count from then, as vLLM's do.
        on_end: called as each request ends.
    """
    run = _Run(client, load, trio.CapacityLimiter(max_concurrency or len(load.requests)), on_end)
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for index, request in enumerate(load.requests):
            if arrivals is not None:
                await trio.sleep_until(started_at + arrivals[index])
            nursery.start_soon(run.send, index, request)
    sent_at = min(times.sent_at for times in run.times)
    return LoadRun(load, run.times, max(times.ended_at for times in run.times) - sent_at)


class _Run:
    def __init__(self, client: Streams, load: Load, slots: trio.CapacityLimiter, on_end: Callable[[], None]) -> None:
        self._client = client
        self._slots = slots
        self._on_end = on_end
        self.times = [RequestTimes(len(one.prompt), one.max_tokens, 0.0) for one in load.requests]
        # Only where a request waits for the others' tokens does anyone count them.
        self._awaited = max(one.after_tokens for one in load.requests)
        self._ended: set[int] = set()
        self._others = [index for index, one in enumerate(load.requests) if not one.after_tokens]
        self._reached = trio.Event()

    async def send(self, index: int, request: LoadRequest) -> None:
        times = self.times[index]
        if request.after_tokens:
            await self._reached.wait()
        async with self._slots:
            times.sent_at = trio.current_time()
            try:
                await self._read(times, request)
            except GenbatchError as error:
                times.error = error.code
            times.ended_at = trio.current_time()
        self._ended.add(index)
        if self._awaited:
            self._count()
        self._on_end()

    async def _read(self, times: RequestTimes, request: LoadRequest) -> None:
        async with self._client.stream(request.prompt, max_tokens=request.max_tokens, ignore_eos=True) as stream:
            async for _ in stream:
                times.token_at.append(trio.current_time())
                if len(times.token_at) == self._awaited:
                    self._count()
        times.cached_tokens = stream.result.usage.cached_tokens
        if len(times.token_at) != request.max_tokens:
            times.error = INCOMPLETE

    def _count(self) -> None:
        """Lets the request start that waits for others; one that has ended holds it up no longer."""
        if all(len(self.times[one].token_at) >= self._awaited or one in self._ended for one in self._others):
            self._reached.set()
