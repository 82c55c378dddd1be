"""Front: what every HTTP request passes before it reaches an endpoint.

Who asks (host, origin, token) is settled by the headers; then the body is read whole, within bounds. From then on its
connection is not pushed out by others, until it is answered. An endpoint finds
`caller` and `body` in the scope's state, and what it receives after that is only ever that the client has gone.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

import trio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genbatch.actors.gateways.connection_limit import Seat
from genbatch.actors.gateways.http.bodies import Refusal, api_response
from genbatch.actors.gateways.http.service_calls import HTTPCaller
from genbatch.actors.gateways.peers import account_of_host
from genbatch.actors.security.key_files import bearer_token
from genbatch.actors.security.security import Authenticate, is_loopback
from genbatch.proto.codec import REQUEST_LIMITS
from genbatch.proto.errors import Forbidden, FrameTooLarge, GenbatchError, Unauthenticated

# As on the other wires.
MAX_BODY_BYTES = REQUEST_LIMITS.max_bytes
# Seconds for a whole body to arrive.
BODY_TIMEOUT_S = 30.0
# Paths that tell nothing and do nothing. A page cannot show a token before it is loaded.
OPEN_PATHS = frozenset(
    (
        *("/", "/chat.js", "/chat.css", "/events.js", "/compare", "/playground.css", "/playground.js", "/chart.js"),
        *("/column.js", "/markdown.js", "/models.js", "/favicon.svg", "/health", "/docs", "/openapi.json"),
    )
)


class Front:
    """Stands in front of `app`.

    Args:
        app: the endpoints.
        authenticate: the name that goes with a token, or None; None lets everybody in.
        only_loopback: the address is one of this machine's own, so that any other host's name in a request is a trick
            of a web page, whose server has made its name mean this machine.
        hosts: names that are no such trick; where there are some, no others are taken.
        origins: whose pages may use the service although it is not theirs.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Authenticate | None,
        only_loopback: bool,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._authenticate = authenticate
        self._only_loopback = only_loopback
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        origin = Headers(scope=scope).get("origin")
        if origin is not None and origin.lower() in self._origins:
            send = _open_to(origin, send)
            if scope["method"] == "OPTIONS":
                await _allow(Headers(scope=scope))(scope, receive, send)
                return
        try:
            caller = self._caller(scope)
            body = await _read(receive)
        except GenbatchError as error:
            await api_response(error, scope["path"])(scope, receive, send)
            return
        seat: Seat = scope["state"]["seat"]
        scope["state"] = {"caller": caller, "body": body}
        with seat.busy():
            await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> HTTPCaller:
        """Raises:
        Forbidden, Unauthenticated: the headers say that this is not for us, or from a stranger.
        """
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        self._check_host(host, scope["path"])
        origin = headers.get("origin")
        # guard: pages of other sites
        if origin is not None and _host_of(origin) != host and origin.lower() not in self._origins:
            raise Forbidden(f"pages of {origin[:128]!r} may not use this service (--allowed-origin)")
        client = account_of_host((scope.get("client") or ("",))[0])
        # guard: token before anything, HTTP
        if self._authenticate is None or scope["path"] in OPEN_PATHS:
            return HTTPCaller(client)
        # Anthropic's clients have a header of their own.
        token = bearer_token(headers.get("authorization")) or headers.get("x-api-key")
        tenant = None if token is None else self._authenticate(token)
        if tenant is None:
            if token is None:
                raise Unauthenticated("the token is missing; send the header Authorization: Bearer TOKEN")
            raise Unauthenticated("the token is not known; its operator makes one with `genbatch keys token`")
        return HTTPCaller(client, tenant)

    def _check_host(self, host: str, path: str) -> None:
        """Raises:
        Forbidden: a page whose server has made its name mean this machine may have sent the request.
        """
        name = _without_port(host)
        if is_loopback(name) or name.lower() in self._hosts:
            return
        # guard: names that lead to this machine
        if self._only_loopback:
            wanted = "localhost, 127.0.0.1 or [::1]"
        elif self._hosts and path != "/health":  # probes name the address that they were given
            wanted = ", ".join(sorted(self._hosts))
        else:
            return
        raise Forbidden(f"the service is reached as {wanted}, not as {host[:128]!r} (--allowed-host)")


def _open_to(origin: str, send: Send) -> Send:
    """Adds to each answer that pages of this origin may read it."""
    more = [(b"access-control-allow-origin", origin.encode("latin-1", "replace")), (b"vary", b"origin")]

    async def send_open(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_open


def _allow(headers: Headers) -> Response:
    """The answer to a browser that asks what a page of an allowed origin may send; it shows no token for that."""
    wanted = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": wanted,
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=allowed)


def _host_of(origin: str) -> str | None:
    """HOST:PORT of an Origin header; None if it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


async def _read(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        FrameTooLarge: it has too many bytes.
        Refusal: it does not arrive, or is malformed.
    """
    parts: list[bytes] = []
    size = 0
    with trio.move_on_after(BODY_TIMEOUT_S):
        while True:
            message = await receive()
            parts.append(message["body"])
            size += len(parts[-1])
            # guard: cap on a body, HTTP
            if size > MAX_BODY_BYTES:
                raise FrameTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
            if not message.get("more_body"):
                return b"".join(parts)
    raise Refusal(408, "timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
