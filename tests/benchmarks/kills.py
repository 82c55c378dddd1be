"""Kills the engine of a running service again and again, and compares what its clients get with what no kill gives.

    python -m tests.benchmarks.kills --kills 100 --model DIRECTORY

Each round has requests of every kind at once, as streams and as whole answers, over one door: ZeroMQ, msgpack-RPC, the
four APIs over HTTP, and a program with `engine="process"` in turns. At a random moment the engine gets SIGKILL. Every
answer must be the one that the same request had before the first kill, token by token. Nothing may end with an error.

`--gateway` kills the gateway instead, and tries only the clients that continue by themselves.
"""

import argparse
import json
import os
import random
import socket
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
import trio
from safetensors.torch import save_file

from genbatch import RPCClient, ZeroMQClient, open_batcher
from genbatch.proto.errors import GenbatchError
from tests.actors.service.running_service import RunningService, kill
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio
from tests.benchmarks.kill_doors import ADAPTER, ClientDoor, Door, HTTPDoor, Wrong
from tests.soak.__main__ import children

TOLD_EVERY = 5
DOORS = ("zeromq", "rpc", "http", "program")
# SmolLM2-135M's: the adapter is for its attention.
LAYERS, HIDDEN, RANK = 30, 576, 4
# A request may wait for the restart of a service on a busy machine.
PATIENCE_S = 120.0


@dataclass
class Counts:
    """What became of all requests."""

    asked: int = 0
    same: int = 0
    met: int = 0  # requests that were under way at a kill
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    pauses_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of streams with tokens

    def note_wrong(self, what: str) -> None:
        """Count an answer as wrong, and show it at once: a run that is stopped early has told it then."""
        self.wrong.append(what)
        print(f"  wrong: {what}", flush=True)


@dataclass
class Target:
    """A door, and how to kill what is behind it.

    Args:
        kill: kills the process.
        expected: the essence of each kind's whole answer and stream.
        took_s: how long all of them took at once, without a kill.
    """

    name: str
    door: Door
    kill: Callable[[], object]
    expected: dict[tuple[str, bool], Any] = field(default_factory=dict)
    took_s: float = 0.0

    async def learn(self) -> None:
        """Ask for everything without a kill."""
        for kind in self.door.kinds:
            self.expected[kind, False] = await self.door.whole(kind)
            self.expected[kind, True] = await self.door.stream(kind, lambda: None)
        began = time.monotonic()
        await Round(self, Counts()).ask_all()
        self.took_s = time.monotonic() - began


class Round:
    """One kill."""

    def __init__(self, target: Target, counts: Counts) -> None:
        self._target = target
        self._counts = counts
        self._killed_at: float | None = None

    async def run(self, delay_s: float) -> None:
        """Ask for everything, and kill after `delay_s` seconds."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ask_all)
            await trio.sleep(delay_s)
            self._killed_at = time.monotonic()
            self._target.kill()

    async def ask_all(self) -> None:
        """Ask for everything at once."""
        async with trio.open_nursery() as nursery:
            for kind, streams in self._target.expected:
                nursery.start_soon(self._ask, kind, streams)

    async def _ask(self, kind: str, streams: bool) -> None:
        counts, door, name = self._counts, self._target.door, f"{self._target.name} {kind}"
        counts.asked += 1
        asked_at = time.monotonic()
        last_at: float | None = None
        pause_s: float | None = None  # the longest wait after the kill: tokens that were under way arrive before it

        def on_piece() -> None:
            nonlocal last_at, pause_s
            now, killed_at = time.monotonic(), self._killed_at
            if last_at is not None and killed_at is not None and (last_at < killed_at or pause_s is not None):
                pause_s = max(now - last_at, pause_s or 0.0)
            last_at = now

        try:
            answer = await (door.stream(kind, on_piece) if streams else door.whole(kind))
        except (GenbatchError, Wrong, httpx2.HTTPError) as error:
            counts.errors[getattr(error, "code", type(error).__name__)] += 1
            counts.note_wrong(f"{name}: {error!r}, {time.monotonic() - asked_at:.0f} s after it was asked for")
            return
        counts.met += self._killed_at is not None
        if pause_s is not None:
            counts.pauses_s[self._target.name].append(pause_s)
        expected = self._target.expected[kind, streams]
        if answer == expected:
            counts.same += 1
        else:
            counts.note_wrong(f"{name}: {answer} in the place of {expected}")


async def run(targets: Sequence[Target], kills: int, seed: int) -> Counts:
    draw, counts = random.Random(seed), Counts()
    for target in targets:
        await target.learn()
    for number in range(kills):
        target = targets[number % len(targets)]
        await Round(target, counts).run(draw.uniform(0.0, target.took_s))
        await target.door.whole(target.door.kinds[0])  # the next process is there
        if (number + 1) % TOLD_EVERY == 0:
            print(f"{number + 1}: {counts.same} of {counts.asked} the same, {len(counts.wrong)} wrong", flush=True)
    return counts


def engine_of_this_program() -> int | None:
    """The process id of the engine that an `open_batcher` of this process has started."""
    for pid in children(os.getpid()):
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        if parent == f"{os.getpid()}" and "engine_process" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return None


async def open_targets(service: RunningService, exits: AsyncExitStack, given: argparse.Namespace) -> list[Target]:
    """Connect through every door that was asked for."""
    adapter = given.model == "smollm2"

    def kill_service() -> None:
        kill(service.gateway if given.gateway else service.engine)

    targets = []
    for name in given.doors:
        door: Door
        if name == "zeromq":
            client = await exits.enter_async_context(ZeroMQClient(service.address, timeout=PATIENCE_S))
            door = ClientDoor(client, adapter=adapter)
        elif name == "rpc":
            rpc = await exits.enter_async_context(
                RPCClient(service.address.replace("ipc", "unix") + ".rpc", timeout=PATIENCE_S)
            )
            door = ClientDoor(rpc, adapter=adapter)
        elif name == "http":
            http = httpx2.AsyncClient(base_url=given.http, timeout=None, trust_env=False)
            door = HTTPDoor(await exits.enter_async_context(http), given.served, adapter=adapter)
        else:
            options: dict[str, Any] = {"n_parallel": 8, "n_ctx": 2048, "dtype": "float32", "n_gpu_layers": 0}
            batcher = await exits.enter_async_context(
                open_batcher(
                    given.model,
                    engine="process",
                    quantize="auto",
                    max_restarts=10**6,
                    default_deadline_s=0.0,
                    **options,
                )
            )
            door = ClientDoor(batcher, adapter=False)
            targets.append(Target(name, door, lambda: kill(engine_of_this_program())))
            continue
        targets.append(Target(name, door, kill_service))
    return targets


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


async def serve_and_kill(service: RunningService, given: argparse.Namespace) -> Counts:
    async with ZeroMQClient(service.address, timeout=PATIENCE_S) as client:
        given.served = (await client.models())[0].id
    async with AsyncExitStack() as exits:
        counts = await run(await open_targets(service, exits, given), given.kills, given.seed)
    async with ZeroMQClient(service.address, timeout=PATIENCE_S) as client:
        restarts = (await client.stats())["engine_restarts"]
    expected = sum(given.doors[number % len(given.doors)] != "program" for number in range(given.kills))
    if not given.gateway and restarts != expected:
        counts.wrong.append(f"{restarts} restarts in the place of {expected}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", default="smollm2", help="another one than the packaged model has no adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doors", nargs="*", choices=DOORS, default=None, help="all by default")
    parser.add_argument("--gateway", action="store_true", help="kill the gateway instead of the engine")
    given = parser.parse_args()
    given.doors = given.doors or (DOORS[:2] if given.gateway else DOORS)
    exit_on_sigterm()  # so that the service ends, too
    flags = ["--n-parallel", "8", "--max-restarts", "1000000", "--default-deadline-s", "0", "--quantize", "auto"]
    flags += ["--max-queue", "256", "--max-client-queue-share", "1"]  # one client asks for everything at once
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given.http = f"http://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as place:
        if given.model == "smollm2":
            flags.append(f"--lora={ADAPTER}={write_adapter(Path(place) / 'adapter')}")
        flags += ["--rpc-bind", f"unix://{place}/zeromq.sock.rpc", "--http", given.http.removeprefix("http://")]
        with RunningService(Path(given.model), Path(place), *flags) as service:
            counts = run_trio(lambda: serve_and_kill(service, given))
    errors = ", ".join(f"{count} {code}" for code, count in counts.errors.items()) or "0 engine_lost"
    print(f"{given.kills} kills, {counts.asked} requests, {counts.met} of them under way at a kill")
    print(f"  {counts.same} answers the same as without a kill, {len(counts.wrong)} wrong, {errors}")
    for name, pauses_s in counts.pauses_s.items():
        pauses = sorted(pauses_s)
        p50, p99 = pauses[len(pauses) // 2], pauses[min(len(pauses) - 1, 99 * len(pauses) // 100)]
        print(
            f"  {name}: {len(pauses)} streams paused, their longest wait for a token: p50 {p50:.2f} s, p99 {p99:.2f} s"
        )
    for what in counts.wrong:
        print(f"  wrong: {what}")
    raise SystemExit(bool(counts.wrong or counts.same != counts.asked))


if __name__ == "__main__":
    main()
