"""ZeroMQGateway: takes requests over ZeroMQ, one call of the Batcher for each, and sends tokens and finals back.

    gateway = ZeroMQGateway(Dispatcher(batcher), "ipc:///run/genbatch/zeromq.sock")
    await nursery.start(gateway.run)
    print(gateway.address)

A ROUTER socket: DEALER clients stream and have many calls open, REQ clients get one final for each request. Each
call is a task with a cancel scope. It is cancelled when the client says so, when ZeroMQ says that the client is gone,
when a client that promised to be heard is silent for too long, and when a client does not read what it is sent.
"""

import os
from functools import partial
from pathlib import Path

import trio
import zmq

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_session import RPCSession
from genbatch.actors.gateways.zeromq_address import AddressError, prepare_address
from genbatch.actors.gateways.zeromq_peer import ZeroMQPeer
from genbatch.actors.gateways.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.proto.errors import Cancelled, Unavailable
from genbatch.proto.limits import MAX_TRANSPORT_BYTES

# Messages taken before other tasks run.
MESSAGES_PER_TURN = 64
# Seconds. How often silence is looked for and live calls are confirmed; how long a client may be silent at most.
SWEEP_S = 1.0
DEFAULT_LEASE_S, MAX_LEASE_S = 3.0, 60.0
# Seconds between attempts to send to clients that are slow to read: a ROUTER does not tell when one has room again.
RETRY_S = 0.01
# Seconds after which a client that reads nothing is taken for gone.
STALLED_S = 10.0
# Milliseconds in which the last finals may leave.
LINGER_MS = 500


class ZeroMQGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: what the methods do.
        address: ipc://PATH, or tcp://HOST:PORT with a host of this machine's own; a port of "*" is chosen.
    """

    def __init__(self, dispatcher: Dispatcher, address: str) -> None:
        self.address = address
        self._dispatcher = dispatcher
        self._peers: dict[bytes, ZeroMQPeer] = {}
        self._backlog = trio.Event()
        self._socket: ZeroMQSocket
        self._calls: trio.Nursery

    @property
    def num_calls(self) -> int:
        """Calls that have not ended, of all clients."""
        return sum(peer.session.num_calls for peer in self._peers.values())

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, then ends every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot or must not listen there.
        """
        path = prepare_address(self.address)
        async with open_socket(zmq.ROUTER, linger_ms=LINGER_MS) as self._socket:
            self._listen(path)
            try:
                async with trio.open_nursery() as nursery:
                    stopping = trio.Event()
                    self._calls = await nursery.start(self._host_calls, stopping)
                    try:
                        await self._serve(task_status)
                    finally:
                        for peer in self._peers.values():
                            peer.session.cancel_all(Unavailable("the service is stopping"))
                        stopping.set()
            finally:
                for peer in list(self._peers.values()):
                    self._flush(peer)
                if path is not None:
                    path.unlink(missing_ok=True)

    async def _host_calls(self, stopping: trio.Event, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """The nursery that calls run in. Shielded, because each ends by its own scope and then sends its final."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await stopping.wait()

    def _listen(self, path: Path | None) -> None:
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_TRANSPORT_BYTES)
        if self.address.startswith("tcp://["):
            self._socket.set(zmq.IPV6, 1)
        umask = os.umask(0o177)  # only its owner may connect to the file
        try:
            self.address = self._socket.bind(self.address if path is None else f"ipc://{path}")
        except zmq.ZMQError as error:
            raise AddressError(self.address, str(error)) from error
        finally:
            os.umask(umask)

    async def _serve(self, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            nursery.start_soon(self._drain)
            task_status.started(self.address)
            while True:
                for frames in await self._socket.recv_many(MESSAGES_PER_TURN):
                    self._receive(frames)
                await trio.lowlevel.checkpoint()

    def _receive(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._meet(identity)
        peer.last_heard = trio.current_time()
        peer.delimited = len(rest) > 1 and not rest[0]
        message = rest[1:] if peer.delimited else rest
        # Several frames make no message; the decoder says so of an empty one.
        peer.session.receive(message[0] if len(message) == 1 else b"", may_stream=not peer.delimited)

    def _meet(self, identity: bytes) -> ZeroMQPeer:
        peer = ZeroMQPeer(identity, trio.current_time())
        peer.session = RPCSession(
            self._dispatcher, self._calls, partial(self._send, peer), client=f"zeromq:{identity.hex()}"
        )
        self._peers[identity] = peer
        return peer

    def _send(self, peer: ZeroMQPeer, message: bytes, is_final: bool) -> None:
        peer.post(message, is_final, partial(self._try_send, peer), trio.current_time())
        if peer.is_gone:
            self._forget(peer)
        elif peer.outbox:
            self._backlog.set()

    def _try_send(self, peer: ZeroMQPeer, frames: list[bytes]) -> bool:
        """Whether the message needs no further attempt: it was taken, or nobody is there to take it."""
        try:
            return self._socket.try_send(frames)
        except (zmq.ZMQError, trio.ClosedResourceError):  # EHOSTUNREACH; nothing else is known to happen
            peer.leave()
            return True

    def _flush(self, peer: ZeroMQPeer) -> None:
        peer.flush(partial(self._try_send, peer), trio.current_time())
        if peer.is_gone:
            self._forget(peer)

    def _forget(self, peer: ZeroMQPeer) -> None:
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]

    async def _drain(self) -> None:
        """Sends what slow readers left waiting."""
        while True:
            await self._backlog.wait()
            waiting = [peer for peer in self._peers.values() if peer.outbox]
            if not waiting:
                self._backlog = trio.Event()
                continue
            for peer in waiting:
                self._flush(peer)
            await trio.sleep(RETRY_S)

    async def _sweep(self) -> None:
        """Cancels calls of silent clients, confirms those of others, forgets the idle."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            late = now - last - SWEEP_S  # while the event loop was held up nobody could be heard
            last = now
            for peer in list(self._peers.values()):
                peer.last_heard += late
                self._check(peer, now)

    def _check(self, peer: ZeroMQPeer, now: float) -> None:
        session = peer.session
        silent_s = now - peer.last_heard
        if peer.blocked_since is not None and now - peer.blocked_since > STALLED_S:
            peer.leave()
        lease_s = None if session.lease_s is None else min(session.lease_s, MAX_LEASE_S)
        if peer.is_gone or (peer.is_idle and silent_s > (lease_s or DEFAULT_LEASE_S)):
            self._forget(peer)
        elif lease_s is not None and silent_s > lease_s:
            session.cancel_all(Cancelled(f"the client was not heard for {lease_s:g} s"))
        elif lease_s is not None and session.num_calls and not peer.delimited:
            session.heartbeat()
