"""RPCGateway: takes requests of msgpack-RPC clients over TCP and Unix sockets.

    gateway = RPCGateway(Dispatcher(batcher), "unix:///run/genbatch/rpc.sock")
    await nursery.start(gateway.run)
    print(gateway.address)

The same sessions, methods and limits as over ZeroMQ; here a connection's end tells at once that its client is gone.
"""

import logging
import socket
import ssl
from itertools import count
from pathlib import Path

import trio

from genbatch.actors.gateways.connection_limit import ConnectionLimit, Seat, max_connections
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_address import check_rpc_address, listen, listening_address
from genbatch.actors.gateways.rpc_connection import HELLO_S, RPCConnection
from genbatch.actors.gateways.rpc_hello import Authenticate
from genbatch.actors.gateways.security import Security
from genbatch.actors.gateways.zeromq_gateway import MAX_LEASE_S
from genbatch.proto.errors import Cancelled, Unavailable

logger = logging.getLogger(__name__)

# Seconds between looks for clients that are silent or read nothing.
SWEEP_S = 0.5
# Seconds of silence after which the kernel asks whether the other machine is still there, and how often it does.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 5, 2, 3
RETRY_AFTER_FULL_MS = 1000


class RPCGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: what the methods do.
        address: unix://PATH, or tcp://HOST:PORT; a port of 0 or "*" is chosen.
        security: its `tokens` are asked for, and its `tls` encrypts TCP. Without both HOST must be this machine's own.
    """

    def __init__(self, dispatcher: Dispatcher, address: str, security: Security | None = None) -> None:
        self.address = address
        self._dispatcher = dispatcher
        self._security = security or Security()
        self._connections: set[RPCConnection] = set()
        self._names = count(1)
        self._limit = ConnectionLimit(max_connections())
        self._calls: trio.Nursery

    @property
    def num_calls(self) -> int:
        """Calls that have not ended, of all clients."""
        return sum(connection.session.num_calls for connection in self._connections if connection.session)

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, then ends every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot or must not listen there.
        """
        path = check_rpc_address(self.address, lacking=self._security.lacking_for_tokens)
        listeners = await listen(self.address, path)
        self.address = listening_address(self.address, listeners[0])
        async with trio.open_nursery() as nursery:
            stopping = trio.Event()
            calls_ended = trio.Event()
            self._calls = await nursery.start(_host, stopping, calls_ended)
            handlers = await nursery.start(_host, calls_ended, trio.Event())
            nursery.start_soon(self._end, path, stopping, calls_ended)
            nursery.start_soon(self._sweep)
            task_status.started(self.address)
            await trio.serve_listeners(self._serve, listeners, handler_nursery=handlers)

    async def _end(self, path: Path | None, stopping: trio.Event, calls_ended: trio.Event) -> None:
        """Waits to be cancelled, then ends calls, sends their finals, and ends connections."""
        try:
            await trio.sleep_forever()
        finally:
            if path is not None:  # before anything is waited for: the next service may be about to make its own
                path.unlink(missing_ok=True)  # noqa: ASYNC240 - one entry of a directory, and nothing may be awaited here
            with trio.CancelScope(shield=True):
                for connection in self._connections:
                    connection.cancel_all(Unavailable("the service is stopping"))
                stopping.set()
                await calls_ended.wait()
                for connection in self._connections:
                    connection.stop()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One client, from its connection to its end; raises nothing."""
        authenticate: Authenticate | None = None
        if self._security.tokens is not None:
            authenticate = self._security.tokens.tenant
        try:
            async with stream:
                # Pushed out before the client has said anything that makes sense: nothing is lost.
                with trio.CancelScope() as scope, self._limit.seat(scope.cancel) as seat:
                    secured = await self._secured(stream)
                    if secured is None:
                        return
                    connection = RPCConnection(
                        secured,
                        self._dispatcher,
                        self._calls,
                        client=f"rpc:{next(self._names)}",
                        authenticate=authenticate,
                        on_sense=seat.settle,
                    )
                    await self._host(connection, seat)
        except Exception:  # our own bug ends one connection, not the gateway
            logger.exception("a connection failed")

    async def _host(self, connection: RPCConnection, seat: Seat) -> None:
        """A connection that is through with its handshake, until its end."""
        self._connections.add(connection)
        try:
            if seat.is_refused:
                reason = f"{self._limit.most} clients are connected, more are not taken"
                connection.refuse(b"", Unavailable(reason, retry_after_ms=RETRY_AFTER_FULL_MS))
                connection.stop()
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream | None:
        """The stream, encrypted where that is asked for; None if the client does not do its part of it."""
        if stream.socket.family == socket.AF_UNIX:
            return stream
        _keep_alive(stream)
        if self._security.tls is None:
            return stream
        encrypted = trio.SSLStream(stream, self._security.tls, server_side=True, https_compatible=True)
        with trio.move_on_after(HELLO_S):
            try:
                await encrypted.do_handshake()
            except (trio.BrokenResourceError, ssl.SSLError, ssl.CertificateError):
                return None
            return encrypted
        return None

    async def _sweep(self) -> None:
        """Cancels calls of clients that are silent or do not read, confirms those of others."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            late = now - last - SWEEP_S  # while the event loop was held up nobody could be heard
            last = now
            for connection in self._connections:
                connection.last_heard += late
                check_connection(connection, now)


async def _host(ending: trio.Event, ended: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """A nursery that outlives what is cancelled around it: until `ending`, and then until its tasks have ended."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await ending.wait()
    ended.set()


def check_connection(connection: RPCConnection, now: float) -> None:
    session = connection.session
    if session is None:
        return
    session.check_stalled(now)
    if session.lease_s is None or not session.num_calls:
        return
    lease_s = min(session.lease_s, MAX_LEASE_S)
    if now - connection.last_heard > lease_s:
        session.cancel_all(Cancelled(f"the client was not heard for {lease_s:g} s"))
    else:
        session.heartbeat()


def _keep_alive(stream: trio.SocketStream) -> None:
    """Lets the kernel find out about a machine that is gone without a word."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
