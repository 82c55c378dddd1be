"""What a decode step costs on the host when the forward costs nothing: CPU time a step, by thread.

    python tests/benchmarks/host_cost.py --sequences 1 8 32
    python tests/benchmarks/host_cost.py --sequences 256 --forward-ms 11 --launches    # beside a GPU
    python tests/benchmarks/host_cost.py --sequences 256 --forward-ms 11 --launches --any-length --requests 1024

With --launches the runner launches steps as a GPU's runner does, and a step ends `--forward-ms` after the one before.
With --any-length the requests' lengths are random, and the steps of a run are counted.

Real are the tokenizer, the KV bookkeeping, the scheduler, the Batcher and its streams; the runner's forward returns
logits that were made before. CPU time is per thread, so other programs on the machine matter little. "loop" is the
event loop's thread: planning, booking, detokenizing, streams; "model" is the model's thread: laying out the batch and
choosing the tokens.
"""

import argparse
import cProfile
import gc
import pstats
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.stepper import RunAhead
from genbatch.actors.engine.child_process import set_up_garbage_collection
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.clients.interface import TokenStream
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Content, Largest, Launched, RaggedBatch
from genbatch.nif.sampling.sampler import Floats
from genbatch.proto.messages import GenerateRequest


class IdleRunner:
    """A runner without a model: the same logits at every step. Implements `Runner` and `ChoosingRunner`."""

    name = "idle"
    quantize = "none"

    def __init__(self, model: Model, max_rows: int, forward_s: float = 0.0) -> None:
        self._forward_s = forward_s
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        logits = np.random.default_rng(1).standard_normal((max_rows, model.vocab_size), np.float32)
        values, token_ids = logits.max(1), logits.argmax(1)
        self._logits = [logits[:rows] for rows in range(max_rows + 1)]
        self._largest = [Largest(values[:rows], token_ids.astype(np.int32)[:rows]) for rows in range(max_rows + 1)]
        self.decodes = 0  # forwards of single tokens, and the model thread's CPU time at the first and the last one
        self.first = self.last = 0.0

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """As much as anything: nothing is allocated."""
        return block_size

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Nothing to allocate."""

    def forward(self, batch: RaggedBatch) -> Floats:
        """The prepared logits."""
        time.sleep(self._forward_s)  # as a thread that waits for a GPU
        if batch.max_query_len == 1:
            self.decodes += 1
            self.last = time.thread_time()
            self.first = self.first if self.decodes > 1 else self.last
        return self._logits[len(batch.logit_rows)]

    def forward_largest(self, batch: RaggedBatch, *, with_logits: bool) -> tuple[Floats | None, Largest]:
        """The prepared logits and what is largest in them."""
        logits = self.forward(batch)
        return logits if with_logits else None, self._largest[len(logits)]

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing to copy."""

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """Nothing is kept."""
        return np.empty((0, 0), np.uint8)

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""


class LaunchingIdleRunner(IdleRunner):
    """An IdleRunner that launches decode steps: each ends `forward_s` after the one before. A LaunchingRunner."""

    ends_at = 0.0  # when the device has done all that was launched

    def launch(
        self, batch: RaggedBatch, draws: Floats, after: Launched | None, rows: Sequence[int] | None = None
    ) -> "LaunchedIdle":
        """Launch a step; it copies the batch as a GPU's runner does."""
        self.decodes += 1
        self.last = time.thread_time()
        self.first = self.first if self.decodes > 1 else self.last
        parts = (batch.input_ids, batch.positions, batch.kv_lens, *batch.slots, *batch.block_tables, draws)
        for part in parts:
            part.copy()
        self.ends_at = max(self.ends_at, time.perf_counter()) + self._forward_s
        return LaunchedIdle(self._largest[len(batch.input_ids)].token_ids.tolist(), self.ends_at)


class LaunchedIdle:
    """A launched step. Implements Launched, but for `redraw`."""

    def __init__(self, tokens: list[int | None], ends_at: float) -> None:
        self._tokens = tokens
        self._ends_at = ends_at

    def wait(self) -> list[int | None]:
        """The tokens, when the step has ended."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return self._tokens


async def one_stream(ref: ActorRef, request: GenerateRequest, streamed: Callable[[int], None]) -> None:
    """A caller that reads its tokens one by one."""
    stream = TokenStream()

    async def produce() -> None:
        stream.finish(await ref.call(Generate(request, stream.push), timeout=None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        async for token in stream:
            streamed(token.index)


async def run(model: Model, sequences: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Microseconds a decode step on the event loop's thread and on the model's."""
    runner = new_runner(model, sequences, arguments)
    blocks = [sequences * (arguments.prompt + arguments.new + 32) // 16 for _ in runner.groups]
    options = BatcherOptions(n_parallel=sequences, batch_timeout=1000.0, max_batch_tokens=8192, max_held_prompts=0)
    params = {"temperature": arguments.temperature, "repetition_penalty": arguments.repetition_penalty}
    spent = {}

    def streamed(index: int) -> None:
        # All prompts are evaluated in the first step; from its tokens on there are decodes only.
        if index == 1:
            spent.setdefault("first", time.thread_time())
        spent["last"] = time.thread_time() if index == arguments.new - 2 else spent.get("last", 0.0)

    async with trio.open_nursery() as nursery:
        open_context = lambda: Context(model, runner, num_blocks=blocks, n_parallel=sequences, n_batch=8192)  # noqa: E731
        ref = await start(nursery, Batcher(open_context, options), name="batcher")
        async with trio.open_nursery() as callers:
            for index in range(sequences):
                tokens = [(index * 7919 + 31 * i) % (model.vocab_size - 10) + 5 for i in range(arguments.prompt)]
                request = GenerateRequest(
                    token_ids=tokens, max_tokens=arguments.new, ignore_eos=True, seed=index, **params
                )
                callers.start_soon(one_stream, ref, request, streamed)
        await ref.stop()
    steps = arguments.new - 3
    return 1e6 * (spent["last"] - spent["first"]) / steps, 1e6 * (runner.last - runner.first) / (runner.decodes - 1)


def new_runner(model: Model, sequences: int, arguments: argparse.Namespace) -> IdleRunner:
    kind = LaunchingIdleRunner if arguments.launches else IdleRunner
    return kind(model, sequences, arguments.forward_ms / 1000)


async def run_any_length(model: Model, sequences: int, arguments: argparse.Namespace) -> str:
    """Serve requests of random lengths, all at once; returns the columns of the table."""
    runner = new_runner(model, sequences, arguments)
    lengths = np.random.default_rng(4).integers(1, 2 * arguments.new, arguments.requests or sequences).tolist()
    blocks = [sequences * (arguments.prompt + 2 * arguments.new + 32) // 16 for _ in runner.groups]
    options = BatcherOptions(
        n_parallel=sequences, batch_timeout=1000.0, max_batch_tokens=8192, max_held_prompts=0,
        max_queue=len(lengths) + sequences, max_client_queue_share=1.0,
    )  # fmt: skip
    runs, evaluate = [0], RunAhead.evaluate
    firsts: list[float] = []  # when each first token arrived

    def count(run: RunAhead, *arguments: Any) -> Any:
        runs[0] += 1
        return evaluate(run, *arguments)

    def streamed(index: int) -> None:
        if index == 0:
            firsts.append(time.perf_counter() - began)

    RunAhead.evaluate = count  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        open_context = lambda: Context(model, runner, num_blocks=blocks, n_parallel=sequences, n_batch=8192)  # noqa: E731
        batcher = Batcher(open_context, options)
        ref = await start(nursery, batcher, name="batcher")
        began = time.perf_counter()
        async with trio.open_nursery() as callers:
            for index, length in enumerate(lengths):
                tokens = [(index * 7919 + 31 * i) % (model.vocab_size - 10) + 5 for i in range(arguments.prompt)]
                request = GenerateRequest(token_ids=tokens, max_tokens=length, ignore_eos=True, seed=index)
                callers.start_soon(one_stream, ref, request, streamed)
        seconds = time.perf_counter() - began
        steps = batcher.stats.steps
        await ref.stop()
    RunAhead.evaluate = evaluate  # type: ignore[method-assign]
    waited = [np.quantile(firsts, share) for share in (0.5, 0.99)]
    columns = (sequences, len(lengths), steps, runs[0], f"{seconds:.2f}", f"{sum(lengths) / seconds:.0f}",
               *(f"{first_s:.2f}" for first_s in waited))  # fmt: skip
    return f"| {' | '.join(map(str, columns))} |"


def main() -> None:
    """Prints a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forward-ms", type=float, default=0.0, help="that a forward takes without computing")
    parser.add_argument("--launches", action="store_true", help="launch steps as a GPU's runner does")
    parser.add_argument("--any-length", action="store_true", help="requests of 1 to 2 * NEW tokens; count the runs")
    parser.add_argument("--requests", type=int, default=0, help="with --any-length; as many as sequences by default")
    parser.add_argument("--engine-process", action="store_true", help="collect garbage as an engine process does")
    parser.add_argument("--profile", choices=("loop", "model"), help="show where one thread's time goes instead")
    arguments = parser.parse_args()
    model = load_model(arguments.model, n_gpu_layers=0)
    gc.collect()
    gc.freeze()
    if arguments.engine_process:  # its objects are frozen, too, and it collects less often
        set_up_garbage_collection()
    if arguments.profile:
        show_profile(model, arguments)
        return
    if arguments.any_length:
        print("| sequences | requests | steps | runs | s | tokens/s | first token after p50 s | p99 |")
        print("|---|---|---|---|---|---|---|---|")
        for _ in range(arguments.rounds):
            for sequences in arguments.sequences:
                print(trio.run(run_any_length, model, sequences, arguments), flush=True)
        return
    print("| sequences | loop, us a step | model, us a step | together, us a token |\n|---|---|---|---|")
    for sequences in arguments.sequences:
        rounds = [trio.run(run, model, sequences, arguments) for _ in range(arguments.rounds)]
        loop, evaluating = (median(times) for times in zip(*rounds, strict=True))
        print(f"| {sequences} | {loop:.0f} | {evaluating:.0f} | {(loop + evaluating) / sequences:.1f} |", flush=True)


def show_profile(model: Model, arguments: argparse.Namespace) -> None:
    """The functions that take most of one thread's time at the largest number of sequences."""
    profile = cProfile.Profile(time.thread_time)
    if arguments.profile == "loop":
        profile.runcall(trio.run, run, model, max(arguments.sequences), arguments)
    else:
        thread_run = threading.Thread.run

        def profiled(thread: threading.Thread) -> None:
            profile.runcall(thread_run, thread) if thread.name == "genbatch-model" else thread_run(thread)

        threading.Thread.run = profiled  # type: ignore[method-assign]
        trio.run(run, model, max(arguments.sequences), arguments)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
