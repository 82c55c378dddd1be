"""Takes a running service over again and again under load, and compares the answers with those before.

    python -m tests.benchmarks.takeovers --takeovers 100 --model DIRECTORY

The services have an engine process and an engine thread in turns, so that take-overs go in both directions. Clients
ask over ZeroMQ, msgpack-RPC and HTTP all the time. Every answer must be the one before the first take-over, token by
token. The services together must log as many ends of requests as there were answers.
"""

import argparse
import os
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import trio

from genbatch import RPCClient, ZeroMQClient
from genbatch.proto.errors import GenbatchError
from tests.actors.service.running_service import TIMEOUT_S, RunningService
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio
from tests.benchmarks.kill_doors import essence

ENGINES = ("process", "thread")
TOLD_EVERY = 5
ANSWERS_EACH = 8  # answers of each service before the next one starts
PROMPT = {"prompt": "The capital of France is", "max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 11}


class Load:
    """Clients at every door, that ask one request after another."""

    def __init__(self, service: RunningService, rpc: str, http: str) -> None:
        self._service, self._rpc, self._http = service, rpc, http
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self.expected: dict[str, Any] = {}
        self.longest_s = 0.0
        self.is_over = False
        self._answered = trio.Event()

    async def run(self) -> None:
        """Ask until `is_over`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_client, "zeromq", ZeroMQClient(self._service.address, timeout=TIMEOUT_S))
            nursery.start_soon(self._ask_client, "zeromq too", ZeroMQClient(self._service.address, timeout=TIMEOUT_S))
            nursery.start_soon(self._ask_client, "rpc", RPCClient(self._rpc, timeout=TIMEOUT_S))
            nursery.start_soon(self._ask_http)

    async def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = self.answers.total() + count
        while self.answers.total() < wanted:
            await self._answered.wait()

    async def _ask_client(self, door: str, client: ZeroMQClient | RPCClient) -> None:
        async with client:
            while not self.is_over:
                began = time.monotonic()
                try:
                    async with client.stream(**PROMPT) as stream:
                        indices = [token.index async for token in stream]
                except GenbatchError as error:
                    self.errors.append(f"{door}: {error!r}")
                    continue
                if indices != [*range(len(indices))]:
                    self.errors.append(f"{door}: tokens {indices}")
                self._note(door, essence(stream.result), began)

    async def _ask_http(self) -> None:
        async with httpx2.AsyncClient(base_url=self._http, timeout=None, trust_env=False) as http:
            while not self.is_over:
                began = time.monotonic()
                try:
                    answer = await http.post("/v1/completions", json=PROMPT)
                except httpx2.HTTPError as error:
                    self.errors.append(f"http: {error!r}")
                    continue
                if answer.status_code != 200:
                    self.errors.append(f"http: {answer.status_code} {answer.text[:200]}")
                else:
                    self._note("http", answer.json()["choices"], began)

    def _note(self, door: str, answer: Any, began: float) -> None:
        self.answers[door] += 1
        self._answered.set()
        self._answered = trio.Event()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        if answer != self.expected.setdefault(door, answer):
            self.errors.append(f"{door}: {answer} in the place of {self.expected[door]}")


def finished_of(service: RunningService) -> int:
    """Return the number of ended requests in a service's log."""
    return service.log.count(" request.finished ")


async def run(services: list[RunningService], load: Load, takeovers: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        earlier = services[0]
        for number in range(takeovers):
            await load.more(ANSWERS_EACH)
            later = services[number + 1]
            await trio.to_thread.run_sync(later.__enter__)
            code = await trio.to_thread.run_sync(earlier.process.wait, TIMEOUT_S)
            if code != 0 or "took_over" not in later.log:
                load.errors.append(f"take-over {number}: the earlier service ended with {code}")
            earlier.__exit__(None, None, None)
            earlier = later
            if (number + 1) % TOLD_EVERY == 0:
                print(f"{number + 1}: {load.answers.total()} answers, {len(load.errors)} wrong", flush=True)
        load.is_over = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--takeovers", type=int, default=100)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    exit_on_sigterm()  # so that the services end, too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_RUNTIME_DIR"] = place
        rpc = f"unix://{place}/rpc.sock"
        flags = ["--rpc-bind", rpc, "--http", f"127.0.0.1:{port}", "--shutdown-timeout-s", "60"]
        services = []
        for number in range(given.takeovers + 1):
            own = [*flags, "--engine", ENGINES[number % len(ENGINES)], *(["--take-over"] if number else [])]
            services.append(RunningService(Path(given.model), Path(place), *own))
        services[0].__enter__()
        load = Load(services[0], rpc, f"http://127.0.0.1:{port}")
        try:
            run_trio(lambda: run(services, load, given.takeovers))
        finally:
            for service in services:
                if hasattr(service, "process") and service.process.poll() is None:
                    service.__exit__(None, None, None)
    finished = sum(map(finished_of, services))
    print(
        f"{given.takeovers} take-overs, {load.answers.total()} answers ({dict(load.answers)}), {finished} logged ends"
    )
    print(f"  {len(load.errors)} wrong, the longest answer took {load.longest_s:.2f} s")
    for what in load.errors:
        print(f"  wrong: {what}")
    raise SystemExit(bool(load.errors or finished != load.answers.total()))


if __name__ == "__main__":
    main()
