"""HTTPGateway: OpenAI's API and a page to try it, served by hypercorn over connections of our own.

    gateway = HTTPGateway(Dispatcher(batcher), parse_http_address(":8000"))
    await nursery.start(gateway.run)
    print(gateway.address)

hypercorn speaks HTTP on each connection; accepting them, bounding their number and their patience, and ending them
when the service stops is done here.
"""

import logging
import ssl

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from genbatch.actors.gateways.accepting import accept_from
from genbatch.actors.gateways.addresses import HTTPAddress
from genbatch.actors.gateways.connection_limit import ConnectionLimit, max_connections
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.app import make_app, make_metrics_app
from genbatch.actors.gateways.http.service_calls import HTTPCalls, OpenCalls
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, check_bind

logger = logging.getLogger(__name__)

# Seconds that a connection may be idle, and take for a request's headers.
IDLE_S = 15.0
# Seconds to shake hands for TLS.
HANDSHAKE_S = 10.0
# Bytes of a request's headers.
MAX_HEADER_BYTES = 16 * 1024
# Seconds in which ended calls may still tell their clients so.
GRACE_S = 1.0
# Seconds in which a client must make room for the next part. Without this bound one that stops reading, and stays,
# would hold its task for ever: hypercorn shields what it sends from cancellation.
STALLED_S = 10.0


class BoundedStream(trio.abc.HalfCloseableStream):
    """A socket's stream that is closed when a part cannot be sent in time.

    Args:
        stream: the connection.
        stalled_s: seconds for each part.
    """

    def __init__(self, stream: trio.SocketStream, stalled_s: float = STALLED_S) -> None:
        self._stream = stream
        self._stalled_s = stalled_s
        self.closed = trio.Event()

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket, for the addresses of both ends."""
        return self._stream.socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises:
        trio.BrokenResourceError: the peer does not read, or has gone.
        """
        with trio.move_on_after(self._stalled_s) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            await trio.aclose_forcefully(self)  # whoever waits to receive is told too
            raise trio.BrokenResourceError("the peer does not read")

    async def wait_send_all_might_not_block(self) -> None:
        """As the stream's."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As the stream's."""
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """As the stream's."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As the stream's."""
        self.closed.set()
        await self._stream.aclose()


class HTTPGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: what the methods do.
        address: where.
        security: who is let in, and the certificate; nothing of it is needed on a loopback interface.
        only_metrics: whether there is nothing but counters and health, for everybody who reaches the address.
        strict: whether a field that no API has published is refused.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: HTTPAddress,
        security: Security | None = None,
        *,
        only_metrics: bool = False,
        strict: bool = False,
    ) -> None:
        security = security or Security()
        if not only_metrics:
            check_bind("http", address.url(tls=False), address.host, lacking=security.lacking_for_http)
        self._wanted = address
        self._tls: ssl.SSLContext | None = None if only_metrics else security.tls
        self.address = address.url(tls=self._tls is not None)
        self._open_calls = OpenCalls()
        self._streams: set[BoundedStream] = set()
        self._limit = ConnectionLimit(max_connections())
        self._context = WorkerContext(None)
        self._config = _config()
        calls = HTTPCalls(dispatcher)
        if only_metrics:
            app = make_metrics_app(calls)
        else:
            only_loopback = address.is_loopback
            app = make_app(calls, self._open_calls, security, only_loopback=only_loopback, strict=strict)
        self._app = ASGIWrapper(app)  # type: ignore[arg-type]  # Starlette types its messages more loosely

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, then ends every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot listen there.
        """
        listeners = await self._listen()
        async with trio.open_nursery() as nursery:
            stopping = trio.Event()
            connections: trio.Nursery = await nursery.start(self._host_connections, stopping)
            try:
                task_status.started(self.address)
                await accept_from(listeners, self._serve, connections)
            finally:
                self._open_calls.stop()
                await self._context.terminated.set()
                stopping.set()

    async def _listen(self) -> list[trio.SocketListener]:
        wanted = self._wanted
        try:
            listeners = await trio.open_tcp_listeners(wanted.port, host=wanted.host)
        except OSError as error:  # a name that nobody knows is one too
            raise AddressError(self.address, str(error)) from error
        port = listeners[0].socket.getsockname()[1]
        self.address = HTTPAddress(wanted.host, port).url(tls=self._tls is not None)
        return listeners

    async def _host_connections(self, stopping: trio.Event, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """The nursery that connections live in. Shielded, because each has its last words when the gateway stops."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as late:
                async with trio.open_nursery() as connections:
                    task_status.started(connections)
                    await stopping.wait()
                    late.start_soon(self._close_late, connections.cancel_scope)
                late.cancel_scope.cancel()

    async def _close_late(self, connections: trio.CancelScope) -> None:
        """Closes what is still open after a while; only that ends the task of a client that does not read."""
        await trio.sleep(GRACE_S)
        for stream in list(self._streams):
            await trio.aclose_forcefully(stream)
        connections.cancel()

    async def _serve(self, connection: trio.SocketStream) -> None:
        """One connection's life."""
        bounded = BoundedStream(connection)
        self._streams.add(bounded)
        try:
            # Pushed out while none of its requests is under way.
            with trio.CancelScope() as scope, self._limit.seat(scope.cancel) as seat:
                if seat.is_refused:
                    return  # and it is closed
                stream = bounded if self._tls is None else self._encrypted(bounded, self._tls)
                state = ConnectionState({"seat": seat})  # for Front
                async with background() as nursery:
                    nursery.start_soon(_end_closed, bounded, nursery.cancel_scope)
                    await TCPServer(self._app, self._config, self._context, state, stream)  # type: ignore[arg-type]
        except Exception:
            # What one client brought about must not end the others.
            logger.exception("a connection failed")
        finally:
            self._streams.discard(bounded)

    def _encrypted(self, stream: BoundedStream, tls: ssl.SSLContext) -> "trio.SSLStream[BoundedStream]":
        return trio.SSLStream(stream, tls, server_side=True, https_compatible=True)


async def _end_closed(stream: BoundedStream, connection: trio.CancelScope) -> None:
    """Ends a connection's tasks some time after its end: hypercorn's reader waits for ever where the next request
    came in just before the connection was closed."""
    await stream.closed.wait()
    await trio.sleep(GRACE_S)
    connection.cancel()


def _config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.keep_alive_timeout = IDLE_S
    config.ssl_handshake_timeout = HANDSHAKE_S
    return config
