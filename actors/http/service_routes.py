"""ServiceRoutes: the endpoints that tell about the service and its model, and generate nothing."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from genbatch.actors.http.api_error import Refusal, renamed
from genbatch.actors.http.json_body import decode_json
from genbatch.actors.http.json_response import JSON
from genbatch.actors.http.openai_request import read_messages
from genbatch.actors.http.service_calls import ServiceCalls
from genbatch.actors.metrics import render
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import check_type
from genbatch.proto.service_messages import ModelCard

NO_EMBEDDINGS = (
    "there are no embeddings: this model was trained to continue text, and its hidden states are no measure of "
    "what a text means; use a model that was trained for embeddings"
)


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /tokenize takes, after vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /detokenize takes, after vLLM's."""

    model: str | None = None
    tokens: list[int]


class ServiceRoutes:
    """The endpoints' functions.

    Args:
        calls: who answers.
    """

    def __init__(self, calls: ServiceCalls) -> None:
        self._calls = calls
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The list of models."""
        cards = [self._card(card) for card in await self._calls.models()]
        return JSON({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        return JSON(self._card(await self._calls.model(request.path_params["name"])))

    def _card(self, card: ModelCard) -> dict[str, Any]:
        """As OpenAI's, with vLLM's name for the context."""
        made = {"id": card.id, "object": "model", "created": self._created, "owned_by": "genbatch"}
        return made | {"max_model_len": card.n_ctx}

    async def embeddings(self, request: Request) -> Response:
        """None."""
        raise Refusal(404, "no_embeddings", NO_EMBEDDINGS)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or of messages."""
        body: TokenizeBody = check_type(decode_json(request.state.body), TokenizeBody)
        card = await self._calls.model(body.model)
        params: dict[str, Any] = {}
        if body.prompt is not None:
            params["prompt"] = body.prompt
        if body.messages is not None:
            params["messages"] = read_messages(body.messages)
        if body.add_special_tokens is not None:
            params["add_special_tokens"] = body.add_special_tokens
        token_ids = await self._calls.tokenize(params, request.state.caller)
        return JSON({"count": len(token_ids), "max_model_len": card.n_ctx, "tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body: DetokenizeBody = check_type(decode_json(request.state.body), DetokenizeBody)
        await self._calls.model(body.model)
        try:
            text = await self._calls.detokenize({"token_ids": body.tokens}, request.state.caller)
        except GenbatchError as error:
            raise renamed(error, {"token_ids": "tokens"}) from None
        return JSON({"prompt": text})

    async def health(self, request: Request) -> Response:
        """200 while new requests are taken and get done, else 503 with the reason in `status`."""
        health = await self._calls.health()
        return JSON(health, 200 if health.status == "ready" else 503)

    async def stats(self, request: Request) -> Response:
        """The counters, as `genbatch stats` shows them."""
        return JSON(await self._calls.stats(request.state.caller))

    async def metrics(self, request: Request) -> Response:
        """The same for Prometheus."""
        content, content_type = render(await self._calls.stats(request.state.caller))
        return Response(content, headers={"content-type": content_type})
