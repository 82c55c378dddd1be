"""StallWatch: tells a Batcher that is stuck from one that is idle or busy."""

from genbatch.proto.messages import Health, HealthStatus


class StallWatch:
    """Knows when the Batcher last got on with its work.

    Args:
        stall_s: seconds of pending work without the end of a step after which it counts as stuck.
        now: seconds on the event loop's clock.
    """

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._since = now

    def restart(self, now: float) -> None:
        """A step has ended, or there is work after there was none."""
        self._since = now

    def health(self, now: float, *, num_open: int, draining: bool, steps: int, running: int, waiting: int) -> Health:
        """What to say of the service while `num_open` requests are open."""
        stalled_s = now - self._since if num_open else 0.0
        status: HealthStatus = "draining" if draining else "ready"
        if stalled_s > self._stall_s:
            status = "stuck"
        return Health(
            status=status,
            steps=steps,
            requests_running=running,
            requests_waiting=waiting,
            stalled_s=stalled_s,
        )
