"""TopHistory: what changed between one look at a service's stats and the next."""

from collections import deque
from collections.abc import Mapping
from typing import Any

# Looks kept: as many columns as a wide terminal gives a sparkline.
MAX_LOOKS = 240


class TopHistory:
    """The stats of a service as they come; the last of them is `stats`."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}
        self.rates: deque[float] = deque(maxlen=MAX_LOOKS)  # generated tokens a second, one a look
        self.shares: list[tuple[str, float]] = []  # (tenant, its share of what was generated since the last look)
        self._at = 0.0

    def add(self, stats: Mapping[str, Any], now: float) -> None:
        """Takes the stats of the time `now`, in seconds on a clock that does not go back."""
        before, seconds = self.stats, now - self._at
        self.stats, self._at = stats, now
        if not before or stats["generation_tokens"] < before["generation_tokens"]:  # the first look, or a restart
            self.shares = _shares(stats["tenants"], {})
            return
        if seconds > 0:
            self.rates.append((stats["generation_tokens"] - before["generation_tokens"]) / seconds)
        self.shares = _shares(stats["tenants"], before["tenants"]) or self.shares


def _shares(tenants: Mapping[str, Any], before: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Largest first; nothing where nothing was generated."""
    grown = {
        name: counted["generation_tokens"] - before.get(name, {}).get("generation_tokens", 0)
        for name, counted in tenants.items()
    }
    total = sum(grown.values())
    if not total:
        return []
    return sorted(((name, count / total) for name, count in grown.items() if count), key=lambda pair: -pair[1])
