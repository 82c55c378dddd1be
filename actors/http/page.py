"""page_routes: the playground, files of this package that a browser loads from `/`."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing is loaded from elsewhere, nothing is inline, nobody frames it: text of a model that got out of its element
# would still not run.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {
    "/": "index.html",
    "/playground.css": "playground.css",
    "/playground.js": "playground.js",
    "/column.js": "column.js",
    "/chart.js": "chart.js",
    "/favicon.svg": "favicon.svg",
}


def page_routes() -> list[Route]:
    """A route for each file; they are read once."""
    return [Route(path, _endpoint(name), methods=["GET"]) for path, name in FILES.items()]


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("genbatch.actors.http") / "static" / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return respond
