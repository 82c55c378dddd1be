"""HTTPGateway: OpenAI's API and a page to try it, over HTTP/1.1.

    gateway = HTTPGateway(Dispatcher(batcher), parse_http_address(":8000"))
    await nursery.start(gateway.run)
    print(gateway.address)

Listening, TLS, the number of connections and the end of all of them are here; a connection's own life is in
`connection.py`.
"""

import logging
import ssl
from pathlib import Path

import trio

from genbatch.actors.gateways.accepting import accept_from
from genbatch.actors.gateways.addresses import HTTPAddress
from genbatch.actors.gateways.connection_limit import ConnectionLimit, Seat, max_connections
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.app import make_app, make_metrics_app
from genbatch.actors.gateways.http.batch_runner import BatchRunner
from genbatch.actors.gateways.http.batch_store import BatchStore
from genbatch.actors.gateways.http.connection import HTTPConnection, Peers
from genbatch.actors.gateways.http.service_calls import HTTPCalls, OpenCalls
from genbatch.actors.gateways.listening import Door, ListeningSockets, as_listeners
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, check_bind

logger = logging.getLogger(__name__)

# Seconds to shake hands for TLS.
HANDSHAKE_S = 10.0
# Seconds in which ended calls may still tell their clients so.
GRACE_S = 1.0


class HTTPGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: what the methods do.
        address: where.
        security: who is let in, and the certificate; nothing of it is needed on a loopback interface.
        only_metrics: whether there is nothing but counters and health, for everybody who reaches the address.
        strict: whether a field that no API has published is refused.
        batch_dir: where files and batches are kept; None keeps none.
        takes_over: whether another service may have that directory for a while.
        sockets: where it listens; None opens a socket for this gateway alone.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: HTTPAddress,
        security: Security | None = None,
        *,
        only_metrics: bool = False,
        strict: bool = False,
        batch_dir: Path | None = None,
        takes_over: bool = False,
        sockets: ListeningSockets | None = None,
    ) -> None:
        security = security or Security()
        if not only_metrics:
            check_bind("http", address.url(tls=False), address.host, lacking=security.lacking_for_http)
        self._wanted = address
        self._door: Door = "metrics" if only_metrics else "http"
        self._sockets = ListeningSockets() if sockets is None else sockets
        self._owns_sockets = sockets is None
        self._accepting = trio.CancelScope()
        self._is_retiring = False
        self._tls: ssl.SSLContext | None = None if only_metrics else security.tls
        self.address = address.url(tls=self._tls is not None)
        self._open_calls = OpenCalls()
        self._connections: set[HTTPConnection] = set()
        self._limit = ConnectionLimit(max_connections())
        calls = HTTPCalls(dispatcher)
        self._batches: BatchRunner | None = None
        if batch_dir is not None:
            self._batches = BatchRunner(BatchStore(batch_dir, waits=takes_over), calls)
        if only_metrics:
            self._app = make_metrics_app(calls)
        else:
            only_loopback = address.is_loopback
            self._app = make_app(
                calls,
                self._open_calls,
                security,
                only_loopback=only_loopback,
                strict=strict,
                batches=self._batches,
            )

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, then ends every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot listen there.
        """
        listeners = await self._listen()
        async with trio.open_nursery() as nursery:
            stopping = trio.Event()
            connections: trio.Nursery = await nursery.start(self._host_connections, stopping)
            if self._batches is not None:
                nursery.start_soon(self._batches.run)
            try:
                task_status.started(self.address)
                with self._accepting:
                    await accept_from(listeners, self._serve, connections)
                await trio.sleep_forever()  # retired
            finally:
                if self._batches is not None:
                    self._batches.stop()
                if self._owns_sockets:
                    self._sockets.close()
                self._open_calls.stop()
                for connection in self._connections:
                    connection.stop()
                stopping.set()

    async def _listen(self) -> list[trio.SocketListener]:
        wanted = self._wanted
        try:
            await self._sockets.open(self._door, wanted.tcp)
        except AddressError as error:  # a name that nobody knows is one too
            raise AddressError(self.address, error.reason) from error
        listening = self._sockets.copies(self._door)
        port = listening[0].getsockname()[1]
        self.address = HTTPAddress(wanted.host, port).url(tls=self._tls is not None)
        return as_listeners(listening)

    @property
    def num_connections(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    def retire(self) -> None:
        """Accept no more connections, and close each after its next answer: another service has the sockets."""
        self._is_retiring = True
        self._accepting.cancel()
        if self._batches is not None:
            self._batches.stop()
        for connection in self._connections:
            connection.retire()

    async def _host_connections(self, stopping: trio.Event, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """The nursery that connections live in. Shielded, because each has its last words when the gateway stops."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as late:
                async with trio.open_nursery() as connections:
                    task_status.started(connections)
                    await stopping.wait()
                    late.start_soon(_cancel_late, connections.cancel_scope)
                late.cancel_scope.cancel()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One connection's life."""
        try:
            # Pushed out while none of its requests is under way.
            with trio.CancelScope() as scope, self._limit.seat(scope.cancel) as seat:
                if not seat.is_refused:
                    await self._serve_seated(stream, seat)
        except Exception:
            # What one client brought about must not end the others.
            logger.exception("a connection failed")

    async def _serve_seated(self, stream: trio.SocketStream, seat: Seat) -> None:
        try:
            peers = Peers.of(stream.socket, "http" if self._tls is None else "https")
            secured = stream if self._tls is None else await _encrypted(stream, self._tls)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            return  # the client has gone, or does not speak TLS
        connection = HTTPConnection(secured, stream.socket, self._app, peers, seat)
        self._connections.add(connection)
        if self._is_retiring:
            connection.retire()
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)


async def _encrypted(stream: trio.SocketStream, tls: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    """Raises:
    trio.BrokenResourceError, trio.TooSlowError: no handshake came about.
    """
    encrypted = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    with trio.fail_after(HANDSHAKE_S):
        await encrypted.do_handshake()
    return encrypted


async def _cancel_late(connections: trio.CancelScope) -> None:
    """Ends what still runs after a while, such as the task of a client that does not read."""
    await trio.sleep(GRACE_S)
    connections.cancel()
