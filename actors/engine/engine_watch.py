"""EngineWatch: what a gateway knows of its engine's health without asking: its beats, and the silence between them."""

import msgspec

from genbatch.proto.service_messages import Health, HealthStatus


class EngineWatch:
    """Of one engine after another. Times are seconds on the event loop's clock.

    Args:
        stall_s: seconds without a sign of life, or without the end of a step while there is work, after which an
            engine is stuck.
    """

    def __init__(self, stall_s: float) -> None:
        self.is_given_up = False  # and is being killed
        self._stall_s = stall_s
        self._health: Health | None = None  # as it said last
        self._last_heard = 0.0

    def joined(self, now: float) -> None:
        """A new engine is there."""
        self.is_given_up = False
        self._health = None
        self._last_heard = now

    def lost(self) -> None:
        """There is none."""
        self._health = None

    def heard(self, now: float) -> None:
        """It has sent something."""
        self._last_heard = now

    def beat(self, health: Health) -> None:
        """It has said how it is."""
        self._health = health

    def was_deaf(self, seconds: float) -> None:
        """This event loop was held up, and nobody could be heard meanwhile."""
        self._last_heard += seconds

    def stalled_s(self, now: float) -> float:
        """Seconds without progress that should have been."""
        return now - self._last_heard + (self._health.stalled_s if self._health is not None else 0.0)

    def is_stuck(self, now: float) -> bool:
        """Whether to wait for it no longer."""
        return self.stalled_s(now) > self._stall_s

    def report(self, now: float, *, draining: bool, waiting: int) -> Health:
        """What to say of the service, with so many requests open."""
        if self._health is None:
            return Health(status="down", steps=0, requests_running=0, requests_waiting=waiting, stalled_s=0.0)
        status: HealthStatus = "draining" if draining else self._health.status
        if self.is_stuck(now):
            status = "stuck"
        return msgspec.structs.replace(self._health, status=status, stalled_s=self.stalled_s(now))
