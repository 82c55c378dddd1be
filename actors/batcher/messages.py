"""Messages to the Batcher with more than a protocol request: the account, the token callback and more.

Other methods send their protocol request unchanged (`proto/methods.py`).

This file imports numpy only for logits that are kept, since a gateway process does without it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from genbatch.proto.messages import DrawnTokens, EmbedRequest, GenerateRequest, Message, ScoreRequest, Token

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Claude Code writes such a line at the top of its system prompt, with another value in each request.
BILLING_HEADER = "x-anthropic-billing-header:"


class Keep:
    """The caller makes this object, the Batcher fills it, and it is complete when the call is answered.

    Keeping the prompt's logits evaluates the whole prompt: no part of the prompt then comes from a cache.

    Args:
        context: whether to keep the logits after every token of the prompt.
        generation: whether to keep the logits that every generated token was chosen from.
    """

    def __init__(self, *, context: bool = False, generation: bool = False) -> None:
        self.context = context
        self.generation = generation
        self._context: dict[int, npt.NDArray[np.float32]] = {}  # by position
        self._generation: dict[int, list[npt.NDArray[np.float32]]] = {}  # by choice or beam

    def add_context(self, first: int, rows: "npt.NDArray[np.float32]") -> None:
        """Book the logits [n, vocab_size] after positions first, first + 1, …; a repeat replaces them."""
        self._context.update(enumerate(rows, first))

    def add_generation(self, choice: int, row: "npt.NDArray[np.float32]") -> None:
        """Book the logits [vocab_size] that the choice's next token was chosen from."""
        self._generation.setdefault(choice, []).append(row)

    def set_generation(self, choice: int, rows: "list[npt.NDArray[np.float32]]") -> None:
        """Book all of a beam's rows at once, since a beam's rank is known only at the end."""
        self._generation[choice] = rows

    def context_logits(self) -> "npt.NDArray[np.float32] | None":
        """Return [num_prompt_tokens, vocab_size]; None if nothing was kept."""
        return _stack([self._context[position] for position in sorted(self._context)])

    def generation_logits(self, choice: int = 0) -> "npt.NDArray[np.float32] | None":
        """Return [num_generated, vocab_size]; None if nothing was kept."""
        return _stack(self._generation.get(choice, []))

    def last_generation_row(self) -> "npt.NDArray[np.float32] | None":
        """Return the newest row of the first choice, [vocab_size]; None if nothing was kept."""
        rows = self._generation.get(0)
        return rows[-1] if rows else None


def _stack(rows: "list[npt.NDArray[np.float32]]") -> "npt.NDArray[np.float32] | None":
    import numpy as np  # here: a gateway process does without

    return np.stack(rows) if rows else None


@dataclass(frozen=True, slots=True)
class Generate:
    """A call to generate text; the reply is the Result, once the last token is drawn.

    Args:
        request: the request to generate.
        on_token: called on the event loop with each new token; must not block. The result's texts are then the joined
            texts of these tokens: a deadline adds no text that was held back.
        shows: whether the caller shows its tokens; else it records them, and the result is as without `on_token`.
        client: the account that the request is charged to; "" for in-process requests.
        request_id: its name in logs and spans; "" lets the Batcher choose one.
        tag: the name of the request in Interrupt and Iterate; None for a request without one.
        beam_width: above 1, a beam search over this many continuations, which become the result's choices.
        keep: collects logits; None keeps none.
        drawn: the tokens that each choice has drawn before; generation continues after them. Empty for a new request.
        is_admitted: whether an earlier engine has admitted the request, so that it does not queue again. Only an
            engine's link sets it.
        is_validated: whether the gateway's end of an engine's link has validated the request. Only that link sets it.
    """

    request: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    client: str = ""
    request_id: str = field(default="", kw_only=True)
    tag: Hashable = None
    beam_width: int = 1
    keep: Keep | None = None
    shows: bool = field(default=True, kw_only=True)
    drawn: tuple[DrawnTokens, ...] = field(default=(), kw_only=True)
    is_admitted: bool = field(default=False, kw_only=True)
    is_validated: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Embed:
    """A call to embed or score texts; the reply is Embedded, once all texts are evaluated.

    Args:
        request: the texts to embed or to score.
        client, request_id, is_validated: see Generate.
    """

    request: EmbedRequest | ScoreRequest
    client: str = ""
    request_id: str = field(default="", kw_only=True)
    is_validated: bool = field(default=False, kw_only=True)


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an Embed.

    Args:
        vectors: the embedding or the scores of each text, float32 in little endian.
        prompt_tokens: the tokens of all texts.
    """

    vectors: list[bytes]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SaveSession:
    """A call for the KV of a conversation's prefix; the reply is bytes, empty if no KV is cached.

    Only in-process callers send it: the call copies the KV, and no step runs meanwhile.

    Args:
        messages: the conversation.
        tenant: the tenant that the conversation was generated for.
        model: the adapter; None for the model itself.
    """

    messages: list[Message]
    tenant: str = ""
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LoadSession:
    """A call to load the bytes of a SaveSession, for later requests with this prefix; the reply is its positions.

    Only in-process callers send it, and they must trust the bytes: the bytes can set any state of the model.

    Args:
        state: the bytes; another model, precision or block size is refused with InvalidRequest.
        tenant: the tenant that may share the prefix.
        model: the adapter that generated it; None for the model itself.
    """

    state: bytes
    tenant: str = ""
    model: str | None = None


DRAINING = "the service is draining: it takes no new requests"
# Milliseconds. Another process of the service may answer within this time; a restart takes longer.
RETRY_AFTER_DRAIN_MS = 1000


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The timeout of a DrainRequest has passed."""
