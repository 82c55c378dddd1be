"""Answer batch files in OpenAI's form with the HTTP API's code, without a socket.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
{"line": 1, "id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {...}}, "error": null}
"""

import json
from typing import Any

import msgspec

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.gateways.accepting import ConnectionLimit
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.app import make_app
from genbatch.actors.gateways.http.batch_runner import ENDPOINTS, BatchLine, fault_of, post
from genbatch.actors.gateways.http.service_calls import HTTPCalls, OpenCalls
from genbatch.actors.security.security import Security
from genbatch.clients.interface import Client, embed_for, generate_for
from genbatch.proto.errors import InvalidRequest


class BatchAPI:
    """The HTTP API over a client.

    Args:
        client: answers the requests.
    """

    def __init__(self, client: Client) -> None:
        dispatcher = Dispatcher(_Asked(client))
        self._app = make_app(HTTPCalls(dispatcher), OpenCalls(), Security(), only_loopback=True)

    async def answer(self, line: BatchLine) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the API's answer to a line.

        Raises:
            InvalidRequest: the line asks for another method or path, or for a stream.
        """
        if (fault := fault_of(line, ENDPOINTS)) is not None:
            raise InvalidRequest(fault.param, fault.message)
        with ConnectionLimit(1).seat(lambda: None) as seat:
            status, body = await post(self._app, line.url, json.dumps(line.body).encode(), {"seat": seat})
        return status, json.loads(body)


class _Asked:
    """A client in the place of the dispatcher's Batcher."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        match request:
            case Generate():
                return await generate_for(self._client, request.request, request.on_token)
            case Embed():
                embedded = await embed_for(self._client, request.request)
                return Embedded(vectors=embedded[0], prompt_tokens=embedded[1])
            case msgspec.Struct():
                return await self._client.ask(request)
        raise TypeError(f"no client has a call {type(request).__name__}")
