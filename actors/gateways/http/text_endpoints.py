"""Endpoints that evaluate texts without generating: embeddings, scores, rankings and classes.

    TextEndpoint(EmbeddingFields, embed, calls, open_calls, new_fields)

Each endpoint has a type of body and a function that answers it. Scores have the shapes of vLLM (/v1/score,
/v1/classify), of Jina and Cohere (/v1/rerank, /v2/rerank), and of text-embeddings-inference (/rerank with `texts`).
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar
from uuid import uuid4

import msgspec
from starlette.types import Receive, Scope, Send

from genbatch.actors.gateways.http.bodies import JSON, Fields, Refusal, decode_json, set_fields
from genbatch.actors.gateways.http.generating import NewFields, cancel_when_gone
from genbatch.actors.gateways.http.service_calls import HTTPCaller, HTTPCalls, OpenCalls
from genbatch.actors.runtime.supervisor import background
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Scores, Usage, ranking_of
from genbatch.proto.service_messages import ModelCard

NO_EMBEDDINGS = (
    "there are no embeddings: {} was trained to generate text, and its hidden states do not measure meaning; "
    "use an embedding model"
)
NO_SCORES = "there are no scores: {} is no reranker and no classifier"
TextBody = TypeVar("TextBody", bound=msgspec.Struct)
TextAnswer = Callable[[HTTPCalls, TextBody, ModelCard, HTTPCaller], Awaitable[object]]


class TextEndpoint(Generic[TextBody]):
    """Serves POST requests with texts to evaluate.

    Args:
        body: the type of a body; it has a field `model`.
        answer: makes the content of the response.
        calls: calls the service.
        open_calls: the running calls.
        new_fields: makes a reader of a body's fields.
    """

    def __init__(
        self,
        body: type[TextBody],
        answer: TextAnswer[TextBody],
        calls: HTTPCalls,
        open_calls: OpenCalls,
        new_fields: NewFields = Fields,
    ) -> None:
        self._body = body
        self._answer = answer
        self._calls = calls
        self._open_calls = open_calls
        self._new_fields = new_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; it is cancelled if the client goes away."""
        caller: HTTPCaller = scope["state"]["caller"]
        reader = self._new_fields()
        fields: Any = reader.read(decode_json(scope["state"]["body"]), self._body)
        response: JSON | None = None
        async with background() as nursery:
            nursery.start_soon(cancel_when_gone, receive, nursery.cancel_scope)
            with self._open_calls.open():
                card = await self._calls.known_model(fields.model, caller)
                content = await self._answer(self._calls, fields, card, caller)
                response = JSON(content, headers=reader.headers)
        if response is not None:
            await response(scope, receive, send)


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/embeddings. Ranges are those of EmbedRequest."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


async def embed(calls: HTTPCalls, fields: EmbeddingFields, card: ModelCard, caller: HTTPCaller) -> object:
    """Return a vector for each text."""
    if card.embedding_size is None:
        raise Refusal(404, "no_embeddings", NO_EMBEDDINGS.format(card.id))
    params = set_fields(fields, ("input", "encoding_format", "dimensions", "priority", "deadline_s"))
    embedded = await calls.embed({**params, "model": card.id}, caller)
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(embedded.embeddings)
    ]
    return {"object": "list", "data": data, "model": card.id, "usage": _usage(embedded.usage)}


class RerankFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/rerank, /v2/rerank and /rerank.

    Args:
        documents: texts, or objects with a field `text`.
        texts: the documents by text-embeddings-inference's name; the answer is then an array.
        return_documents: whether results have their document: true by default, and false at /v2/rerank.
        return_text: the same for `texts`; false by default.
        max_tokens_per_doc: tokens of a document at most; the end of a longer one is cut.
        truncate: whether documents that are too long for the model are cut; true at /v2/rerank.
    """

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    max_tokens_per_doc: int | None = None
    truncate: bool | None = None
    instruction: str | None = None
    user: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


async def rerank(calls: HTTPCalls, fields: RerankFields, card: ModelCard, caller: HTTPCaller) -> object:
    """Rank documents by relevance, in the shape that Jina, Cohere's older API and vLLM share."""
    _check_scores(card)
    if (fields.documents is None) == (fields.texts is None):
        raise InvalidRequest("documents", "give exactly one of documents and texts")
    documents = fields.documents if fields.documents is not None else [*(fields.texts or ())]
    params = set_fields(fields, ("query", "raw_scores", "truncate", "instruction", "priority", "deadline_s"))
    if fields.max_tokens_per_doc is not None:
        params["max_document_tokens"] = fields.max_tokens_per_doc
    scores = await calls.score({**params, "documents": _texts(documents), "model": card.id}, caller)
    ranking = ranking_of(scores, fields.top_n)
    if fields.texts is not None:
        shown = fields.texts if fields.return_text else None
        return [
            {"index": ranked.index, "score": ranked.score} | ({} if shown is None else {"text": shown[ranked.index]})
            for ranked in ranking.results
        ]
    results: list[dict[str, Any]] = [
        {"index": ranked.index, "relevance_score": ranked.score} for ranked in ranking.results
    ]
    if fields.return_documents is not False:
        for result in results:
            document = documents[result["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
    usage = _usage(ranking.usage)
    meta = {
        "api_version": {"version": "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": ranking.usage.prompt_tokens},
    }
    return {"id": f"rerank-{uuid4().hex}", "model": card.id, "results": results, "usage": usage, "meta": meta}


async def rerank_cut(calls: HTTPCalls, fields: RerankFields, card: ModelCard, caller: HTTPCaller) -> object:
    """Rank documents by the defaults of Cohere's newer API: long documents are cut, and results have no document."""
    defaults = {"truncate": True, "return_documents": False}
    missing = {name: value for name, value in defaults.items() if getattr(fields, name) is None}
    return await rerank(calls, msgspec.structs.replace(fields, **missing), card, caller)


class ScoreFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/score: `text_1` and `text_2`, or `queries` and `documents`, each a text or an array."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    use_activation: bool | None = None
    truncate: bool | None = None
    instruction: str | None = None
    user: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


async def score(calls: HTTPCalls, fields: ScoreFields, card: ModelCard, caller: HTTPCaller) -> object:
    """Return the score of each pair, in vLLM's shape."""
    _check_scores(card)
    names = ("queries", "documents") if fields.text_1 is None and fields.text_2 is None else ("text_1", "text_2")
    for name in names:
        if getattr(fields, name) is None:
            raise InvalidRequest(name, "is missing")
    query, documents = (getattr(fields, name) for name in names)
    documents = [documents] if isinstance(documents, str) else documents
    if isinstance(query, list) and len(query) == 1:
        query = query[0]
    if isinstance(query, list) and len(query) != len(documents):
        raise InvalidRequest(names[0], f"has {len(query)} entries, and {names[1]} has {len(documents)}")
    params = set_fields(fields, ("truncate", "instruction", "priority", "deadline_s"))
    params["raw_scores"] = fields.use_activation is False
    scores = await calls.score({**params, "query": query, "documents": documents, "model": card.id}, caller)
    ranking_of(scores)  # each pair has one score
    data = [{"index": index, "object": "score", "score": row[0]} for index, row in enumerate(scores.scores)]
    return _listed("score", card, data, scores)


class ClassifyFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/classify: a text or several."""

    input: str | list[str]
    model: str | None = None
    use_activation: bool | None = None
    truncate: bool | None = None
    user: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


async def classify(calls: HTTPCalls, fields: ClassifyFields, card: ModelCard, caller: HTTPCaller) -> object:
    """Return the likeliest label of each text and the probabilities of all labels, in vLLM's shape."""
    _check_scores(card)
    params = set_fields(fields, ("truncate", "priority", "deadline_s"))
    params["raw_scores"] = fields.use_activation is False
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    scores = await calls.score({**params, "documents": texts, "model": card.id}, caller)
    data = [
        {"index": index, "label": card.labels[row.index(max(row))], "probs": row, "num_classes": len(row)}
        for index, row in enumerate(scores.scores)
    ]
    return _listed("classify", card, data, scores)


def _check_scores(card: ModelCard) -> None:
    if not card.labels:
        raise Refusal(404, "no_scores", NO_SCORES.format(card.id))


def _texts(documents: list[str | dict[str, Any]] | list[str]) -> list[str]:
    texts = []
    for index, document in enumerate(documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"documents[{index}].text", "is missing" if text is None else "is no text")
        texts.append(text)
    return texts


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


def _listed(kind: str, card: ModelCard, data: list[dict[str, Any]], scores: Scores) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": card.id,
        "data": data,
        "usage": _usage(scores.usage),
    }
