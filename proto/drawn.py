"""The tokens that a stream has shown, from which another engine or another gateway goes on.

    record = TokenRecord(scored=False)
    record.add(token)                    # each token of a choice, in order
    record.drawn()                       # DrawnTokens: all tokens so far

A draw depends only on the logits, the seed and the position. All other state of an answer is a function of its tokens.
So a request with its drawn tokens continues with the same next token as if nothing had happened.
"""

import math
import secrets
from array import array
from collections.abc import Sequence

import msgspec

from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import GenerateRequest, Token
from genbatch.proto.validation import MAX_SEED


class DrawnTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens that a choice has drawn, from its first token on.

    Args:
        token_ids: the tokens.
        logprobs: for each token its log-prob and the likeliest tokens' log-probs; empty if not requested.
        call_ids: the ids of the tool calls that were shown.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, dict[int, float]]] = []
    call_ids: list[str] = []


class TokenRecord:
    """The drawn tokens of a choice, kept until its request has ended.

    Args:
        scored: whether the request asks for log-probs.
        drawn: the tokens that were drawn before.
    """

    __slots__ = ("_call_ids", "_logprobs", "_token_ids", "scored")

    def __init__(self, *, scored: bool, drawn: DrawnTokens | None = None) -> None:
        drawn = drawn or DrawnTokens([])
        self.scored = scored
        self._token_ids = array("I", drawn.token_ids)
        self._logprobs = list(drawn.logprobs)
        self._call_ids = list(drawn.call_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token: Token) -> None:
        """Keep the next token; a scored record needs its log-prob."""
        if self.scored:
            assert token.logprob is not None, "a token without a log-prob"
            self._logprobs.append((token.logprob, token.top))
        self._token_ids.append(token.token_id)
        self._call_ids += [piece.id for piece in token.tool_calls if piece.id is not None]

    def drawn(self) -> DrawnTokens:
        """Return all drawn tokens."""
        return DrawnTokens(self._token_ids.tolist(), self._logprobs, self._call_ids)


def validate_drawn(drawn: Sequence[DrawnTokens], request: GenerateRequest) -> None:
    """Check the drawn tokens that a client brings with its request; the engine checks that they are the model's.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    if not drawn:
        return
    if len(drawn) != request.n:
        raise InvalidRequest("drawn", f"has the tokens of {len(drawn)} choices, the request has n = {request.n}")
    for choice, one in enumerate(drawn):
        path = f"drawn[{choice}]"
        if one.token_ids and not (min(one.token_ids) >= 0 and max(one.token_ids) < 2**32):
            raise InvalidRequest(f"{path}.token_ids", "has an id below 0 or of more than 32 bits")
        if len(one.call_ids) > len(one.token_ids):
            raise InvalidRequest(f"{path}.call_ids", "has more calls than tokens")
        if len(one.logprobs) != (len(one.token_ids) if request.logprobs is not None else 0):
            raise InvalidRequest(f"{path}.logprobs", "must have one entry a token if the request asks for log-probs")
        for index, (logprob, top) in enumerate(one.logprobs):
            if not (math.isfinite(logprob) and all(map(math.isfinite, top.values()))):
                raise InvalidRequest(f"{path}.logprobs[{index}]", "is not finite")


def replayable(request: GenerateRequest) -> GenerateRequest:
    """Return the request with a seed, so that it has the same draws when it is sent again."""
    if request.seed is not None:
        return request
    return msgspec.structs.replace(request, seed=secrets.randbelow(MAX_SEED + 1))


class ShownTokens:
    """The tokens that a stream has received, from which it continues elsewhere.

    Args:
        request: the stream's request.
        drawn: the tokens of an earlier stream of this request.
    """

    __slots__ = ("_is_whole", "_records", "_request")

    def __init__(self, request: GenerateRequest, drawn: tuple[DrawnTokens, ...] = ()) -> None:
        self._request = request
        scored = request.logprobs is not None
        self._records = {choice: TokenRecord(scored=scored, drawn=one) for choice, one in enumerate(drawn)}
        self._is_whole = True

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def add(self, token: Token) -> None:
        """Keep the next token."""
        scored = self._request.logprobs is not None
        if not 0 <= token.token_id < 2**32 or (scored and token.logprob is None):
            self._is_whole = False  # the service has sent something else than the request asks for
            return
        record = self._records.get(token.choice)
        if record is None:
            record = self._records[token.choice] = TokenRecord(scored=scored)
        record.add(token)

    def drawn(self) -> tuple[DrawnTokens, ...]:
        """Return the tokens of each choice; an empty tuple before the first token.

        Raises:
            Unavailable: the stream cannot continue.
        """
        if not self._is_whole:
            raise Unavailable("the stream was lost, and its tokens do not suffice to continue it")
        if not len(self):
            return ()
        records = [self._records.get(choice) for choice in range(self._request.n)]
        return tuple(DrawnTokens([]) if record is None else record.drawn() for record in records)
