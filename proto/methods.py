"""The methods of the protocol in one table. Dispatcher, clients, engine link, routers and fleets are built from it.

    METHODS["tokenize"].request     # TokenizeRequest, which a caller sends
    METHODS["tokenize"].answer      # TokenIds, the answer
    method_of(request).name         # "tokenize"

The Batcher takes the requests themselves. Only requests to generate, embed or score travel inside another message
(`actors/batcher/messages.py`), which adds the caller's account and the function that gets the tokens.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from genbatch.proto.messages import (
    DetokenizeRequest,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    KeepSessionRequest,
    Result,
    ResumeSessionRequest,
    ScoreRequest,
    Scores,
    SessionState,
    Text,
    TokenIds,
    TokenizeRequest,
)
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    Hello,
    HelloRequest,
    LoadAdapterRequest,
    LoadModelRequest,
    Models,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)
from genbatch.proto.validation import (
    validate_drain,
    validate_load_adapter,
    validate_load_model,
    validate_session,
    validate_unload_adapter,
)


class Lane(enum.Enum):
    """How a request travels to the Batcher."""

    GATEWAY = "gateway"  # the gateway answers without the Batcher
    WORK = "work"  # accepted, queued and charged to its caller
    TEXT = "text"  # waits for the tokenizer's thread; its text counts against the caller's share of memory
    CONTROL = "control"  # passes a full mailbox


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    Args:
        name: the method's name on the wire.
        request: the type of its parameters.
        answer: the type of its result.
        lane: how it travels.
        streams: whether tokens come before the result.
        is_operators: whether callers with a key or a token may not call it.
        timeout_s: seconds to wait for the answer; None waits for as long as it takes.
        validate: checks the ranges of a request without the service's limits; None leaves the check to the Batcher.
    """

    name: str
    request: type[msgspec.Struct]
    answer: Any
    lane: Lane
    streams: bool = False
    is_operators: bool = False
    timeout_s: float | None = None
    validate: Callable[[Any], None] | None = None

    @property
    def crosses(self) -> bool:
        """Whether the engine link carries it as a call with one answer."""
        return self.lane in (Lane.TEXT, Lane.CONTROL)


# Seconds within which a live actor answers a call that needs no model.
ANSWER_TIMEOUT_S = 5.0

_ROWS = (
    Method("hello", HelloRequest, Hello, Lane.GATEWAY),
    Method("generate", GenerateRequest, Result, Lane.WORK),
    Method("stream", GenerateRequest, Result, Lane.WORK, streams=True),
    Method("embed", EmbedRequest, Embeddings, Lane.WORK),
    Method("score", ScoreRequest, Scores, Lane.WORK),
    Method("tokenize", TokenizeRequest, TokenIds, Lane.TEXT),
    Method("detokenize", DetokenizeRequest, Text, Lane.TEXT),
    Method("keep_session", KeepSessionRequest, SessionState, Lane.TEXT, validate=validate_session),
    Method("resume_session", ResumeSessionRequest, SessionState, Lane.TEXT, validate=validate_session),
    Method("models", ModelsRequest, Models, Lane.CONTROL, timeout_s=ANSWER_TIMEOUT_S),
    Method("health", HealthRequest, Health, Lane.CONTROL, timeout_s=ANSWER_TIMEOUT_S),
    Method("stats", StatsRequest, dict[str, Any], Lane.CONTROL, timeout_s=ANSWER_TIMEOUT_S),
    Method("load_model", LoadModelRequest, Models, Lane.CONTROL, validate=validate_load_model),
    Method("load_adapter", LoadAdapterRequest, Models, Lane.CONTROL, is_operators=True, validate=validate_load_adapter),
    Method(
        "unload_adapter",
        UnloadAdapterRequest,
        Drained,
        Lane.CONTROL,
        is_operators=True,
        validate=validate_unload_adapter,
    ),
    Method("drain", DrainRequest, Drained, Lane.CONTROL, is_operators=True, validate=validate_drain),
)
METHODS = {row.name: row for row in _ROWS}
_BY_REQUEST = {row.request: row for row in _ROWS if not row.streams}


def lane_of(request: object) -> Lane | None:
    """Return the lane of a method's request; None for other messages."""
    method = method_of(request)
    return None if method is None else method.lane


def method_of(request: object) -> Method | None:
    """Return the method that takes a request of this type and does not stream; None for no such method."""
    return _BY_REQUEST.get(type(request))  # type: ignore[arg-type]  # other types are not in the table
