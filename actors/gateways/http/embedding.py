"""EmbeddingEndpoint: the ASGI application behind /v1/embeddings, OpenAI's."""

from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from genbatch.actors.gateways.http.bodies import JSON, Refusal, decode_json
from genbatch.actors.gateways.http.generating import cancel_when_gone
from genbatch.actors.gateways.http.service_calls import HTTPCaller, HTTPCalls, OpenCalls
from genbatch.actors.runtime.supervisor import background
from genbatch.proto.messages import Embeddings, check_type

NO_EMBEDDINGS = (
    "there are no embeddings: {} was trained to continue text, and its hidden states are no measure of what a text "
    "means; use a model that was trained for embeddings"
)


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /v1/embeddings takes. Ranges are those of EmbedRequest."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


# What goes to the service as it is.
_PARAMETERS = ("input", "encoding_format", "dimensions", "priority", "deadline_s")


class EmbeddingEndpoint:
    """POST of texts, answered with a vector for each.

    Args:
        calls: who answers.
        open_calls: where running calls are kept.
    """

    def __init__(self, calls: HTTPCalls, open_calls: OpenCalls) -> None:
        self._calls = calls
        self._open_calls = open_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that goes away cancels it."""
        caller: HTTPCaller = scope["state"]["caller"]
        fields: EmbeddingFields = check_type(decode_json(scope["state"]["body"]), EmbeddingFields)
        card = await self._calls.model(fields.model)
        if card.embedding_size is None:
            raise Refusal(404, "no_embeddings", NO_EMBEDDINGS.format(card.id))
        params = {name: value for name in _PARAMETERS if (value := getattr(fields, name)) is not None}
        params["model"] = card.id
        response: JSON | None = None
        async with background() as nursery:
            nursery.start_soon(cancel_when_gone, receive, nursery.cancel_scope)
            with self._open_calls.open():
                response = JSON(_body(await self._calls.embed(params, caller), card.id))
        if response is not None:
            await response(scope, receive, send)


def _body(found: Embeddings, model: str) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found.embeddings)
    ]
    num_tokens = found.usage.prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
