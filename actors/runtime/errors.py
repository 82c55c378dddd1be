"""The errors of the actor runtime."""


class ActorError(Exception):
    """The base class of the runtime's errors."""

    def __reduce__(self) -> tuple[object, ...]:
        # pickle itself would call the class with the message alone
        return Exception.__new__, (type(self), *self.args), self.__dict__


class ActorDown(ActorError):
    """The actor is not running, or stopped before it replied.

    `reason` is an `Exit`, the exception that ended the actor (also the `__cause__`), or None when no actor
    has the name.
    """

    def __init__(self, name: str, reason: object = None) -> None:
        super().__init__(f"actor {name!r} is not running" if reason is None else f"actor {name!r} ended: {reason!r}")
        self.name = name
        self.reason = reason
        if isinstance(reason, BaseException):
            self.__cause__ = reason


class CallTimeout(ActorError):
    """No reply came within the timeout. The actor may still handle the request; its reply will be dropped."""

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__(f"actor {name!r} did not reply within {timeout_s} s")
        self.name = name
        self.timeout_s = timeout_s


class MailboxFull(ActorError):
    """The actor's mailbox is full; the message was not sent."""

    def __init__(self, name: str, max_size: int) -> None:
        super().__init__(f"the mailbox of actor {name!r} is full ({max_size} messages)")
        self.name = name
        self.max_size = max_size


class NameTaken(ActorError):
    """Another running actor is registered under the name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a running actor is already registered as {name!r}")
        self.name = name


class StartFailed(ActorError):
    """A supervisor's child did not start; the `__cause__` is the error."""

    def __init__(self, child_id: str) -> None:
        super().__init__(f"child {child_id!r} did not start")
        self.child_id = child_id


class RestartLimit(ActorError):
    """A supervisor's children needed more restarts than it allows; the `__cause__` is the last failure."""

    def __init__(self, name: str, child_id: str, max_restarts: int, max_seconds: float, reason: object) -> None:
        super().__init__(
            f"supervisor {name!r} gave up on child {child_id!r}: "
            f"more than {max_restarts} restarts within {max_seconds} s, the last after: {reason}"
        )
        self.child_id = child_id


class WorkerClosed(ActorError):
    """The worker accepts no more jobs."""

    def __init__(self, name: str) -> None:
        super().__init__(f"worker {name!r} is closed")
        self.name = name
