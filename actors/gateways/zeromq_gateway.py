"""ZeroMQGateway: takes requests over ZeroMQ, one call of the Batcher for each, and sends tokens and finals back.

    gateway = ZeroMQGateway(Dispatcher(batcher), "ipc:///run/genbatch/zeromq.sock")
    await nursery.start(gateway.run)
    print(gateway.address)

The gateway is a ROUTER socket: DEALER clients stream and have many calls open, REQ clients get one final for each
request. Each call is a task with a cancel scope. A call is cancelled when its client cancels it, is gone, or does not
read its messages. A client with a lease also loses its calls after too long a silence. A ZeroMQPeer is one client's
state: its calls, and its unsent messages.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio
import zmq

from genbatch.actors.gateways.accepting import Peer, account_of_descriptor
from genbatch.actors.gateways.addresses import check_address
from genbatch.actors.gateways.dispatcher import RETRY_AFTER_RESTART_MS, Dispatcher
from genbatch.actors.gateways.listening import LentSocket, ListeningSockets, address_of
from genbatch.actors.gateways.session import MAX_WAITING, CallHost, Outbox, RPCSession, lease_over
from genbatch.actors.gateways.zeromq_guard import ZeroMQGuard, is_numbered, open_guard
from genbatch.actors.runtime.zeromq_socket import Signed, ZeroMQSocket, open_socket
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security
from genbatch.proto.codec import MAX_TRANSPORT_BYTES
from genbatch.proto.errors import Cancelled, Unauthenticated, Unavailable


class ZeroMQPeer:
    """One client of the gateway.

    Args:
        identity: its routing id, chosen by the client.
        key: its CURVE key, in Z85; "" at a gateway without keys.
        connection: file descriptor of its connection.
        now: the time of its first message, in seconds on the event loop's clock.
    """

    __slots__ = (
        "blocked_since",
        "connection",
        "delimited",
        "identity",
        "is_gone",
        "key",
        "last_heard",
        "outbox",
        "session",
    )

    def __init__(self, identity: bytes, key: str, connection: int, now: float) -> None:
        self.identity = identity
        self.key = key
        self.connection = connection
        self.session: RPCSession  # its calls
        self.delimited = False  # it is a REQ socket: messages have an empty first frame
        self.last_heard = now
        self.is_gone = False
        self.blocked_since: float | None = None  # since then it has taken no message
        self.outbox = Outbox()

    @property
    def is_idle(self) -> bool:
        """True if it has no open call and no unsent message."""
        return self.session.num_calls == 0 and not self.outbox

    def frames(self, message: bytes) -> list[bytes]:
        """Return `message` in the frames that this client expects."""
        return [self.identity, b"", message] if self.delimited else [self.identity, message]

    def flush(self, try_send: Callable[[list[bytes]], bool], now: float) -> bool:
        """Send waiting messages until the client takes no more; return whether all were sent.

        A client with too many unread messages loses its calls and its waiting tokens, but not its finals. A client with
        too many unread finals gets no messages any more.
        """
        while (message := self.outbox.head()) is not None:
            if not try_send(self.frames(message)):
                if self.blocked_since is None:
                    self.blocked_since = now
                self._bound()
                return not self.outbox
            self.blocked_since = None
            if self.outbox:  # empty if the client was found gone
                self.outbox.pop()
        return True

    def _bound(self) -> None:
        if self.outbox.is_full:
            self.outbox.drop_tokens()
            self.session.cancel_all(Cancelled(f"the client leaves more than {MAX_WAITING} messages unread"))
        if self.outbox.is_full:
            self.leave()

    def leave(self) -> None:
        """Cancel the calls of a client that is gone, and drop its messages."""
        self.is_gone = True
        self.outbox.clear()
        self.session.cancel_all(Cancelled("the client is gone"))


logger = logging.getLogger(__name__)

# Messages taken before other tasks run.
MESSAGES_PER_TURN = 64
# The byte limit of one turn: reading a megabyte takes milliseconds, and 64 of them would delay all clients.
BYTES_PER_TURN = 2**17
# Seconds between checks for silent clients, which also confirm live calls; and the default and longest lease.
SWEEP_S = 1.0
DEFAULT_LEASE_S, MAX_LEASE_S = 3.0, 60.0
# Seconds between attempts to send to slow readers: a ROUTER does not report when a client has room again.
RETRY_S = 0.01
# Seconds after which a client that does not read counts as gone.
STALLED_S = 10.0
# Milliseconds for the last finals to leave.
LINGER_MS = 500


class ZeroMQGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: runs the methods.
        address: ipc://PATH, or tcp://HOST:PORT; a port of "*" is chosen.
        security: the access control. Without keys, HOST must be loopback.
        sockets: the listening sockets; None opens a socket for this gateway alone.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: str,
        security: Security | None = None,
        *,
        sockets: ListeningSockets | None = None,
    ) -> None:
        self.address = address
        self._sockets = ListeningSockets() if sockets is None else sockets
        self._owns_sockets = sockets is None
        self._lent: list[LentSocket] = []
        self._dispatcher = dispatcher
        self._security = security or Security()
        self._peers: dict[bytes, ZeroMQPeer] = {}
        self._peers_by_connection: dict[int, ZeroMQPeer] = {}
        self._guard: ZeroMQGuard
        self._dirty: dict[ZeroMQPeer, None] = {}  # peers with new messages
        self._slow: set[ZeroMQPeer] = set()  # peers that did not take all messages
        self._wake = trio.Event()  # set when a peer is dirty
        self._backlog = trio.Event()  # set when a peer is slow
        self._socket: ZeroMQSocket
        self._calls: CallHost

    @property
    def num_calls(self) -> int:
        """The number of open calls, of all clients."""
        return sum(peer.session.num_calls for peer in self._peers.values())

    @property
    def num_connections(self) -> int:
        """The number of connected clients."""
        return len(self._guard.connections)

    def retire(self) -> None:
        """Accept no more connections, and tell clients to reconnect, since another service has the sockets."""
        self._part_from(self._guard.connections.ended())
        if self._guard.connections.has_accepted:
            for lent in self._lent:
                lent.stop_accepting()
        else:  # libzmq may not poll them yet, and unbinding ends no connection
            for lent in self._lent:
                self._socket.unbind(lent.endpoint)
                lent.give_up()
            self._lent.clear()
        self._calls.is_retiring = True
        for peer in self._peers.values():
            peer.session.go_away()

    def hand_over(self) -> None:
        """End the open calls after `retire`; clients continue them at the other service."""
        for peer in self._peers.values():
            peer.session.hand_over()

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then end every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot or must not listen there.
        """
        check_address("bind", self.address, lacking=self._security.lacking_for_zeromq)
        await self._sockets.open("zeromq", self.address)
        async with (
            open_socket(zmq.ROUTER, linger_ms=LINGER_MS) as self._socket,
            open_guard(self._socket, self._security.keys) as self._guard,
        ):
            try:
                self._listen()
            except AddressError:
                self._stop_listening()
                raise
            self._guard.connections.listens_at(self.address)
            try:
                async with trio.open_nursery() as nursery:
                    stopping = trio.Event()
                    self._calls = CallHost(await nursery.start(self._host_calls, stopping))
                    try:
                        await self._serve(task_status)
                    except Exception:  # the supervisor restarts the gateway
                        self._calls.closing = Unavailable(
                            "the gateway is being restarted", retry_after_ms=RETRY_AFTER_RESTART_MS
                        )
                        raise
                    finally:
                        self._calls.closing = self._calls.closing or Unavailable("the service is stopping")
                        for peer in self._peers.values():
                            peer.session.cancel_all(self._calls.closing)
                        stopping.set()
            finally:
                for peer in list(self._peers.values()):
                    self._flush(peer)
                self._stop_listening()

    async def _host_calls(self, stopping: trio.Event, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Run the nursery of the calls, shielded: each call ends by its own scope and then sends its final."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await stopping.wait()

    def _listen(self) -> None:
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        # guard: identities are not handed over
        self._socket.set(zmq.ROUTER_HANDOVER, 0)
        # guard: cap on a frame, ZeroMQ
        self._socket.set(zmq.MAXMSGSIZE, MAX_TRANSPORT_BYTES)
        # With a bound, libzmq stops reading at the bound. If the client then resets its connection, with a PING among
        # the read bytes, libzmq 4.3.5 aborts the process (`!_io_error`, stream_engine_base.cpp). So the bounds are in
        # our own code: ZeroMQConnections.took and UnfinishedMessages.
        self._socket.set(zmq.RCVHWM, 0)
        if self.address.startswith("tcp://["):
            self._socket.set(zmq.IPV6, 1)
        for listening in self._sockets.copies("zeromq"):
            address = address_of(self.address, listening)
            lent = LentSocket(listening)
            self._lent.append(lent)
            self._socket.set(zmq.USE_FD, lent.descriptor)
            try:
                self.address = lent.endpoint = self._socket.bind(address)
            except zmq.ZMQError as error:
                raise AddressError(self.address, str(error)) from error

    def _stop_listening(self) -> None:
        for lent in self._lent:
            lent.close()
        self._lent.clear()
        if self._owns_sockets:
            self._sockets.close()

    async def _serve(self, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            nursery.start_soon(self._send_new)
            nursery.start_soon(self._send_again)
            nursery.start_soon(self._guard.run, self._part_from)
            nursery.start_soon(self._hold_while_full)
            task_status.started(self.address)
            while True:
                messages = await self._socket.recv_many_signed(MESSAGES_PER_TURN, BYTES_PER_TURN)
                self._guard.connections.unfinished.dropped(*self._socket.take_dropped())
                self._part_from(self._guard.connections.ended())
                for message in messages:
                    self._receive(message)
                if not self._socket.has_messages():
                    self._guard.connections.emptied()
                await trio.lowlevel.checkpoint()

    async def _hold_while_full(self) -> None:
        """Accept no new connections while the messages of others fill the room."""
        unfinished = self._guard.connections.unfinished
        while True:
            await unfinished.full.wait()
            async with trio.open_nursery() as nursery:
                for lent in self._lent:
                    nursery.start_soon(lent.hold)
                await unfinished.fits.wait()
                nursery.cancel_scope.cancel()

    def _receive(self, signed: Signed) -> None:
        connection = signed.connection
        if self._guard.connections.took(connection, signed.parts[0], signed.parts[1:]) and connection is not None:
            with self._fault_ends(connection):
                self._act(connection, signed)

    @contextmanager
    def _fault_ends(self, connection: int) -> Iterator[None]:
        """End a single client's connection after a fault of ours at this client's messages."""
        try:
            yield
        except Exception:
            logger.exception("a message of a client failed, and the client's connection is ended")
            self._guard.connections.end(connection)
            self._part_from([connection])

    def _act(self, connection: int, signed: Signed) -> None:
        identity, *rest = signed.parts
        peer = self._peers.get(identity)
        if peer is None or (peer.connection, peer.key) != (connection, signed.user_id):
            other = self._peers_by_connection.get(connection)
            # guard: messages of an ended connection beside its successor
            if other is not None and not _is_later(identity, other.identity):
                self._guard.connections.ignore(identity)
                return
            peer = self._meet(identity, connection, signed.user_id)
        peer.last_heard = trio.current_time()
        peer.delimited = len(rest) > 1 and not rest[0]
        message = rest[1:] if peer.delimited else rest
        # Several frames are no valid message; the decoder refuses the empty message in their place.
        data = message[0] if len(message) == 1 else b""
        # guard: keys taken off the list
        if self._guard.is_welcome(peer.key):
            peer.session.receive(data, may_stream=not peer.delimited)
        else:
            peer.session.cancel_all(_revoked())
            peer.session.refuse(data, _revoked())

    def _meet(self, identity: bytes, connection: int, key: str) -> ZeroMQPeer:
        """Return a peer for a connection's first message.

        An earlier peer with this identity or this descriptor has ended, since ROUTER_HANDOVER is off.
        """
        for former in (self._peers.get(identity), self._peers_by_connection.get(connection)):
            if former is not None:
                former.leave()
                self._forget(former)
        peer = ZeroMQPeer(identity, key, connection, trio.current_time())
        peer.session = RPCSession(
            self._dispatcher,
            self._calls,
            peer.outbox,
            partial(self._has_mail, peer),
            peer=Peer(f"zeromq:{identity.hex()}", account_of_descriptor(connection)),
            tenant=self._guard.tenant(key),
        )
        self._guard.connections.heard(connection, identity)
        self._peers[identity] = self._peers_by_connection[connection] = peer
        return peer

    def _part_from(self, ended: list[int]) -> None:
        """End the calls of clients with ended connections, before another client can take their identities."""
        for connection in ended:
            peer = self._peers_by_connection.get(connection)
            if peer is not None:
                peer.leave()
                self._forget(peer)

    def _has_mail(self, peer: ZeroMQPeer) -> None:
        """Send the client's messages soon, together with messages that come until then."""
        self._dirty[peer] = None
        self._wake.set()

    def _try_send(self, peer: ZeroMQPeer, frames: list[bytes]) -> bool:
        """Return True if the message needs no further attempt: it was taken, or the client is gone."""
        if self._guard.asks_for_keys:
            # Another client may have taken the identity, and must not get these tokens.
            self._part_from(self._guard.connections.ended())
            if peer.is_gone:
                return True
        try:
            return self._socket.try_send_unsettled(frames)
        except (zmq.ZMQError, trio.ClosedResourceError):  # EHOSTUNREACH; no other error is known here
            peer.leave()
            return True

    def _flush(self, peer: ZeroMQPeer) -> None:
        with self._fault_ends(peer.connection):
            self._send_waiting(peer)

    def _send_waiting(self, peer: ZeroMQPeer) -> None:
        if not peer.flush(partial(self._try_send, peer), trio.current_time()):
            self._slow.add(peer)
            self._backlog.set()
        if peer.is_gone:
            self._forget(peer)

    def _forget(self, peer: ZeroMQPeer) -> None:
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        if self._peers_by_connection.get(peer.connection) is peer:
            del self._peers_by_connection[peer.connection]

    async def _send_new(self) -> None:
        """Send the messages since the event loop's last turn: the busier the loop, the more go at once."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            dirty, self._dirty = self._dirty, {}
            for peer in dirty:
                self._flush(peer)
            self._socket.settle()

    async def _send_again(self) -> None:
        """Send the messages that slow readers left waiting."""
        while True:
            await self._backlog.wait()
            self._backlog = trio.Event()
            await trio.sleep(RETRY_S)
            slow, self._slow = self._slow, set()
            for peer in slow:
                self._flush(peer)
            self._socket.settle()

    async def _sweep(self) -> None:
        """Cancel calls of silent clients, confirm other clients' calls, and forget idle clients."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            late = now - last - SWEEP_S  # a delayed event loop heard no client
            last = now
            for peer in list(self._peers.values()):
                peer.last_heard += late
                with self._fault_ends(peer.connection):
                    self._check(peer, now)

    def _check(self, peer: ZeroMQPeer, now: float) -> None:
        session = peer.session
        silent_s = now - peer.last_heard
        if peer.blocked_since is not None and now - peer.blocked_since > STALLED_S:
            peer.leave()
        lease_s = None if session.lease_s is None else min(session.lease_s, MAX_LEASE_S)
        # guard: streams of keys taken off the list
        if not self._guard.is_welcome(peer.key):
            session.cancel_all(_revoked())
        session.check_stalled(now)
        if peer.is_gone or (peer.is_idle and silent_s > (lease_s or DEFAULT_LEASE_S)):
            self._forget(peer)
        # guard: lease, ZeroMQ
        elif lease_s is not None and silent_s > lease_s:
            session.cancel_all(lease_over(lease_s))
        elif lease_s is not None and session.num_calls and not peer.delimited:
            session.heartbeat()


def _is_later(identity: bytes, other: bytes) -> bool:
    """Return whether `identity` connected later than `other`, a client with the same descriptor.

    libzmq may deliver a connection's messages after its end, among messages of the next connection with the same
    descriptor. It numbers clients without an identity of their own.
    """
    if not (is_numbered(identity) and is_numbered(other)):
        return is_numbered(identity) or not is_numbered(other) or identity == other
    difference = int.from_bytes(identity[1:]) - int.from_bytes(other[1:])
    return difference % 2**32 < 2**31


def _revoked() -> Unauthenticated:
    return Unauthenticated("the key is no longer on the service's list")
