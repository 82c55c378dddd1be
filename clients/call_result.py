"""CallResult: what has come of one call so far, whoever waits for it and however."""

from collections import deque
from typing import Any

import outcome

from genbatch.clients.errors import StreamNotEnded
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Result, Token


class CallResult:
    """Tokens not yet read, and the final once it is there. Subclasses wake who waits in `changed`."""

    __slots__ = ("final", "tokens")

    def __init__(self) -> None:
        self.tokens: deque[Token] = deque()
        self.final: outcome.Outcome[Any] | None = None

    def push(self, token: Token) -> None:
        """Takes the next token."""
        self.tokens.append(token)
        self.changed()

    def finish(self, result: object) -> None:
        """Takes the result; a final that came before stands."""
        self._end(outcome.Value(result))

    def fail(self, error: GenbatchError) -> None:
        """Takes the error that ended the call; a final that came before stands."""
        self._end(outcome.Error(error))

    def unwrap(self) -> Any:
        """The result.

        Raises:
            GenbatchError: the error that ended the call.
            StreamNotEnded: it has not ended.
        """
        match self.final:
            case outcome.Value(value):
                return value
            case outcome.Error(error):
                raise error
        raise StreamNotEnded

    @property
    def result(self) -> Result:
        """What a stream ended with.

        Raises:
            GenbatchError: the error that ended it.
            StreamNotEnded: it has not ended.
        """
        result: Result = self.unwrap()
        return result

    def changed(self) -> None:
        """Called after a token or the final came."""

    def _end(self, final: outcome.Outcome[Any]) -> None:
        if self.final is None:
            self.final = final
            self.changed()
