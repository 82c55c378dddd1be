"""What travels beside generations: token ids and text, which model is served, and how the service is."""

from typing import Any, Literal

import msgspec

from genbatch.proto.messages import Message
from genbatch.proto.tools import Tool

HealthStatus = Literal["ready", "draining", "stuck", "down"]


class HelloRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client's introduction; the first message on a connection whose service asks for a token.

    Args:
        token: who calls, where that is asked for.
    """

    token: str | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A service's introduction.

    Args:
        methods: what it can be asked.
        tenant: in whose name the caller's requests are served; None where no token or key is asked for.
    """

    methods: tuple[str, ...]
    tenant: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to make token ids of; exactly one of `prompt` and `messages` is given.

    Args:
        prompt: text; may be empty.
        messages: a conversation, rendered by the model's chat template; at least one.
        tools, chat_template_kwargs: as `generate` takes them; only with `messages`.
        add_special_tokens: put the start token in front of `prompt`, if the model wants one, as `generate` does;
            `messages` have those of their template.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True


class TokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """A text's token ids."""

    token_ids: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids to make text of.

    Args:
        token_ids: each >= 0 and below the logits' width; may be none.
    """

    token_ids: list[int]


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids; special tokens stand for no text, parts of a character for U+FFFD."""

    text: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served.

    Args:
        id: its name.
        n_ctx: most positions, prompt and output together, of one request.
        n_parallel: sequences generated at once.
        vocab_size: width of the logits; token ids are below it.
        dtype: of the weights before any quantising, such as "float32".
        quantize: "none", or how the weights are quantised.
        runner: what evaluates it.
        device: where, such as "cpu" or "cuda:0".
    """

    id: str
    n_ctx: int
    n_parallel: int
    vocab_size: int
    dtype: str
    quantize: str
    runner: str
    device: str


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are served."""

    models: tuple[ModelCard, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the service is.

    Args:
        status: "ready"; "draining": no new requests are taken; "stuck": work is pending and no step has ended for
            too long; "down": the engine does not answer, and the counts are not known.
        steps: steps since the start.
        requests_running: sequences that have a slot.
        requests_waiting: sequences that wait for one.
        stalled_s: seconds since there was progress or nothing to do.
    """

    status: HealthStatus
    steps: int
    requests_running: int
    requests_waiting: int
    stalled_s: float


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take no new requests and let the accepted ones end.

    Args:
        timeout_s: seconds after which those still open are cancelled; >= 0.
    """

    timeout_s: float = 30.0


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Every accepted request has ended.

    Args:
        num_cancelled: requests that had to be cancelled.
    """

    num_cancelled: int
