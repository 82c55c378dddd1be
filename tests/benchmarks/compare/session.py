"""Session: one run of the comparison: its engines, what was found so far, and how an engine gets its turn."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from genbatch import ZeroMQClient
from genbatch.clients.bench.runs import disturbance, run_load, summary
from genbatch.clients.bench.workloads import LoadOptions, ScriptedLoad, arrival_times, chat, fixed_batch, shared_prompt
from tests.benchmarks.compare.engine_process import EngineProcess
from tests.benchmarks.compare.engines import Engines, LlamaVariant
from tests.benchmarks.compare.measured import Results
from tests.benchmarks.compare.plan import Plan
from tests.benchmarks.compare.service_process import ServiceProcess
from tests.benchmarks.compare.sigterm import run_trio

VOCAB_SIZE = 49152
PREFILL_PROMPTS, PREFILL_LENGTH = 4, 512


class Session:
    """What the parts share.

    Args:
        best: llama.cpp's fastest variant by case, once that is known: "B=8", and "B=8 BF16" among its exact weights.
        capacity: requests a second of our service with all of W2 at once, once that is known.
    """

    def __init__(self, plan: Plan, engines: Engines, results: Results) -> None:
        self.plan = plan
        self.engines = engines
        self.results = results
        self.best: dict[str, LlamaVariant] = {}
        self.capacity: float | None = None
        self._salt = 0

    def rounds(self, part: str, count: int) -> Iterator[int]:
        """The rounds that the part's share of the time has room for, at least one; each has tokens of its own."""
        started_at = time.monotonic()
        for number in range(count):
            if number and time.monotonic() - started_at > self.plan.part_s(part):
                self.results.notes.append(f"{part}: {number} of {count} rounds, its share of the time was over.")
                return
            yield number

    def options(self, scale: float = 1.0) -> LoadOptions:
        """Options with tokens that no load had before."""
        self._salt += 1
        return LoadOptions(vocab_size=VOCAB_SIZE, salt=self._salt, num_prompts=self.plan.num_prompts, scale=scale)

    def chat_options(self) -> LoadOptions:
        """The same at the plan's scale."""
        return self.options(self.plan.scale)

    def chat_load(self, part: str) -> ScriptedLoad:
        """W2 or W3."""
        return chat(self.chat_options()) if part == "w2" else shared_prompt(self.chat_options())

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of that length."""
        return [list(one.prompt) for one in fixed_batch(self.options(), count, length).requests]

    def prefill_prompts(self) -> list[list[int]]:
        """What prefill is measured with."""
        return self.prompts(PREFILL_PROMPTS, PREFILL_LENGTH)

    def variant(self, case: str, mode: str) -> LlamaVariant:
        """llama.cpp's best for the case; exact weights are compared with its exact weights."""
        default = LlamaVariant("BF16" if mode != "int8" else "Q4_0", flash_attention=False)
        return self.best.get(case if mode == "int8" else f"{case} BF16", default)

    def call(self, engine: EngineProcess, do: str, **arguments: Any) -> dict[str, Any]:
        """An engine's turn: its reply to one command."""
        with engine.running():
            return engine.call(do, **arguments)

    def send(
        self,
        engine: EngineProcess | ServiceProcess,
        address: str,
        load: ScriptedLoad,
        *,
        rate: float = float("inf"),
        keep: bool = True,
    ) -> dict[str, Any]:
        """An engine's turn: a load's figures, which are kept for the report.

        Raises:
            RuntimeError: a request failed.
        """

        async def send() -> dict[str, Any]:
            arrivals = arrival_times(len(load.requests), rate, seed=self._salt)
            async with ZeroMQClient(address, timeout=60.0) as client:
                run = await run_load(client, load, arrivals=arrivals)
            waits = any(one.after_tokens for one in load.requests)
            return summary(run) | (disturbance(run.times) if waits else {})

        with engine.running():
            figures = run_trio(send)
        if figures["failed"]:
            raise RuntimeError(f"{load.name}, {engine.name}: {figures['failed']}")
        if keep:
            self.results.latencies.append((load.name, engine.name, figures))
        self.say(f"{load.name}, {engine.name}: {figures['output_throughput']:.0f} tok/s")
        return figures

    def say(self, text: str) -> None:
        """Tells whoever waits."""
        print(f"  {text}", file=sys.stderr, flush=True)
