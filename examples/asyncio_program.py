"""Many callers on asyncio: a TaskGroup, a time limit, a stream that is left early. It runs on uvloop as well.

python asyncio_program.py [MODEL] [asyncio | uvloop]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

from genbatch import BatcherClient, open_batcher

NUM_CALLERS = 64


async def story(batcher: BatcherClient, max_tokens: int) -> AsyncIterator[str]:
    """Closing this generator cancels its request, and its memory is free at the next step."""
    async with batcher.stream("Once upon a time", temperature=0.8, seed=1, max_tokens=max_tokens) as stream:
        async for token in stream:
            yield token.text


async def main(model: str) -> None:
    async with open_batcher(model, n_parallel=8, n_ctx=1024) as batcher:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(batcher.generate(f"The number {number} is", max_tokens=4))
                for number in range(NUM_CALLERS)
            ]
        print(f"{sum(bool(task.result().token_ids) for task in tasks)} answers")

        try:
            async with asyncio.timeout(0):
                await batcher.generate("Once upon a time", max_tokens=200)
        except TimeoutError:
            print("out of time")

        async with aclosing(story(batcher, 200)) as pieces:
            async for piece in pieces:
                print(f"the first piece: {piece!r}")
                break
        while (stats := await batcher.stats())["requests_running"]:
            pass
        print(f"cancelled: {stats['finished']['cancelled']}, blocks in use: {stats['kv_blocks_used']}")


if __name__ == "__main__":
    loop_factory = None
    if sys.argv[2:] == ["uvloop"]:
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
