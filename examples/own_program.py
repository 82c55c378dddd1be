"""A Batcher in a program of your own: its requests join one batch, and a request ends with the task that asked.

python own_program.py [MODEL]
"""

import sys

import trio

from genbatch import BatcherClient, open_batcher

QUESTIONS = ("Name a colour.", "Name a fruit.", "Name a river.")


async def ask(batcher: BatcherClient, question: str) -> None:
    """Prints an answer; each call is one request, and all that are open are decoded together."""
    result = await batcher.generate(messages=[{"role": "user", "content": question}], max_tokens=12)
    print(f"{question} {result.text!r} ({result.finish_reason})")


async def read_for(batcher: BatcherClient, seconds: float) -> None:
    """Prints a story for so long. Leaving the scope cancels the request, and its memory is free at the next step."""
    words = 0
    with trio.move_on_after(seconds):
        async with batcher.stream("Once upon a time", temperature=0.8, seed=1, max_tokens=100) as stream:
            async for _ in stream:
                words += 1
    print(f"a story of {words} tokens")


async def main(model: str) -> None:
    async with open_batcher(model, n_parallel=4, n_ctx=1024) as batcher, trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(ask, batcher, question)
        nursery.start_soon(read_for, batcher, 0.5)


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2")
