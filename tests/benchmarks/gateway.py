"""What the ZeroMQ gateway sustains and what it adds to a token, behind an engine that costs nothing.

    python tests/benchmarks/gateway.py [--seconds 10] [--clients 50]

The gateway has one core to itself, the clients another. First as many tokens as it takes, each in a message of its own.
Then 2,000 tokens a second, evenly spaced and in steps of one token for every client, with the time from the engine's
callback until the client has the message. How late that is depends on the machine more than on the gateway, so rounds
take turns with those of a bare ROUTER that is paced alike and sends the same, and the difference is what the gateway
adds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from gateway_clients import GatewayClients
from gateway_process import PEERS

from genbatch.clients.bench.runs import percentile

PROCESS = Path(__file__).with_name("gateway_process.py")
GOAL_PER_S, GOAL_ADDED_P99_MS = 20_000, 1.0
ROUNDS = 5
WARM_UP_S = 1.0


@contextmanager
def running(peer: str, mode: str, address: str, clients: int, core: int) -> Iterator[None]:
    """Runs gateway_process.py on that core."""
    command = [sys.executable, str(PROCESS), peer, mode, address, str(clients)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{peer} did not start")
            yield
        finally:
            process.kill()


def measure(peer: str, mode: str, count: int, seconds: float, core: int) -> tuple[float, list[float]]:
    """Tokens a second, and ages of paced ones in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{Path(directory) / 'socket'}"
        with running(peer, mode, address, count, core):
            clients = GatewayClients(address, count)
            try:
                clients.read(min(WARM_UP_S, seconds), timed=False)
                started_at = time.perf_counter()
                tokens, ages = clients.read(seconds, timed=mode != "flood")
                return tokens / (time.perf_counter() - started_at), ages
            finally:
                clients.close()


def compare(mode: str, count: int, seconds: float, core: int) -> dict[str, list[list[float]]]:
    """By peer: p50 and p99 of the ages of each round's tokens, in milliseconds."""
    figures: dict[str, list[list[float]]] = {peer: [] for peer in PEERS}
    for _ in range(ROUNDS):
        for peer in PEERS:
            _, ages = measure(peer, mode, count, seconds / ROUNDS, core)
            figures[peer].append([percentile(ages, percent) * 1e3 for percent in (50, 99)])
    return figures


def report(mode: str, figures: dict[str, list[list[float]]]) -> None:
    """Prints medians over the rounds, and the differences within a round."""
    for index, name in enumerate(("p50", "p99")):
        ours, floor = ([round[index] for round in figures[peer]] for peer in PEERS)
        added = [one - other for one, other in zip(ours, floor, strict=True)]
        goal = f", goal {GOAL_ADDED_P99_MS:g}" if (mode, name) == ("even", "p99") else ""
        print(
            f"{mode:5} {name}: gateway {median(ours):.2f} ms, bare ROUTER {median(floor):.2f} ms;"
            f" added {median(added):.2f} ms ({min(added):.2f} to {max(added):.2f}{goal})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, all its rounds together")
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))
    rate, _ = measure("gateway", "flood", options.clients, options.seconds, cores[0])
    print(f"{rate:,.0f} token messages/s to {options.clients} clients, the gateway on one core (goal {GOAL_PER_S:,})")
    print(f"at 2,000 tokens/s, evenly and in steps of {options.clients}, a token is late by (medians of {ROUNDS})")
    for mode in ("even", "steps"):
        report(mode, compare(mode, options.clients, options.seconds, cores[0]))
    if len(cores) == 1:
        print("there is one core only: the clients took their share of it")


if __name__ == "__main__":
    main()
