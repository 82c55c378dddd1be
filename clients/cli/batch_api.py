"""Batch files in OpenAI's form, answered by the HTTP API's own code without a socket.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
{"line": 1, "id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {...}}, "error": null}
"""

import json
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.gateways.connection_limit import ConnectionLimit
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.app import make_app
from genbatch.actors.gateways.http.service_calls import HTTPCalls, OpenCalls
from genbatch.actors.security.security import Security
from genbatch.clients.interface import Client, embed_for, generate_for
from genbatch.proto.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch file; unknown fields are ignored, as OpenAI's own reader does."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchAPI:
    """The HTTP API over a client.

    Args:
        client: answers the requests.
    """

    def __init__(self, client: Client) -> None:
        dispatcher = Dispatcher(_Asked(client))
        self._app = make_app(HTTPCalls(dispatcher), OpenCalls(), Security(), only_loopback=True)

    async def answer(self, line: BatchLine) -> tuple[int, dict[str, Any]]:
        """The status and the body that the API answers a line with.

        Raises:
            InvalidRequest: the line asks for another method or path, or for a stream.
        """
        if line.method != "POST":
            raise InvalidRequest("method", f"{line.method[:16]!r} is not POST")
        if line.url not in URLS:
            raise InvalidRequest("url", f"{line.url[:64]!r} is none of {', '.join(URLS)}")
        if line.body.get("stream"):
            raise InvalidRequest("body.stream", "a batch file has whole answers")
        status, body = await self._post(line.url, json.dumps(line.body).encode())
        return status, json.loads(body)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
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

        with ConnectionLimit(1).seat(lambda: None) as seat:
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
                "state": {"seat": seat},
            }
            await self._app(scope, receive, send)
        return status, bytes(answer)


class _Asked:
    """What the dispatcher asks in a Batcher's place."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        match request:
            case Generate():
                return await generate_for(self._client, request.request, request.on_token)
            case Embed():
                found = await embed_for(self._client, request.request)
                return Embedded(vectors=found[0], prompt_tokens=found[1])
            case msgspec.Struct():
                return await self._client.ask(request)
        raise TypeError(f"no client has a call {type(request).__name__}")
