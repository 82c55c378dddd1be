"""Messages to the Batcher that say more than a request of the protocol: who calls, and where tokens go.

Every other method's request is sent as it is (`proto/methods.py`).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from genbatch.proto.messages import (
    EmbedRequest,
    GenerateRequest,
    Message,
    ScoreRequest,
    Token,
)
from genbatch.proto.validation import RequestLimits, check_types, validate_request

if TYPE_CHECKING:  # imports torch, which a gateway process does without
    from genbatch.actors.batcher.kept_logits import Keep


# The account of all clients over TCP on the gateway's own machine.
LOCALHOST = "host:localhost"


def tenant_account(tenant: str) -> str:
    """The account of a tenant."""
    return f"tenant:{tenant}"


def charged_account(client: str, tenant: str, *, embeds: bool = False) -> str:
    """The account that a request is charged to.

    A client's gateway has decided on its account: the tenant of its key or token, or what it cannot multiply (ADR 43).
    A tenant that a client merely names buys no share. The program that runs the Batcher has no account, but the
    tenants that it names have one each. Embeddings have an account of their own: so they and generated text take turns
    even where one client asks for both.
    """
    account = client or (tenant_account(tenant) if tenant else "")
    return f"{account} (embeddings)" if embeds and account else account


class DrawnTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens that a choice has drawn, from its first on.

    Args:
        token_ids: the tokens.
        logprobs: of each its log-prob and those of the likeliest; empty where the request asks for none.
        call_ids: the ids of the tool calls that were shown.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, dict[int, float]]] = []
    call_ids: list[str] = []


@dataclass(frozen=True, slots=True)
class Generate:
    """A call that is answered with the Result, once all of it is generated.

    Args:
        request: what to generate.
        on_token: called on the event loop with each token as it comes; must not block. The result's texts are then
            what it was given, joined: a deadline adds nothing that was held back.
        shows: whether the caller shows its tokens; else they are recorded, and the result is as without `on_token`.
        client: the account that it is charged to; "" is the program that runs the Batcher.
        request_id: its name in logs and spans; "" lets the Batcher choose one.
        tag: what Interrupt and Iterate name the request by; None for one that nobody names.
        beam_width: above 1, a beam search over so many continuations, which become the result's choices.
        keep: where to put logits; None keeps none.
        drawn: what each choice has drawn on engines that died: it goes on after that. Empty for a new request. Only an
            engine's link sets it.
        is_validated: whether the gateway's end of an engine's link has validated the request. Only that link sets it.
    """

    request: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    client: str = ""
    request_id: str = field(default="", kw_only=True)
    tag: Hashable = None
    beam_width: int = 1
    keep: "Keep | None" = None
    shows: bool = field(default=True, kw_only=True)
    drawn: tuple[DrawnTokens, ...] = field(default=(), kw_only=True)
    is_validated: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Embed:
    """A call that is answered with Embedded, once all of its texts are read.

    Args:
        request: the texts to embed or to score.
        client, request_id, is_validated: see Generate.
    """

    request: EmbedRequest | ScoreRequest
    client: str = ""
    request_id: str = field(default="", kw_only=True)
    is_validated: bool = field(default=False, kw_only=True)


def validate_generate(message: Generate, limits: RequestLimits) -> None:
    """Validate a request where it comes in.

    A door has checked the types of a client's request. The program that runs the Batcher has made its own in Python.

    Raises:
        InvalidRequest: with the path of the first parameter at fault.
    """
    if not message.client:
        check_types(message.request)
    validate_request(message.request, limits)


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an Embed.

    Args:
        vectors: the embedding or the scores of each text, float32 in little endian.
        prompt_tokens: of all texts.
    """

    vectors: list[bytes]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SaveSession:
    """A call that is answered with the KV of a conversation's beginning as bytes; empty where none is at hand.

    For the program that runs the Batcher: it costs a copy of the KV, during which nothing is evaluated.

    Args:
        messages: the conversation.
        tenant: in whose name it was generated.
        model: with which adapter; None: none.
    """

    messages: list[Message]
    tenant: str = ""
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LoadSession:
    """A call that takes what SaveSession gave, for requests that begin with it; answered with its positions.

    For the program that runs the Batcher, which vouches for the bytes: they may say anything of the model's state.

    Args:
        state: of the same model, precision and block size; else the answer is InvalidRequest.
        tenant: whose requests may share it.
        model: with which adapter it was generated; None: none.
    """

    state: bytes
    tenant: str = ""
    model: str | None = None
