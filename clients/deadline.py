"""Deadline: how long a caller waits, as the `deadline_s` that its request carries."""

import math
from collections.abc import Callable

import msgspec

from genbatch.proto.messages import GenerateRequest
from genbatch.proto.request_limits import RequestLimits

# A service takes no longer ones unless its operator says so; a caller who waits for longer waits for ever.
MAX_DEADLINE_S = RequestLimits().max_deadline_s


class Deadline:
    """Tells the service when nobody waits any more, so that it need not find out.

    Args:
        request: as the caller wrote it; its own `deadline_s` counts from now.
        now: the clock, in seconds.
        scope_ends: when the caller stops waiting, on that clock; infinite if it does not say.
    """

    def __init__(self, request: GenerateRequest, now: Callable[[], float], scope_ends: float = math.inf) -> None:
        self._request = request
        self._now = now
        ends = math.inf if request.deadline_s is None else now() + request.deadline_s
        if scope_ends - now() <= MAX_DEADLINE_S:
            ends = min(ends, scope_ends)
        self._ends = ends

    def remaining_request(self) -> GenerateRequest:
        """The request with the time that is left; one that has none left is for the service to refuse."""
        asked = self._request.deadline_s
        if math.isinf(self._ends) or (asked is not None and not asked > 0):
            return self._request
        left = max(self._ends - self._now(), 0.001)
        return msgspec.structs.replace(self._request, deadline_s=left)
