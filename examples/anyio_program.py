"""One program for asyncio and trio, over anyio: its cancel scopes end requests on both.

python anyio_program.py [MODEL] [asyncio | trio]
"""

import sys

import anyio

from genbatch import BatcherClient, open_batcher


async def ask(batcher: BatcherClient, question: str) -> None:
    """Prints an answer."""
    result = await batcher.generate(messages=[{"role": "user", "content": question}], max_tokens=8)
    print(f"{question} {result.text!r}")


async def main(model: str) -> None:
    async with open_batcher(model, n_parallel=4, n_ctx=1024) as batcher:
        async with anyio.create_task_group() as group:
            for question in ("Name a colour.", "Name a fruit."):
                group.start_soon(ask, batcher, question)

        with anyio.CancelScope() as scope:
            async with batcher.stream("Once upon a time", temperature=0.8, seed=1, max_tokens=200) as stream:
                async for _ in stream:
                    scope.cancel()
        print(f"cancelled: {scope.cancelled_caught}")


if __name__ == "__main__":
    model, backend = [*sys.argv[1:], *("smollm2", "asyncio")[len(sys.argv) - 1 :]]
    anyio.run(main, model, backend=backend)
