"""Telemetry: named events with numbers and labels, for the attached handlers.

    telemetry = Telemetry()
    detach = telemetry.attach(lambda event, measurements, metadata: print(event, measurements, metadata))
    ref = await start(nursery, Counter(), name="counter", telemetry=telemetry)

Events of the runtime (measurements | metadata):

    actor.start               | name                     init has succeeded
    actor.stop                duration_s | name, reason  after terminate; reason is an Exit or the exception
    actor.message             duration_s, waiting | name, kind   one message handled; waiting = still queued
    actor.mailbox_full        max_size | name            a message was refused
    actor.call_abandoned      | name, reason             a caller has left; Exit.TIMEOUT or Exit.CANCELLED
    actor.reply_dropped       | name                     a reply came after its caller had left
    actor.unhandled_info      | name, message            no handle_info was written for it
    actor.terminate_failed    | name, error              terminate raised
    actor.terminate_overdue   shutdown_s | name          terminate was cut off
    supervisor.child_start    | name, child_id
    supervisor.child_exit     | name, child_id, reason   a child ended without a request to end
    supervisor.start_failed   | name, child_id, reason   a child did not start again
    supervisor.restart        restarts | name, child_id  restarts within max_seconds, this one included
    supervisor.child_overdue  shutdown_s | name, child_id   a cancelled child has not ended yet
    supervisor.gave_up        | name, child_id, reason   restart intensity exceeded
"""

import logging
from collections.abc import Callable, Mapping

Handler = Callable[[str, Mapping[str, float], Mapping[str, object]], None]

logger = logging.getLogger(__name__)


class Telemetry:
    """The attached handlers. They run on the event loop's thread, so they must be quick.

    Attributes:
        handlers: the attached handlers; without one an emitter need not measure.
    """

    def __init__(self) -> None:
        self.handlers: list[Handler] = []

    def attach(self, handler: Handler) -> Callable[[], None]:
        """Call `handler(event, measurements, metadata)` on each event until the returned function is called."""
        self.handlers.append(handler)

        def detach() -> None:
            if handler in self.handlers:
                self.handlers.remove(handler)

        return detach

    def execute(self, event: str, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
        """Call every attached handler.

        A handler that raises is logged and detached, so that observing an actor cannot stop the actor.
        """
        for handler in tuple(self.handlers):
            try:
                handler(event, measurements, metadata)
            except Exception:
                logger.exception("telemetry handler %r failed on %s and is detached", handler, event)
                if handler in self.handlers:
                    self.handlers.remove(handler)
