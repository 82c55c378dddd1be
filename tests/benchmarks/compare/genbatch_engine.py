"""genbatch as an engine of the comparison: a Batcher in this process, asked by command.

python -m tests.benchmarks.compare.genbatch_engine --dtype bfloat16 --quantize int8 --n-parallel 32 --n-ctx 40000
"""

import argparse
from collections.abc import Sequence
from typing import Any

import trio

from genbatch import open_batcher
from genbatch.clients.bench.runs import LoadRun, decode_rate, prefill_rate, run_load
from genbatch.clients.bench.workloads import LoadRequest, ScriptedLoad
from genbatch.clients.in_process import BatcherClient
from tests.benchmarks.compare.command_lines import CommandLines


class Commands:
    """What a Batcher is asked for."""

    def __init__(self, batcher: BatcherClient) -> None:
        self._batcher = batcher

    async def prefill(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Prompt tokens a second until each has its first token."""
        return {"tok_s": prefill_rate((await self._run(prompts, 1)).times)}

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
        """Decode tokens a second of all together, while all of them decode."""
        rate = decode_rate((await self._run(prompts, steps)).times)
        if rate is None:
            raise RuntimeError(f"{len(prompts)} answers of {steps} tokens were never all under way at once")
        return {"tok_s": rate}

    async def tokenize(self, text: str) -> dict[str, Any]:
        """The text's token ids."""
        return {"token_ids": await self._batcher.tokenize(text)}

    async def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """The answers, all prompts at once."""
        answers: list[list[int]] = [[] for _ in prompts]

        async def ask(index: int) -> None:
            params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0}
            answers[index] = list((await self._batcher.generate(prompts[index], **params)).token_ids)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
        return {"answers": answers}

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> LoadRun:
        load = ScriptedLoad("by command", tuple(LoadRequest(tuple(prompt), max_tokens) for prompt in prompts))
        run = await run_load(self._batcher, load)
        failed = [times.error for times in run.times if times.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(run.times)} requests failed: {failed[0]}")
        return run


async def main(options: argparse.Namespace) -> None:
    lines = CommandLines()
    engine = {"dtype": options.dtype, "quantize": options.quantize, "n_ctx": options.n_ctx, "n_gpu_layers": 0}
    async with open_batcher(n_parallel=options.n_parallel, batch_timeout=0.0, **engine) as batcher:
        commands = Commands(batcher)
        lines.reply({"runner": (await batcher.stats())["runner"]})
        while True:
            try:
                received = await trio.to_thread.run_sync(lines.receive)
            except EOFError:
                return
            for command in received:
                lines.reply(await getattr(commands, command.pop("do"))(**command))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--quantize", required=True)
    parser.add_argument("--n-parallel", type=int, required=True)
    parser.add_argument("--n-ctx", type=int, required=True)
    trio.run(main, parser.parse_args())
