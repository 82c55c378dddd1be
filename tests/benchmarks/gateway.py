"""What the ZeroMQ gateway sustains and what it adds to a token, behind an engine that costs nothing.

    python tests/benchmarks/gateway.py [--seconds 10] [--clients 50]

The gateway has one core to itself, the clients another. They are plain DEALER sockets, so that what is measured is the
gateway's side: first as many tokens as it takes, each in a message of its own; then 2,000 tokens a second, evenly
spaced and in steps of one token for every client, with the time from the engine's callback until the client has the
message.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import trio
import zmq

from genbatch.actors.batching.batcher_messages import Generate
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.genserver import NOREPLY, From, GenServer, reply, start
from genbatch.clients.bench.percentile import percentile
from genbatch.proto.messages import Result, Token, Usage

# Tokens of one stream: fewer than a gateway keeps for a client that falls behind.
STREAM_TOKENS = 500
PACED_TOKENS_PER_S = 2000
GOAL_PER_S, GOAL_P99_S = 20_000, 1e-3
WARM_UP_S = 1.0
MODES = ("flood", "even", "steps")
TOKEN = 0x93  # the first byte of an array of three: a notification


@dataclass(slots=True)
class OpenStream:
    """A request and how far its answer is."""

    message: Generate
    from_: From[Any]
    sent: int = 0

    def emit(self) -> bool:
        """The next token, which tells when it was made; whether it was the last."""
        assert self.message.on_token is not None
        text = str(time.perf_counter_ns())
        self.message.on_token(Token(text=text, token_id=7, index=self.sent))
        self.sent += 1
        if self.sent < STREAM_TOKENS:
            return False
        usage = Usage(prompt_tokens=1, completion_tokens=self.sent)
        reply(self.from_, Result(text="", token_ids=[], finish_reason="length", usage=usage))
        return True


class InstantEngine(GenServer):
    """In the Batcher's place: takes every request and makes tokens at the mode's pace."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._streams: list[OpenStream] = []

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        self._streams.append(OpenStream(request, from_))
        return NOREPLY

    async def run(self, clients: int) -> None:
        """Makes tokens until cancelled."""
        interval = {"flood": 0.0, "even": 1 / PACED_TOKENS_PER_S, "steps": clients / PACED_TOKENS_PER_S}[self._mode]
        next_at, turn = trio.current_time(), 0
        while True:
            if self._mode == "even":
                turn += 1
                count = len(self._streams)
                chosen = [self._streams[turn % count]] if count else []
            else:
                chosen = list(self._streams)
            for stream in chosen:
                if stream.emit():
                    self._streams.remove(stream)
            next_at += interval
            if interval:
                await trio.sleep_until(next_at)
            else:
                await trio.lowlevel.checkpoint()
                if not self._streams:
                    await trio.sleep(0.001)


async def serve(address: str, mode: str, clients: int) -> None:
    """The gateway's process: until its standard input ends."""
    async with trio.open_nursery() as nursery:
        engine = InstantEngine(mode)
        ref = await start(nursery, engine, mailbox_size=4096)
        gateway = ZeroMQGateway(Dispatcher(ref), address)
        await nursery.start(gateway.run)
        nursery.start_soon(engine.run, clients)
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


@contextmanager
def gateway_process(address: str, mode: str, clients: int, core: int) -> Iterator[subprocess.Popen[str]]:
    """Runs `serve` on that core."""
    command = [sys.executable, __file__, "--serve", mode, "--address", address, "--clients", str(clients)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the gateway did not start")
        try:
            yield process
        finally:
            process.kill()


class Clients:
    """DEALER sockets, each with one stream open at a time."""

    def __init__(self, address: str, count: int) -> None:
        self._sockets = []
        self._poller = zmq.Poller()
        self._msgids = [0] * count
        for _ in range(count):
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.rcvhwm = 0
            socket.linger = 0
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        self._index = {socket: index for index, socket in enumerate(self._sockets)}
        for index in range(count):
            self._ask(index)

    def read(self, seconds: float, *, timed: bool) -> tuple[int, list[float]]:
        """Token messages that come within so many seconds, and if `timed` each one's age in seconds."""
        tokens, ages = 0, []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for socket, _ in self._poller.poll(100):
                try:
                    while True:
                        data = socket.recv(zmq.NOBLOCK)
                        if data[0] != TOKEN:
                            self._ended(self._index[socket], data)
                            continue
                        if timed:
                            now = time.perf_counter_ns()
                            message = msgpack.unpackb(data)
                            if message[1] != "token":
                                continue
                            ages.append((now - int(message[2][3])) * 1e-9)
                        tokens += 1
                except zmq.Again:
                    pass
        return tokens, ages

    def close(self) -> None:
        """Leaves."""
        for socket in self._sockets:
            socket.close()

    def _ended(self, index: int, data: bytes) -> None:
        message = msgpack.unpackb(data)
        if message[2] is not None:
            raise RuntimeError(f"a stream failed: {message[2]}")
        self._ask(index)

    def _ask(self, index: int) -> None:
        self._msgids[index] += 1
        self._sockets[index].send(msgpack.packb([0, self._msgids[index], "stream", [{"token_ids": [5]}]]))


def measure(mode: str, count: int, seconds: float, cores: list[int]) -> tuple[float, list[float]]:
    """Tokens a second, and ages of paced ones in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{Path(directory) / 'socket'}"
        with gateway_process(address, mode, count, cores[0]):
            clients = Clients(address, count)
            try:
                clients.read(min(WARM_UP_S, seconds), timed=False)
                started_at = time.perf_counter()
                tokens, ages = clients.read(seconds, timed=mode != "flood")
                return tokens / (time.perf_counter() - started_at), ages
            finally:
                clients.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve, options.address, options.serve, options.clients)
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))
    rate, _ = measure("flood", options.clients, options.seconds, cores)
    print(f"{rate:,.0f} token messages/s to {options.clients} clients, the gateway on one core (goal {GOAL_PER_S:,})")
    for mode in MODES[1:]:
        rate, ages = measure(mode, options.clients, options.seconds, cores)
        p50, p99 = percentile(ages, 50), percentile(ages, 99)
        goal = f" (goal {GOAL_P99_S * 1e3:.0f} ms)" if mode == "even" else ", a token for each client at once"
        print(f"{mode}: at {rate:,.0f} tokens/s a token is late by {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms{goal}")
    if len(cores) == 1:
        print("there is one core only: the clients took their share of it")


if __name__ == "__main__":
    main()
