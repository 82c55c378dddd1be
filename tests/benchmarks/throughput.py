"""Tokens a second through the Batcher at 1, 8, 16 and 32 sequences, all of a fixed length.

    python tests/benchmarks/throughput.py --quantize int8 --dtype bfloat16

Every round runs each number of sequences once; the table gives medians over the rounds with the least and the most.
"""

import argparse
import time
from statistics import median

import trio

from genbatch import open_batcher
from genbatch.clients.in_process import BatcherClient

SEQUENCES = (1, 8, 16, 32)


async def run(batcher: BatcherClient, sequences: int, prompt: int, new: int) -> tuple[float, float]:
    """Prefill tokens a second until the last first token, and decode tokens a second after it."""
    vocabulary = batcher.service.engine.model.vocab_size
    started, first, last = time.perf_counter(), [0.0], [0.0]

    async def one(index: int) -> None:
        # No two prompts begin alike: nothing is to be found in the prefix cache.
        tokens = [(index * 7919 + 31 * i + 17 * run.rounds) % (vocabulary - 10) + 5 for i in range(prompt)]
        async with batcher.stream(tokens, max_tokens=new, ignore_eos=True) as stream:
            async for token in stream:
                now = time.perf_counter()
                if token.index == 0:
                    first[0] = max(first[0], now)
                last[0] = max(last[0], now)

    run.rounds += 1
    async with trio.open_nursery() as nursery:
        for index in range(sequences):
            nursery.start_soon(one, index)
    return sequences * prompt / (first[0] - started), sequences * (new - 1) / (last[0] - first[0])


run.rounds = 0


async def main(arguments: argparse.Namespace) -> None:
    """Prints the table."""
    options = {"dtype": arguments.dtype, "quantize": arguments.quantize, "runner": arguments.runner}
    async with open_batcher(
        arguments.model, n_parallel=max(SEQUENCES), n_ctx=16384, batch_size=0, batch_timeout=50.0, **options
    ) as batcher:
        await run(batcher, 4, 32, 8)
        rates: dict[int, list[tuple[float, float]]] = {count: [] for count in SEQUENCES}
        for _ in range(arguments.rounds):
            for count in SEQUENCES:
                rates[count].append(await run(batcher, count, arguments.prompt, arguments.new))
        print(f"runner: {(await batcher.stats())['runner']}; prompt {arguments.prompt}, {arguments.new} new tokens")
    print("| sequences | prefill tok/s | decode tok/s, total | per sequence |\n|---|---|---|---|")
    for count, found in rates.items():
        prefill, decode = ([pair[i] for pair in found] for i in (0, 1))
        spread = f"{median(decode):.0f} ({min(decode):.0f}-{max(decode):.0f})"
        print(f"| {count} | {median(prefill):.0f} | {spread} | {median(decode) / count:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--runner", default="auto")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    trio.run(main, parser.parse_args())
