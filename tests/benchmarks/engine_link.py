"""What the link to an engine process costs: CPU time of a step's tokens, with the link and without.

    python tests/benchmarks/engine_link.py --sequences 64 --steps 500 --step-ms 10

A stand-in for the Batcher hands out one token of each sequence a step; there is no model. Without the link, tokens go
to a function in the same process. With it, they cross a socketpair to another process, as in `genbatch serve`, and go
to such a function there. The engine's side adds to a step; the gateway's side is another core's.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from typing import Any

import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import Join
from genbatch.actors.engine.link import EngineSession, FrameStream
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.actors.runtime.actor import NOREPLY, ActorRef, From, GenServer, reply, start
from genbatch.proto.messages import GenerateRequest, Result, Token, Usage
from genbatch.proto.service_messages import Health, HealthRequest, Models

RESULT = Result(text="", token_ids=[], finish_reason="length", usage=Usage(prompt_tokens=1, completion_tokens=1))
TEXTS = (" the", " of", " answer", "ing", ",")


class Tokens(GenServer):
    """Hands out tokens at the pace it is told."""

    def __init__(self) -> None:
        self.open: list[tuple[Generate, From[Any]]] = []
        self.arrived = trio.Event()

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if isinstance(request, HealthRequest):
            return Health(status="ready", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)
        self.open.append((request, from_))
        self.arrived.set()
        self.arrived = trio.Event()
        return NOREPLY

    def step(self, index: int) -> None:
        text = TEXTS[index % len(TEXTS)]
        for message, _ in self.open:
            assert message.on_token is not None
            message.on_token(Token(text=text, token_id=index % 49152, index=index))

    def finish(self) -> None:
        for _, from_ in self.open:
            reply(from_, RESULT)


async def pace(tokens: Tokens, sequences: int, steps: int, step_s: float) -> float:
    """Seconds of this process's CPU time a step."""
    while len(tokens.open) < sequences:
        await tokens.arrived.wait()
    began = time.process_time()
    for index in range(steps):
        tokens.step(index)
        await trio.sleep(step_s)
    spent = time.process_time() - began
    tokens.finish()
    return spent / steps


async def ask(ref: ActorRef | RemoteBatcher, sequences: int) -> None:
    """As many streams, to their ends."""
    async with trio.open_nursery() as nursery:
        for number in range(sequences):
            message = Generate(GenerateRequest(prompt=f"{number}"), lambda token: None)
            nursery.start_soon(lambda message=message: ref.call(message, timeout=None))


async def without_link(sequences: int, steps: int, step_s: float) -> float:
    tokens = Tokens()
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, tokens)
        nursery.start_soon(ask, ref, sequences)
        spent = await pace(tokens, sequences, steps, step_s)
        await ref.stop()
    return spent


async def engine_side(fd: int, sequences: int, steps: int, step_s: float) -> float:
    tokens = Tokens()
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, tokens)
        nursery.start_soon(EngineSession(ref, FrameStream(socket.socket(fileno=fd))).run)
        spent = await pace(tokens, sequences, steps, step_s)
        await trio.sleep(0.5)  # the ends leave
        nursery.cancel_scope.cancel()
    return spent


async def gateway_side(end: socket.socket, sequences: int, steps: int) -> float:
    async with trio.open_nursery() as nursery:
        link = RemoteBatcher(BatcherOptions(n_parallel=sequences), lambda reason: None)
        await nursery.start(link.run)
        await link.send(Join(1, Models(models=())), end)
        began = time.process_time()
        await ask(link, sequences)
        spent = time.process_time() - began
        nursery.cancel_scope.cancel()
    return spent / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    step_s = given.step_ms / 1000
    if given.engine is not None:
        print(json.dumps(trio.run(engine_side, given.engine, given.sequences, given.steps, step_s)))
        return
    alone = trio.run(without_link, given.sequences, given.steps, step_s)
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--engine", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
    ) as engine:
        theirs.close()
        gateway = trio.run(gateway_side, ours, given.sequences, given.steps)
        linked = json.loads(engine.communicate()[0])
    added = linked - alone
    print(f"{given.sequences} sequences, {given.steps} steps, CPU time a step:")
    print(f"  without the link   {alone * 1e6:7.0f} us")
    print(
        f"  engine's side      {linked * 1e6:7.0f} us, {added * 1e6:.0f} us more: 2% of a step of {added * 5e4:.1f} ms"
    )
    print(f"  gateway's side     {gateway * 1e6:7.0f} us, on another core")


if __name__ == "__main__":
    main()
