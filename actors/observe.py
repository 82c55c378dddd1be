"""What a process of the service does with the events of its actors: it logs them, and traces requests if told to."""

import os
from contextlib import ExitStack

import trio

from genbatch.actors.log_lines import log_telemetry
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.errors import OptionError

_OTEL_VARIABLE = "GENBATCH_OTEL"
# Seconds in which the last spans may leave.
FLUSH_S = 2.0


def start_tracing() -> None:
    """Lets `observe` trace requests, in this process and in those that it starts.

    Raises:
        OptionError: OpenTelemetry is not installed.
    """
    try:
        import genbatch.actors.tracing  # noqa: F401
    except ImportError as error:
        raise OptionError("otel", f'{error.name} is not installed: pip install "genbatch[otel]"') from error
    os.environ[_OTEL_VARIABLE] = "1"


async def observe(telemetry: Telemetry, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Logs and traces what `telemetry` tells, until it is cancelled; then the last spans leave."""
    with ExitStack() as stack:
        stack.callback(log_telemetry(telemetry))
        if os.environ.get(_OTEL_VARIABLE) != "1":
            task_status.started()
            await trio.sleep_forever()
        from genbatch.actors.tracing import open_provider, trace_requests

        provider = open_provider()
        stack.callback(trace_requests(telemetry, provider))
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(FLUSH_S):
                    await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
