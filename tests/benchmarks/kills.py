"""Kills the engine of a running service again and again, and compares what its clients get with what no kill gives.

    python -m tests.benchmarks.kills --kills 100 --model DIRECTORY

Each round has requests of every kind at once: greedy and drawn, with penalties, log-probs, grammars, tools, several
choices and an adapter, as streams and as whole answers. At a random moment the engine gets SIGKILL. Every answer must
be the one that the same request had before the first kill, token by token. Nothing may end with an error.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file

from genbatch import ZeroMQClient
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Result, Token
from tests.actors.service.running_service import RunningService, kill
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio

TOLD_EVERY = 5
ADAPTER = "changed"
# SmolLM2-135M's: the adapter is for its attention.
LAYERS, HIDDEN, RANK = 30, 576, 4
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
DRAWN: dict[str, Any] = {**LONG, "temperature": 1.0, "seed": 11}
TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The capital of France is", **LONG},
    "drawn": {"prompt": "The capital of Spain is", **DRAWN, "top_p": 0.95},
    "penalties": {"prompt": "The capital of Italy is", **DRAWN, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "log-probs": {"prompt": "The capital of Norway is", **DRAWN, "logprobs": 3},
    "several": {"prompt": "The capital of Peru is", **DRAWN, "n": 3},
    "stop": {"prompt": "The capital of Chile is", **DRAWN, "stop": [". The", "\n\n"], "min_tokens": 5},
    "grammar": {"prompt": "A date:", "regex": "([0-9]{4}-[0-9]{2}-[0-9]{2} ?){6}", "temperature": 1.0, "seed": 4},
    "tools": {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": {"name": "get_weather"},
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 100,
    },
    "adapter": {"prompt": "The capital of Japan is", **LONG, "model": ADAPTER},
}


@dataclass
class Counts:
    """What became of all requests."""

    asked: int = 0
    same: int = 0
    met: int = 0  # requests that were under way at a kill
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)  # of streams, from a kill to the next token


def essence(result: Result) -> Any:
    """All of a result but the random ids of calls, and what a cache knew."""
    choices = result.choices or (result,)
    return [
        (one.text, one.token_ids, one.finish_reason, one.logprobs, one.reasoning, one.stop_string,
         [(call.name, call.arguments) for call in one.tool_calls])
        for one in choices
    ]  # fmt: skip


class Round:
    """One kill."""

    def __init__(self, client: ZeroMQClient, expected: dict[str, Any], counts: Counts) -> None:
        self._client = client
        self._expected = expected
        self._counts = counts
        self._killed_at: float | None = None

    async def run(self, service: RunningService, delay_s: float) -> None:
        async with trio.open_nursery() as nursery:
            self.ask(nursery)
            await trio.sleep(delay_s)
            self._killed_at = time.monotonic()
            kill(service.engine)

    def ask(self, nursery: trio.Nursery) -> None:
        """Asks for everything at once."""
        for kind in self._expected:
            nursery.start_soon(self._ask, kind, True)
            nursery.start_soon(self._ask, kind, False)

    async def _ask(self, kind: str, streams: bool) -> None:
        counts = self._counts
        counts.asked += 1
        try:
            result = await (self._stream(kind) if streams else self._client.generate(**KINDS[kind]))
        except GenbatchError as error:
            counts.errors[error.code] += 1
            counts.wrong.append(f"{kind}: {error!r}")
            return
        counts.met += self._killed_at is not None
        if essence(result) == self._expected[kind]:
            counts.same += 1
        else:
            counts.wrong.append(f"{kind}: {essence(result)} in the place of {self._expected[kind]}")

    async def _stream(self, kind: str) -> Result:
        tokens: dict[int, list[Token]] = {}
        last_at: float | None = None
        async with self._client.stream(**KINDS[kind]) as stream:
            async for token in stream:
                now, killed_at = time.monotonic(), self._killed_at
                if last_at is not None and killed_at is not None and last_at < killed_at:
                    self._counts.pauses_s.append(now - killed_at)
                last_at = now
                own = tokens.setdefault(token.choice, [])
                if token.index != len(own):
                    self._counts.wrong.append(f"{kind}: token {token.index} after {len(own)}")
                own.append(token)
        for number, choice in enumerate(stream.result.choices or (stream.result,)):
            if [token.token_id for token in tokens[number]] != choice.token_ids:
                self._counts.wrong.append(f"{kind}: the stream is not the result's")
            if "".join(token.text for token in tokens[number]) != choice.text:
                self._counts.wrong.append(f"{kind}: the stream's text is not the result's")
        return stream.result


async def run(service: RunningService, kinds: Sequence[str], kills: int, seed: int) -> Counts:
    draw, counts = random.Random(seed), Counts()
    async with ZeroMQClient(service.address) as client:
        expected = {kind: essence(await client.generate(**KINDS[kind])) for kind in kinds}
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            Round(client, expected, counts).ask(nursery)
        took_s = time.monotonic() - began
        for number in range(kills):
            await Round(client, expected, counts).run(service, draw.uniform(0.0, took_s))
            await client.generate("Hello", max_tokens=1)  # the next engine is there
            if (number + 1) % TOLD_EVERY == 0:
                print(f"{number + 1}: {counts.same} of {counts.asked} the same, {len(counts.wrong)} wrong", flush=True)
        stats = await client.stats()
    if stats["engine_restarts"] != kills:
        counts.wrong.append(f"{stats['engine_restarts']} restarts")
    return counts


def write_adapter(directory: Path) -> Path:
    """A random adapter of the packaged model."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = 0.15 * torch.randn(RANK, HIDDEN, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.15 * torch.randn(HIDDEN, RANK, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", default="smollm2", help="another one than the packaged model has no adapter")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    exit_on_sigterm()  # so that the service ends, too
    flags = ["--n-parallel", "8", "--max-restarts", "1000000", "--default-deadline-s", "0", "--quantize", "auto"]
    kinds = list(KINDS)
    with tempfile.TemporaryDirectory() as place:
        if given.model == "smollm2":
            flags.append(f"--lora={ADAPTER}={write_adapter(Path(place) / 'adapter')}")
        else:
            kinds.remove("adapter")
        with RunningService(Path(given.model), Path(place), *flags) as service:
            counts = run_trio(lambda: run(service, kinds, given.kills, given.seed))
    errors = ", ".join(f"{count} {code}" for code, count in counts.errors.items()) or "0 engine_lost"
    print(f"{given.kills} kills, {counts.asked} requests, {counts.met} of them under way at a kill")
    print(f"  {counts.same} answers the same as without a kill, {len(counts.wrong)} wrong, {errors}")
    if pauses := sorted(counts.pauses_s):
        p50, p99 = pauses[len(pauses) // 2], pauses[min(len(pauses) - 1, 99 * len(pauses) // 100)]
        print(f"  {len(pauses)} streams paused, from the kill to the next token: p50 {p50:.2f} s, p99 {p99:.2f} s")
    for what in counts.wrong:
        print(f"  wrong: {what}")
    raise SystemExit(bool(counts.wrong or counts.same != counts.asked))


if __name__ == "__main__":
    main()
