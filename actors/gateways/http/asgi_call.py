"""Requests to the ASGI application without a socket: those of batch files."""

from typing import Any

import trio
from starlette.types import ASGIApp


async def post(app: ASGIApp, path: str, body: bytes, state: dict[str, Any]) -> tuple[int, bytes]:
    """The status and the body that the application answers a POST with.

    Args:
        path: of the endpoint.
        body: JSON.
        state: what the server hands to the application.
    """
    received = [{"type": "http.request", "body": body, "more_body": False}]
    status, answer = 0, bytearray()

    async def receive() -> Any:
        if not received:
            await trio.sleep_forever()  # this client never disconnects
        return received.pop()

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            answer.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": state,
    }
    await app(scope, receive, send)
    return status, bytes(answer)
