"""The errors with which a request can end, and the table of their codes on the wire."""

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire, a map.

    Args:
        code: one of the codes of this file; a newer peer may send others.
        message: one sentence for people.
        field: path of the parameter at fault, such as "messages[0].role"; None if no single parameter is at fault.
        retry_after_ms: milliseconds after which the same request may be tried again; None if a retry cannot help.
        tokens_delivered: the tokens that were sent before the engine was lost.
    """

    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None
    tokens_delivered: int | None = None


class GenbatchError(Exception):
    """The base class of these errors: `code` is for programs, and `str(error)` is for people."""

    code = "error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[object, ...]:
        # pickle itself would call the class with the message alone
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def to_wire(self) -> ErrorInfo:
        """Return the error's form on the wire."""
        return ErrorInfo(code=self.code, message=self.message, field=self.field, retry_after_ms=self.retry_after_ms)


class InvalidRequest(GenbatchError):
    """A parameter is missing, unknown, of the wrong type or out of its range; `field` names it."""

    code = "invalid_request"

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message, field=field)


class PromptTooLong(GenbatchError):
    """The prompt leaves no room in the context for even one token of output."""

    code = "prompt_too_long"


class ModelNotFound(GenbatchError):
    """The service does not serve the named model."""

    code = "model_not_found"


class QueueFull(GenbatchError):
    """Too many requests are waiting; `retry_after_ms` is the time after which to try again."""

    code = "queue_full"


class DeadlineExceeded(GenbatchError):
    """The request's deadline passed before it had any result."""

    code = "deadline_exceeded"


class Cancelled(GenbatchError):
    """The request was cancelled before it had ended."""

    code = "cancelled"


class EngineError(GenbatchError):
    """The service failed at this request. The caller is not at fault."""

    code = "engine_error"


def to_genbatch_error(error: Exception, fault: str) -> GenbatchError:
    """Return a GenbatchError itself, and any other error as an EngineError that begins with `fault`."""
    return error if isinstance(error, GenbatchError) else EngineError(f"{fault}: {error}")


class EngineLost(GenbatchError):
    """The engine died, and this request does not continue: it may be the cause, or its deadline has passed.

    `tokens_delivered` is the number of tokens, of all choices together, that were sent before.
    """

    code = "engine_lost"

    def __init__(self, message: str, tokens_delivered: int, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.tokens_delivered = tokens_delivered

    def to_wire(self) -> ErrorInfo:
        """Return the error's form on the wire."""
        return msgspec.structs.replace(super().to_wire(), tokens_delivered=self.tokens_delivered)


class Unauthenticated(GenbatchError):
    """The service requires a key or a token, and the caller has sent no valid one."""

    code = "unauthenticated"


class Forbidden(GenbatchError):
    """The caller is known, but is not allowed to do this."""

    code = "forbidden"


class Unavailable(GenbatchError):
    """There is no answer: no service is at the address, it is stopping, or its model is being restarted."""

    code = "unavailable"


class UnknownMethod(GenbatchError):
    """The service has no such method."""

    code = "unknown_method"


class MalformedMessage(GenbatchError):
    """Bytes that are not a message of the protocol."""

    code = "malformed_message"


class FrameTooLarge(GenbatchError):
    """A message with more bytes than the receiver accepts."""

    code = "frame_too_large"


CLASSES: dict[str, type[GenbatchError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        PromptTooLong,
        ModelNotFound,
        QueueFull,
        DeadlineExceeded,
        Cancelled,
        EngineError,
        EngineLost,
        Unauthenticated,
        Forbidden,
        Unavailable,
        UnknownMethod,
        MalformedMessage,
        FrameTooLarge,
    )
}


def from_wire(info: ErrorInfo) -> GenbatchError:
    """Return the error that `info` describes; for an unknown code, a GenbatchError with this code."""
    error_class = CLASSES.get(info.code, GenbatchError)
    error = error_class.__new__(error_class)
    GenbatchError.__init__(error, info.message, field=info.field, retry_after_ms=info.retry_after_ms)
    if error_class is GenbatchError:
        error.code = info.code
    if isinstance(error, EngineLost):
        error.tokens_delivered = info.tokens_delivered or 0
    return error
