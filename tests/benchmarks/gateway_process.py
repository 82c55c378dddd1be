"""What is measured, in a process of its own: the ZeroMQ gateway before an engine that costs nothing, or a bare ROUTER.

    python tests/benchmarks/gateway_process.py gateway even ipc:///tmp/socket 50

Both make tokens by the same code on trio's clock and send the same bytes. The bare ROUTER does nothing else, so that
what its tokens are late by is libzmq's and the machine's. It prints "ready" and runs until its standard input ends.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import msgpack
import trio
import zmq

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import NOREPLY, From, GenServer, reply, start
from genbatch.proto.messages import Result, Token, Usage
from genbatch.proto.rpc import token_message

PEERS = ("gateway", "bare")
MODES = ("flood", "even", "steps")
PACED_TOKENS_PER_S = 2000
# Tokens of one stream: fewer than a gateway keeps for a client that falls behind.
STREAM_TOKENS = 500
TOKEN_ID = 7
# Milliseconds in which the bare ROUTER's clients are to ask.
ASKED_MS = 10_000


async def make_tokens(streams: list[Any], mode: str, clients: int) -> None:
    """At the mode's pace, until cancelled.

    Args:
        streams: each has `emit`, which sends its next token and returns whether it was the last; then it is removed.
    """
    interval = {"flood": 0.0, "even": 1 / PACED_TOKENS_PER_S, "steps": clients / PACED_TOKENS_PER_S}[mode]
    next_at, turn = trio.current_time(), 0
    while True:
        if mode == "even":
            turn += 1
            chosen = [streams[turn % len(streams)]] if streams else []
        else:
            chosen = list(streams)
        for stream in chosen:
            if stream.emit():
                streams.remove(stream)
        next_at += interval
        if interval:
            await trio.sleep_until(next_at)
        else:
            await trio.lowlevel.checkpoint()
            if not streams:
                await trio.sleep(0.001)


@dataclass(slots=True)
class EngineStream:
    """A request of the gateway's."""

    message: Generate
    from_: From[Any]
    sent: int = 0

    def emit(self) -> bool:
        """Calls back, as the Batcher does; the text tells when."""
        assert self.message.on_token is not None
        text = str(time.perf_counter_ns())
        self.message.on_token(Token(text=text, token_id=TOKEN_ID, index=self.sent))
        self.sent += 1
        if self.sent < STREAM_TOKENS:
            return False
        usage = Usage(prompt_tokens=1, completion_tokens=self.sent)
        reply(self.from_, Result(text="", token_ids=[], finish_reason="length", usage=usage))
        return True


class InstantEngine(GenServer):
    """In the Batcher's place: takes every request."""

    def __init__(self) -> None:
        self.streams: list[EngineStream] = []

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        self.streams.append(EngineStream(request, from_))
        return NOREPLY


async def serve_gateway(mode: str, address: str, clients: int) -> None:
    """Until cancelled."""
    async with trio.open_nursery() as nursery:
        engine = InstantEngine()
        gateway = ZeroMQGateway(Dispatcher(await start(nursery, engine, mailbox_size=4096)), address)
        await nursery.start(gateway.run)
        print("ready", flush=True)
        await make_tokens(engine.streams, mode, clients)


@dataclass(slots=True)
class BareStream:
    """A client of the bare ROUTER; its answer never ends, but counts its tokens like those that do."""

    router: "zmq.Socket[bytes]"
    identity: bytes
    msgid: int
    sent: int = 0

    def emit(self) -> bool:
        """Sends the token at once."""
        text = str(time.perf_counter_ns())
        message = token_message([self.msgid, self.sent % STREAM_TOKENS, TOKEN_ID, text])
        self.router.send_multipart([self.identity, message], zmq.NOBLOCK)
        self.sent += 1
        return False


async def serve_bare(mode: str, address: str, clients: int) -> None:
    """Until cancelled."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = ASKED_MS
        router.bind(address)
        print("ready", flush=True)
        streams = []
        while len(streams) < clients:
            identity, request = router.recv_multipart()
            streams.append(BareStream(router, identity, msgpack.unpackb(request)[1]))
        await make_tokens(streams, mode, clients)


async def main(peer: str, mode: str, address: str, clients: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon({"gateway": serve_gateway, "bare": serve_bare}[peer], mode, address, clients)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:4], int(sys.argv[4]))
