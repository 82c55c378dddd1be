"""make_app: the endpoints by their paths."""

from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from genbatch.actors.http.api_error import Refusal, api_response
from genbatch.actors.http.front import Authenticate, Front
from genbatch.actors.http.generating import Generating
from genbatch.actors.http.open_calls import OpenCalls
from genbatch.actors.http.openai_request import read_chat, read_completion
from genbatch.actors.http.page import page_routes
from genbatch.actors.http.service_calls import ServiceCalls
from genbatch.actors.http.service_routes import ServiceRoutes
from genbatch.proto.errors import EngineError, GenbatchError

POST, GET = ["POST"], ["GET"]


def make_app(
    calls: ServiceCalls, open_calls: OpenCalls, *, authenticate: Authenticate | None, only_loopback: bool
) -> ASGIApp:
    """The ASGI application.

    Args:
        calls: who answers.
        open_calls: where running calls are kept.
        authenticate, only_loopback: see Front.
    """
    service = ServiceRoutes(calls)
    routes = [
        Route("/v1/chat/completions", Generating(read_chat, calls, open_calls), methods=POST),
        Route("/v1/completions", Generating(read_completion, calls, open_calls), methods=POST),
        Route("/v1/models", service.models, methods=GET),
        Route("/v1/models/{name:path}", service.model, methods=GET),
        Route("/v1/embeddings", service.embeddings, methods=POST),
        Route("/tokenize", service.tokenize, methods=POST),
        Route("/detokenize", service.detokenize, methods=POST),
        Route("/health", service.health, methods=GET),
        Route("/stats", service.stats, methods=GET),
        Route("/metrics", service.metrics, methods=GET),
        *page_routes(),
    ]
    handlers = {GenbatchError: _refused, HTTPException: _not_routed, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    # /health/ is no path of ours, and a redirect of a POST loses its body with some clients.
    app.router.redirect_slashes = False
    return Front(app, authenticate=authenticate, only_loopback=only_loopback)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GenbatchError)
    return api_response(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        refusal = Refusal(error.status_code, "method_not_allowed", f"{request.method} is not for {path}")
        refusal.headers.update(error.headers or {})
        return api_response(refusal)
    return api_response(Refusal(error.status_code, "not_found", f"there is no {path} here"))


async def _failed(request: Request, error: Exception) -> Response:
    # Its text may tell a client more than it should know; the server logs it.
    return api_response(EngineError("the service failed at this request"))
