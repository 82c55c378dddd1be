"""HTTPGateway: OpenAI's API and a page to try it, over HTTP/1.1 and HTTP/1.0.

    gateway = HTTPGateway(Dispatcher(batcher), parse_http_address(":8000"))
    await nursery.start(gateway.run)
    print(gateway.address)

The gateway listens, speaks TLS, bounds the number of connections and ends them all. An HTTPConnection serves one
client's connection:

           ┌────────────────────── keep-alive ◄──────────────────────┐
           ▼                                                         │
    _next_request ──► _scope ──► application ──► _can_continue ──────┴──► _close
       IDLE_S,          │         _receive: the body, then "the client has gone"
       HEADERS_S        │         _send: the response
                        └──► _refuse ──► _close

One task serves the connection, and the application runs in this task. The next request, or the close, follows when the
application returns. An application learns only by `_receive` that the client has gone. h11 parses, and decides whether
the connection may be kept.
"""

import logging
import math
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

import h11
import trio
from starlette.types import ASGIApp, Message

from genbatch.actors.gateways.accepting import ConnectionLimit, Seat, accept_from, has_hung_up, max_connections
from genbatch.actors.gateways.addresses import HTTPAddress
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.app import make_app, make_metrics_app
from genbatch.actors.gateways.http.batch_runner import BatchRunner
from genbatch.actors.gateways.http.batch_store import BatchStore
from genbatch.actors.gateways.http.bodies import Refusal, api_response
from genbatch.actors.gateways.http.service_calls import HTTPCalls, OpenCalls
from genbatch.actors.gateways.listening import GatewayKind, ListeningSockets, as_listeners
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, check_bind
from genbatch.proto.errors import EngineError, GenbatchError

logger = logging.getLogger(__name__)

# Seconds that a connection may be idle between two requests, and that a request's headers may take.
IDLE_S = HEADERS_S = 15.0
# Bytes of a request's headers, and of a line of a chunked body.
MAX_HEADER_BYTES = 16 * 1024
# Seconds within which a client must read enough for the next part of a response.
STALLED_S = 10.0
# The most bytes that are read of a refused body. A client reads the refusal only after it has sent the body.
MAX_UNREAD_BYTES, MAX_UNREAD_S = 16 * 2**20, 5.0
# The most bytes that are read of later requests while a request is answered.
MAX_EARLY_BYTES = 64 * 1024
# Seconds between two checks whether a half-closed connection was closed.
LOOK_S = 0.2
# Seconds between the first two probes of a half-closed connection; each further pause is twice as long.
PROBE_S = 1.0
READ_BYTES = 64 * 1024
EVENT_COMMENT = b":\n\n"

HTTP_1_0 = b"1.0"
VERSIONS = frozenset((b"1.1", HTTP_1_0))


@dataclass(frozen=True, slots=True)
class Peers:
    """The addresses of both ends of a connection, as ASGI names them."""

    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None

    @classmethod
    def of(cls, socket: trio.socket.SocketType, scheme: str) -> "Peers":
        """Return the addresses of a connection.

        Raises:
            OSError: the client has gone.
        """
        return cls(scheme, socket.getpeername()[:2], socket.getsockname()[:2])


class HTTPConnection:
    """Serve one connection's requests, one after another.

    Args:
        stream: the connection's stream; with TLS, after the handshake.
        socket: the socket below the stream.
        app: the ASGI application. It finds `seat` in the scope's state.
        peers: the addresses of both ends.
        seat: the connection's place.
    """

    def __init__(
        self, stream: trio.abc.Stream, socket: trio.socket.SocketType, app: ASGIApp, peers: Peers, seat: Seat
    ) -> None:
        self._stream = stream
        self._socket = socket
        self._app = app
        self._peers = peers
        self._seat = seat
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._sending = trio.Lock()
        self._waiting: trio.CancelScope | None = None  # before the first byte of a request
        self._is_last = False  # no further request is read
        self._is_retiring = False  # the next answer says that no further request is read
        self._is_refused = False  # the client has sent invalid bytes
        self._has_ended = False  # the client sends no more
        self._is_broken = False  # nothing more can be sent
        self._start_request(b"")

    def _start_request(self, method: bytes) -> None:
        self._method = method
        self._is_body_read = False
        self._head = b""  # the head of the response, which is sent with the first part of the body
        self._has_events = False  # the response is a stream of events, each sent whole

    async def serve(self) -> None:
        """Serve requests until the connection is closed."""
        try:
            while not self._is_last and await self._serve_request():
                pass
        finally:
            await self._close()

    def stop(self) -> None:
        """Close the connection after the current request, or now if there is none."""
        self._is_last = True
        if self._waiting is not None:
            self._waiting.cancel()

    def retire(self) -> None:
        """Close the connection after the next answer and say so in its headers. A request on its way is served."""
        self._is_retiring = True

    # One request

    async def _serve_request(self) -> bool:
        """Return whether the connection may be kept."""
        try:
            request = await self._next_request()
            self._waiting = None
            if request is None:
                return False
            self._start_request(request.method)
            scope = self._scope(request)
        except Refusal as error:
            await self._refuse(error)
            return False
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:
            # An error of one request must not end the others.
            logger.exception("a request failed")
            if self._http.our_state is h11.SEND_RESPONSE:
                await self._refuse(EngineError("the service failed at this request"))
        return await self._can_continue()

    async def _next_request(self) -> h11.Request | None:
        """Return the next request's head; None if there is no further request.

        Raises:
            Refusal: the bytes are no request, or the request does not arrive in time.
        """
        with trio.move_on_after(IDLE_S) as waiting:
            self._waiting = waiting
            if not self._http.trailing_data[0] and not self._has_ended:
                await self._read()
            waiting.deadline = trio.current_time() + HEADERS_S
            event = await self._next_event()
            return event if isinstance(event, h11.Request) else None
        if self._http.trailing_data[0] and not self._is_last:
            raise Refusal(408, "timeout", f"the headers did not arrive within {HEADERS_S:g} s")
        return None

    def _scope(self, request: h11.Request) -> dict[str, Any]:
        """Return the request in ASGI's form.

        Raises:
            Refusal: this gateway does not serve the request.
        """
        headers = list(request.headers)
        _check_framing(request.http_version, {name for name, _ in headers})
        target = request.target
        if target.lower().startswith((b"http://", b"https://")):  # a proxy's form, which replaces the Host header
            host, target = _split_target(target)
            headers = [(name, value) for name, value in headers if name != b"host"] + [(b"host", host)]
        path, _, query = target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode("ascii").upper(),
            "scheme": self._peers.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": self._peers.client,
            "server": self._peers.server,
            "state": {"seat": self._seat},
        }

    async def _can_continue(self) -> bool:
        """Read the rest of the request, and prepare for the next one; return whether there may be one."""
        if self._is_broken or self._http.our_state is not h11.DONE:
            return False  # a message was cut short, or a header of one side ends the connection
        with suppress(Refusal), trio.move_on_after(MAX_UNREAD_S):
            await self._discard()
        if self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._start_request(b"")
        return True

    async def _discard(self) -> None:
        """Read the body to its end, or up to the limit for refused bodies."""
        size = 0
        while not self._is_body_read and size <= MAX_UNREAD_BYTES:
            size += len((await self._next_part())["body"])

    # Called by the application

    async def _receive(self) -> Message:
        """Return the next part of the body; after the last one, return "http.disconnect" once the client has gone.

        Raises:
            Refusal: the body's form is wrong.
        """
        if self._is_body_read:
            await self._wait_until_gone()
            return {"type": "http.disconnect"}
        if self._http.they_are_waiting_for_100_continue:
            await self._transmit(lambda: self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
        return await self._next_part()

    async def _next_part(self) -> Message:
        event = await self._next_event()
        if isinstance(event, h11.Data):
            # One read may bring ten thousand chunks of a byte: other clients' tasks run between them.
            # guard: bodies of tiny chunks
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        self._is_body_read = True  # trailers are not used
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        """Send a part of the response; drop it if the client has gone, which the application learns by `_receive`."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *self._more_headers()]
            self._has_events = any(value.startswith(b"text/event-stream") for _, value in headers)
            status = HTTPStatus(message["status"])
            response = h11.Response(status_code=status, reason=status.phrase.encode(), headers=headers)
            self._head = self._http.send(response)
            return
        assert message["type"] == "http.response.body", message["type"]
        body, is_last = message.get("body", b""), not message.get("more_body", False)

        def encode() -> bytes:
            data, self._head = self._head, b""
            if body and self._method != b"HEAD":
                data += self._http.send(h11.Data(data=body)) or b""
            if is_last:
                data += self._http.send(h11.EndOfMessage()) or b""
            return data

        await self._transmit(encode)

    def _more_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"date", _date(int(time.time())))]
        # A client that got no 100 Continue may send its body or not, so the next request cannot be found.
        is_unsure = self._is_refused or self._http.they_are_waiting_for_100_continue
        if self._is_last or self._is_retiring or is_unsure or self._http.their_state is h11.ERROR:
            headers.append((b"connection", b"close"))
        return headers

    async def _refuse(self, error: GenbatchError) -> None:
        """Answer in place of the application."""
        self._is_refused = True
        response = api_response(error)
        head = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._send(head)
        await self._send({"type": "http.response.body", "body": response.body})

    # The client's end

    async def _wait_until_gone(self) -> None:
        """Wait until the client has gone. A client that sends no more may still read."""
        while not self._has_ended and len(self._http.trailing_data[0]) < MAX_EARLY_BYTES:
            await self._read()
        probe_at, pause_s = trio.current_time() if self._has_ended else math.inf, PROBE_S
        while not self._is_broken and not has_hung_up(self._socket):
            if trio.current_time() >= probe_at:  # repeated: the client may go after it has read a probe
                await self._transmit(self._probe)
                probe_at, pause_s = trio.current_time() + pause_s, 2 * pause_s
            await trio.sleep(LOOK_S)

    def _probe(self) -> bytes | None:
        """Send bytes without a meaning; the machine of a client that has gone answers with a reset.

        Before the response this sends "102 Processing", which HTTP/1.1 allows at any time. Among events it sends a
        comment. Before a response of HTTP/1.0, neither is allowed. There it sends a byte of TCP's urgent data, which no
        reader of the stream sees.
        """
        if self._http.our_state is h11.SEND_RESPONSE:
            if self._http.their_http_version == HTTP_1_0:
                _send_urgent_byte(self._socket)
                return None
            return self._http.send(h11.InformationalResponse(status_code=102, headers=[]))
        if self._http.our_state is h11.SEND_BODY and self._has_events and not self._head:
            return self._http.send(h11.Data(data=EVENT_COMMENT))
        return None

    async def _close(self) -> None:
        """End our side, and read what the client still sends: an immediate close could discard the last answer."""
        is_unread = self._is_refused or self._http.their_state in (h11.SEND_BODY, h11.ERROR)
        if is_unread and not self._is_broken and isinstance(self._stream, trio.abc.HalfCloseableStream):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(MAX_UNREAD_S):
                await self._stream.send_eof()
                size = 0
                while size <= MAX_UNREAD_BYTES and (data := await self._stream.receive_some(READ_BYTES)):
                    size += len(data)
        with trio.move_on_after(STALLED_S):  # TLS sends its close_notify
            await self._stream.aclose()

    # Bytes

    async def _next_event(self) -> Any:
        """Return h11's next event; read from the client until there is one.

        Raises:
            Refusal: the received bytes are not HTTP.
        """
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise Refusal(error.error_status_hint, "malformed_http", str(error)) from None
            if event is not h11.NEED_DATA:
                return event
            await self._read()

    async def _read(self) -> None:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data, self._is_broken = b"", True
        self._has_ended = not data
        self._http.receive_data(bytes(data))

    async def _transmit(self, encode: Callable[[], bytes | None]) -> None:
        """Send bytes of a response, in order; if a part cannot be sent, the response is broken."""
        async with self._sending:
            if self._is_broken:
                return
            data = encode()
            if not data:
                return
            is_sent = False
            try:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(STALLED_S):
                    await self._stream.send_all(data)
                    is_sent = True
            finally:
                self._is_broken = not is_sent
            if self._is_broken:
                await trio.aclose_forcefully(self._stream)  # wake a task that waits to receive


def _send_urgent_byte(borrowed: trio.socket.SocketType) -> None:
    """Send a byte of urgent data, beside the stream."""
    connection = socket.socket(fileno=os.dup(borrowed.fileno()))
    with connection, suppress(OSError):  # the client has gone, or its buffer is full
        connection.send(b"\n", socket.MSG_OOB | socket.MSG_DONTWAIT)


def _check_framing(version: bytes, names: set[bytes]) -> None:
    """Check the HTTP version, and that the headers give the body one length.

    Raises:
        Refusal: the version is not served, or two parties could disagree on where the body ends.
    """
    if version not in VERSIONS:
        raise Refusal(505, "http_version", "this service speaks HTTP/1.1 and HTTP/1.0, and no other version")
    if b"transfer-encoding" in names:
        if version == HTTP_1_0:
            raise Refusal(400, "malformed_http", "Transfer-Encoding: HTTP/1.0 has no such header")
        if b"content-length" in names:
            raise Refusal(400, "malformed_http", "Transfer-Encoding and Content-Length exclude each other")


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """Split an absolute address into HOST, PORT, and PATH?QUERY.

    Raises:
        Refusal: the text is no absolute address.
    """
    try:
        parts = urlsplit(target)
    except ValueError:
        raise Refusal(400, "malformed_http", "the request's target is not a path") from None
    path = parts.path or b"/"
    return parts.netloc, path + b"?" + parts.query if parts.query else path


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    """Return a time in HTTP's format."""
    return formatdate(second, usegmt=True).encode()


# Seconds for the TLS handshake.
HANDSHAKE_S = 10.0
# Seconds within which ended calls may still send their clients the error.
GRACE_S = 1.0


class HTTPGateway:
    """Listens at one address; `run` is a child of a supervisor.

    Args:
        dispatcher: runs the methods.
        address: the address to listen at.
        security: the access control and the certificate; a loopback address needs neither.
        strict: whether a field that no API has published is refused.
        store: keeps files and batches; None keeps none.
        sockets: the listening sockets; None opens a socket for this gateway alone.
    """

    _kind: GatewayKind = "http"

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: HTTPAddress,
        security: Security | None = None,
        *,
        strict: bool = False,
        store: BatchStore | None = None,
        sockets: ListeningSockets | None = None,
    ) -> None:
        security = security or Security()
        self._requested = address
        self._sockets = ListeningSockets() if sockets is None else sockets
        self._owns_sockets = sockets is None
        self._accepting = trio.CancelScope()
        self._is_retiring = False
        self._tls: ssl.SSLContext | None = security.tls
        self.address = address.url(tls=self._tls is not None)
        self._open_calls = OpenCalls()
        self._connections: set[HTTPConnection] = set()
        self._limit = ConnectionLimit(max_connections())
        calls = HTTPCalls(dispatcher)
        self._batches = None if store is None else BatchRunner(store, calls)
        self._app = self._make_app(calls, security, strict=strict)

    def _make_app(self, calls: HTTPCalls, security: Security, *, strict: bool) -> ASGIApp:
        address = self._requested
        check_bind("http", address.url(tls=False), address.host, lacking=security.lacking_for_http)
        return make_app(
            calls,
            self._open_calls,
            security,
            only_loopback=address.is_loopback,
            strict=strict,
            batches=self._batches,
        )

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then end every call with Unavailable; `started` gets the address once it listens.

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
        requested = self._requested
        try:
            await self._sockets.open(self._kind, requested.tcp)
        except AddressError as error:  # an unknown host name is an OSError, too
            raise AddressError(self.address, error.reason) from error
        listening = self._sockets.copies(self._kind)
        port = listening[0].getsockname()[1]
        self.address = HTTPAddress(requested.host, port).url(tls=self._tls is not None)
        return as_listeners(listening)

    @property
    def num_connections(self) -> int:
        """The number of connected clients."""
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
        """Host the connections in a shielded nursery, so that each can send its last bytes when the gateway stops."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as late:
                async with trio.open_nursery() as connections:
                    task_status.started(connections)
                    await stopping.wait()
                    late.start_soon(_cancel_late, connections.cancel_scope)
                late.cancel_scope.cancel()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end."""
        try:
            # The connection may be pushed out while it has no open request.
            with trio.CancelScope() as scope, self._limit.seat(scope.cancel) as seat:
                if not seat.is_refused:
                    await self._serve_seated(stream, seat)
        except Exception:
            # An error of one connection must not end the others.
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


class MetricsGateway(HTTPGateway):
    """Serves only counters and health, to every client that reaches the address."""

    _kind = "metrics"

    def _make_app(self, calls: HTTPCalls, security: Security, *, strict: bool) -> ASGIApp:
        return make_metrics_app(calls)


async def _encrypted(stream: trio.SocketStream, tls: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    """Return the stream after the TLS handshake.

    Raises:
        trio.BrokenResourceError, trio.TooSlowError: the handshake failed.
    """
    encrypted = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    with trio.fail_after(HANDSHAKE_S):
        await encrypted.do_handshake()
    return encrypted


async def _cancel_late(connections: trio.CancelScope) -> None:
    """End tasks that still run after a while, such as the task of a client that does not read."""
    await trio.sleep(GRACE_S)
    connections.cancel()
