"""Errors that end a process before it is ready, as they come out where it was started."""

from genbatch.actors.engine.control_messages import StartFailed
from genbatch.actors.gateways.errors import AddressError, InsecureBind, KeyFileError
from genbatch.actors.runtime.errors import ActorError
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.nif.errors import ModelError, OptionError


class ProcessFailed(ActorError):
    """A process ended before it was ready; its standard error tells more."""


class ProcessDied(ActorError):
    """A process that was ready has ended."""

    def __init__(self, name: str, returncode: int) -> None:
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        super().__init__(f"the {name} process {how}")
        self.returncode = returncode


_CLASSES: dict[str, type[Exception]] = {
    known.__name__: known
    for known in (ModelError, OptionError, SchedulerError, AddressError, InsecureBind, KeyFileError)
}


def to_message(error: Exception) -> StartFailed:
    """The error as it travels."""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    return StartFailed(type(error).__name__, str(error), attributes)


def to_error(message: StartFailed) -> Exception:
    """The error with its class, its text and the attributes that are text; ProcessFailed where the class is another."""
    kind = _CLASSES.get(message.kind)
    if kind is None:
        return ProcessFailed(f"{message.kind}: {message.message}")
    error = kind.__new__(kind)
    Exception.__init__(error, message.message)
    vars(error).update(message.attributes)
    return error
