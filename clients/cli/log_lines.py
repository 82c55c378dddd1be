"""The log of a running service: one plain line an event, `time level event key=value ...`."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from genbatch.actors.runtime.telemetry import Telemetry

log = logging.getLogger("genbatch.serve")

# What an operator wants to know of: ends and restarts. Messages of single actors would drown them.
_LEVELS = {
    "supervisor.child_start": logging.INFO,
    "supervisor.child_exit": logging.ERROR,
    "supervisor.restart": logging.WARNING,
    "supervisor.child_overdue": logging.WARNING,
    "supervisor.gave_up": logging.ERROR,
    "actor.mailbox_full": logging.WARNING,
    "actor.terminate_failed": logging.ERROR,
    "actor.terminate_overdue": logging.WARNING,
}


class LineFormatter(logging.Formatter):
    """Time in UTC, level, message; an exception follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        line = f"{time}Z {record.levelname.lower():7} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging() -> None:
    """Writes the log of everything named genbatch to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("genbatch")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_event(event: str, **values: object) -> None:
    """One line at level info."""
    log.info("%s", line(event, values))


def log_telemetry(telemetry: Telemetry) -> None:
    """Logs the events that an operator wants to know of."""

    def handle(event: str, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
        if event in _LEVELS:
            log.log(_LEVELS[event], "%s", line(event, {**metadata, **measurements}))

    telemetry.attach(handle)


def line(event: str, values: Mapping[str, object]) -> str:
    """`event key=value ...`, values with spaces or quotes in quotes."""
    return " ".join([event, *(f"{name}={_plain(value)}" for name, value in values.items())])


def _plain(value: object) -> str:
    text = repr(value) if isinstance(value, BaseException) else str(value)
    return repr(text) if not text or any(character in text for character in ' "\n=') else text
