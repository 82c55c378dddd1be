"""A ZeroMQ gateway that asks for keys, in front of a scripted Batcher, and raw clients for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import trio
import zmq

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.actors.security.curve_keys import ClientKeys, KeyStore
from genbatch.actors.security.security import Security, open_security
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher
from tests.waiting import received_until


@dataclass(frozen=True)
class Guarded:
    """The gateway and what its operator has."""

    batcher: ScriptedBatcher
    gateway: ZeroMQGateway
    store: KeyStore
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def client_key(self, name: str) -> str:
        """The file of a new client's keys, which are on the list."""
        return str(self.store.new_client(name))

    async def is_well(self, key: str) -> bool:
        """Whether an honest client with this key gets an answer."""
        async with dealer(self.address, key) as socket:
            return bool((await ask(socket, [0, 1, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab")


@asynccontextmanager
async def guarded(tmp_path: Path, *, address: str = "tcp://127.0.0.1:*") -> AsyncIterator[Guarded]:
    """Runs it for as long as the body runs, as `listening` does."""
    store = KeyStore(tmp_path / "keys")
    store.new_server()
    async with listening(address, open_security(keys=str(store.directory))) as (batcher, gateway):
        yield Guarded(batcher, gateway, store, gateway.address)


@asynccontextmanager
async def listening(address: str, security: Security) -> AsyncIterator[tuple[ScriptedBatcher, ZeroMQGateway]]:
    """A gateway with this security for as long as the body runs; PATIENCE_S at most."""
    batcher = ScriptedBatcher()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            gateway = ZeroMQGateway(Dispatcher(await start(nursery, batcher)), address, security)
            await nursery.start(gateway.run)
            yield batcher, gateway
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def dealer(
    address: str, client_key: str | None = None, *, identity: bytes | None = None
) -> AsyncIterator[ZeroMQSocket]:
    """A client that speaks plain msgpack, so that nothing of ours vouches for the bytes."""
    async with open_socket(zmq.DEALER) as socket:
        if client_key is not None:
            for option, value in ClientKeys.load(client_key).options():
                socket.set(option, value)
        if identity is not None:
            socket.set(zmq.IDENTITY, identity)
        socket.connect(address)
        yield socket


async def tell(socket: ZeroMQSocket, message: Any) -> None:
    await socket.send([msgpack.packb(message)])


async def hear(socket: ZeroMQSocket) -> Any:
    (data,) = await socket.recv()
    return msgpack.unpackb(data, strict_map_key=False)


async def ask(socket: ZeroMQSocket, message: Any) -> Any:
    await tell(socket, message)
    return await hear(socket)


async def until_closed(stream: trio.SocketStream) -> None:
    """Reads until the service has ended the connection."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        return


async def zmtp_stream(port: int) -> trio.SocketStream:
    """A connection that is through with ZeroMQ's handshake without keys, byte by byte."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    await stream.send_all(b"\x04" + bytes([len(ready)]) + ready)
    await received_until(stream, b"ROUTER")
    return stream
