"""Log the events of a process's actors, and trace its requests if the operator asks for it.

    start_logging("json", "info")
    await nursery.start(observe, telemetry)
    log_event("ready", model="smollm2")

The log is on standard error, one line for each event: text for people or JSON for machines. A line about a request has
its request_id. No line holds text of a prompt or of an answer.
"""

import logging
import os
import select
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TextIO

import trio

from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.errors import OptionError, how_to_install

if TYPE_CHECKING:  # its import takes a twelfth of a short command's time, so only processes with a log import it
    import structlog
    from structlog.typing import Processor

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# The level of each logged event. An actor's single messages are not logged, since they would hide all other lines.
_LEVELS = {
    "supervisor.child_start": logging.INFO,
    "supervisor.child_exit": logging.ERROR,
    "supervisor.start_failed": logging.ERROR,
    "supervisor.restart": logging.WARNING,
    "supervisor.child_overdue": logging.WARNING,
    "supervisor.gave_up": logging.ERROR,
    "actor.mailbox_full": logging.WARNING,
    "actor.terminate_failed": logging.ERROR,
    "actor.terminate_overdue": logging.WARNING,
    "request.accepted": logging.DEBUG,
    "request.started": logging.DEBUG,
    "request.first_token": logging.DEBUG,
    "request.preempted": logging.DEBUG,
    "request.refused": logging.INFO,
    "request.finished": logging.INFO,
}
# A process passes these to the processes that it starts.
_FORMAT_VARIABLE, LEVEL_VARIABLE = "GENBATCH_LOG_FORMAT", "GENBATCH_LOG_LEVEL"


@cache
def _log() -> "structlog.stdlib.BoundLogger":
    import structlog

    log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger("genbatch.serve"),
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return log


def start_logging(log_format: LogFormat | None = None, level: LogLevel | None = None) -> None:
    """Write the log of this process, and of the processes that it starts, to standard error.

    Records of Python's `logging` take the same form: our records from `level` on, libraries' records from warnings on.

    Args:
        log_format, level: None takes the values of the process that started this one, or else text and info.
    """
    import structlog

    chosen = log_format or os.environ.get(_FORMAT_VARIABLE, "text")
    threshold = level or os.environ.get(LEVEL_VARIABLE, "info")
    os.environ[_FORMAT_VARIABLE], os.environ[LEVEL_VARIABLE] = chosen, threshold
    handler = _LineHandler()
    handler.setFormatter(_formatter(as_json=chosen == "json"))
    root = logging.getLogger()
    for ours in [old for old in root.handlers if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(ours)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("genbatch").setLevel(threshold.upper())
    logging.captureWarnings(True)


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error, but drops records while its reader does not read.

    A program that starts a service with a pipe and never reads it would stop the service once the pipe is full.

    On a terminal a record replaces the current line, such as the progress bar of another process, which is drawn again
    below the record.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start = _CLEAR_LINE if self.stream.isatty() else ""
        self._num_dropped = 0
        self._room: select.poll | None = None
        with suppress(OSError):  # some streams, such as a test's, have no descriptor
            number = self.stream.fileno()
            self._room = select.poll()
            self._room.register(number, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, and how many were dropped before it."""
        if self._is_full():
            self._num_dropped += 1
            return
        if self._num_dropped:
            text = f"{self._num_dropped} lines of the log were dropped: its reader did not read"
            self._num_dropped = 0
            super().emit(logging.LogRecord(record.name, logging.WARNING, "", 0, text, None, None))
        super().emit(record)

    def _is_full(self) -> bool:
        """Whether a write may wait: a pipe has no room for PIPE_BUF bytes, or a terminal is stopped."""
        return self._room is not None and not self._room.poll(0)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        return self._start + super().format(record)


_CLEAR_LINE = "\r\x1b[2K"


def log_event(event: str, **values: object) -> None:
    """Log one line at level info."""
    _log().info(event, **values)


def log_telemetry(telemetry: Telemetry) -> Callable[[], None]:
    """Log the events of `_LEVELS` until the returned function is called."""
    log = _log()

    def handle(event: str, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
        level = _LEVELS.get(event)
        if level is not None and log.isEnabledFor(level):
            numbers = {name: round(value, 6) for name, value in measurements.items()}
            log.log(level, event, **metadata, **numbers)

    return telemetry.attach(handle)


def _formatter(*, as_json: bool) -> logging.Formatter:
    import structlog

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    ]
    last: Processor = structlog.processors.JSONRenderer() if as_json else _text_line
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[], processors=[*shared, last])


def _text_line(logger: object, method: str, fields: MutableMapping[str, Any]) -> str:
    """Return `time level event key=value ...`; an exception follows on lines of its own."""
    time, level = fields.pop("timestamp"), fields.pop("level")
    event = str(fields.pop("event")).strip().replace("\n", "\\n")  # a library's or a client's text stays on one line
    fields.pop("logger", None)
    exception = fields.pop("exception", None)
    line = " ".join([time, f"{level:7}", event, *(f"{name}={_plain(value)}" for name, value in fields.items())])
    return f"{line}\n{exception}" if exception else line


def _plain(value: object) -> str:
    """Return the value as text, in quotes if it has spaces or quotes."""
    text = repr(value) if isinstance(value, BaseException) else str(value)
    return repr(text) if not text or any(character in text for character in ' "\n=') else text


_OTEL_VARIABLE = "GENBATCH_OTEL"
# Seconds for sending the last spans.
FLUSH_S = 2.0


def start_tracing() -> None:
    """Let `observe` trace requests, in this process and in the processes that it starts.

    Raises:
        OptionError: OpenTelemetry is not installed.
    """
    try:
        import genbatch.actors.observing.tracing  # noqa: F401
    except ImportError as error:
        raise OptionError("otel", f"{error.name} is not installed; {how_to_install('otel')}") from error
    os.environ[_OTEL_VARIABLE] = "1"


async def observe(telemetry: Telemetry, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Log and trace the events of `telemetry` until cancelled, then send the last spans."""
    with ExitStack() as stack:
        stack.callback(log_telemetry(telemetry))
        if os.environ.get(_OTEL_VARIABLE) != "1":
            task_status.started()
            await trio.sleep_forever()
        from genbatch.actors.observing.tracing import open_provider, trace_requests

        provider = open_provider()
        stack.callback(trace_requests(telemetry, provider))
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(FLUSH_S):
                    await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
