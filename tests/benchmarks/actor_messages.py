"""What a message costs: `python tests/benchmarks/actor_messages.py` prints microseconds each, beside trio's own parts.

The channel round trip is the least two trio tasks can do to exchange a request and its answer.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from genbatch.actors.runtime.actor import From, GenServer, start
from genbatch.actors.runtime.worker import Worker

COUNT = 20_000


class Counter(GenServer):
    async def init(self) -> None:
        self.count = 0

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        return self.count

    async def handle_cast(self, message: Any) -> None:
        self.count += message


async def report(name: str, count: int, work: Callable[[], Awaitable[None]]) -> None:
    begun = time.perf_counter()
    await work()
    print(f"{name:36} {(time.perf_counter() - begun) / count * 1e6:7.1f} us")


async def main() -> None:
    worker = Worker("benchmark")
    async with trio.open_nursery() as nursery:
        counter = await start(nursery, Counter(), mailbox_size=COUNT + 1)
        requests, served = trio.open_memory_channel[int](0)
        answers, received = trio.open_memory_channel[int](1)

        async def call(count: int = COUNT) -> None:
            for _ in range(count):
                await counter.call("value")

        async def call_from_100_tasks() -> None:
            async with trio.open_nursery() as callers:
                for _ in range(100):
                    callers.start_soon(call, COUNT // 100)

        async def cast() -> None:
            for _ in range(COUNT):
                counter.cast(1)
            await counter.call("value")

        async def serve_channel() -> None:
            async for request in served:
                await answers.send(request)

        async def channels() -> None:
            for _ in range(COUNT):
                await requests.send(1)
                await received.receive()

        async def run_jobs() -> None:
            for _ in range(COUNT // 10):
                await worker.run(int)

        nursery.start_soon(serve_channel)
        await report("call and reply", COUNT, call)
        await report("call and reply, 100 callers", COUNT, call_from_100_tasks)
        await report("cast, sent and handled", COUNT, cast)
        await report("channel round trip, plain trio", COUNT, channels)
        await report("Worker.run", COUNT // 10, run_jobs)
        await worker.close()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
