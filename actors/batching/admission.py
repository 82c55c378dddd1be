"""Admission: whether one more request may wait, decided before anything is spent on it.

    admission.check(wanted=1, client="a", deadline_s=60.0, load=Load(...))   # returns, or raises QueueFull

A refusal is cheap, at once, and says when to come again. What is accepted is served: nobody is thrown out later.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from genbatch.proto.errors import DeadlineExceeded, QueueFull

# What a refused caller is told to wait, per sequence ahead of it, until a pace has been measured.
RETRY_MS_PER_SEQUENCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is there when a request arrives.

    Args:
        free_slots: sequences that could start at once.
        waiting: sequences that wait for a slot, those still being tokenized included.
        waiting_of: the same by client.
        open_of: sequences accepted and not ended, by client.
        service_s: seconds that a sequence held its slot lately; None before the first ended.
    """

    free_slots: int
    waiting: int
    waiting_of: Mapping[str, int]
    open_of: Mapping[str, int]
    service_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The bounds.

    Args:
        n_parallel: slots.
        max_queue: most sequences that wait.
        max_client_queue_share: share of the queue that one client may take while others are there.
        max_client_open: sequences that one client may have open while others are there, per slot.
    """

    n_parallel: int
    max_queue: int
    max_client_queue_share: float
    max_client_open: float

    def check(self, *, wanted: int, client: str, deadline_s: float | None, load: Load) -> None:
        """Lets `wanted` more sequences of `client` in.

        Raises:
            QueueFull: the queue, or this client's share of it, is full; with retry_after_ms.
            DeadlineExceeded: it would expire before its turn.
        """
        retry_ms = self._retry_ms(load)
        if load.waiting + wanted > self.max_queue + load.free_slots:
            raise QueueFull(f"{load.waiting} requests are waiting, {self.max_queue} may", retry_after_ms=retry_ms)
        # The program that runs the Batcher itself has no name here, and no quarrel with itself.
        if client and any(other != client for other in load.open_of):
            self._check_share(wanted, client, load, retry_ms)
        expected_s = self._expected_wait_s(load)
        if deadline_s is not None and expected_s is not None and expected_s > deadline_s:
            raise DeadlineExceeded(
                f"the wait is about {expected_s:.1f} s, the deadline {deadline_s:.1f} s", retry_after_ms=retry_ms
            )

    def _check_share(self, wanted: int, client: str, load: Load, retry_ms: int) -> None:
        mine = load.waiting_of.get(client, 0)
        most = self.max_client_queue_share * self.max_queue
        if mine + wanted > most + load.free_slots:
            raise QueueFull(
                f"{mine} of this client's requests are waiting, {most:g} may while others are served",
                retry_after_ms=retry_ms,
            )
        held = load.open_of.get(client, 0)
        most = self.max_client_open * self.n_parallel
        if held + wanted > most:
            raise QueueFull(
                f"this client has {held} requests open, {most:g} may be while others are served",
                retry_after_ms=retry_ms,
            )

    def _expected_wait_s(self, load: Load) -> float | None:
        """How long the last in the queue waits, at the pace of late; None where nothing is known."""
        if load.free_slots > load.waiting:
            return 0.0
        return None if load.service_s is None else load.service_s * (load.waiting + 1) / self.n_parallel

    def _retry_ms(self, load: Load) -> int:
        """When a place for one more should be free."""
        if load.service_s is None:
            return max(1, RETRY_MS_PER_SEQUENCE * load.waiting)
        return max(1, round(1000 * load.service_s * load.waiting / self.n_parallel))
