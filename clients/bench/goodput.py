"""Goodput: requests a second that kept every promise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genbatch.clients.bench.request_times import RequestTimes

METRICS = ("ttft", "tpot", "e2el")


class GoodputError(ValueError):
    """A promise that cannot be read; the message names it."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"goodput: {text!r} is not METRIC:MILLISECONDS, such as ttft:500; metrics are {', '.join(METRICS)}"
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Promises in seconds, by metric."""

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Goodput":
        """Reads "ttft:500", in milliseconds; several may stand in one text, with spaces between them.

        Raises:
            GoodputError: one of them cannot be read, or its metric was there already.
        """
        limits: dict[str, float] = {}
        for text in " ".join(texts).split():
            name, _, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                raise GoodputError(text) from None
            if name not in METRICS or name in limits or not 0 < limit < math.inf:
                raise GoodputError(text)
            limits[name] = limit / 1e3
        return cls(limits)

    def keeps(self, times: RequestTimes) -> bool:
        """Whether a request ended well and in time; one token has no TPOT and breaks no promise of it."""
        if times.error is not None:
            return False
        values = {name: getattr(times, name) for name in self.limits_s}
        return all(value is None or value <= self.limits_s[name] for name, value in values.items())
