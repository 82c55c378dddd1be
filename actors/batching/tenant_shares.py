"""TenantShares: what each tenant has had, for a bounded number of tenants."""

from dataclasses import asdict, dataclass
from typing import Any

# Names come from clients, so there may be any number of them: who comes after these is counted together.
MAX_TENANTS = 32
OTHERS = "other"


@dataclass(slots=True)
class TenantShare:
    """One tenant's counters."""

    requests: int = 0
    running: int = 0  # requests accepted and not ended
    prompt_tokens: int = 0
    generation_tokens: int = 0


class TenantShares:
    """The shares by tenant; requests without a tenant have the name ""."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def of(self, tenant: str) -> TenantShare:
        """The share that a tenant's requests are booked in."""
        share = self._shares.get(tenant)
        if share is None:
            name = tenant if len(self._shares) < MAX_TENANTS else OTHERS
            share = self._shares.setdefault(name, TenantShare())
        return share

    def snapshot(self) -> dict[str, Any]:
        """Plain data: {tenant: counters}."""
        return {name: asdict(share) for name, share in self._shares.items()}
