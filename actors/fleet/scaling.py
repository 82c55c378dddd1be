"""How many replicas a fleet should have: a pure function of what waits and what is open."""

from dataclasses import dataclass

from genbatch.actors.fleet.routing import RouterError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """When a fleet grows and shrinks.

    Args:
        min_replicas, max_replicas: bounds; a minimum of 0 lets an idle fleet go, and the first request waits for one.
        tokens_per_replica: prompt tokens that may wait for each replica; what is more wants another one.
        idle_s: seconds for which fewer replicas must have sufficed before one is let go.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    tokens_per_replica: int = 4096
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises:
        RouterError: a bound is out of range.
        """
        if not 0 <= self.min_replicas <= self.max_replicas or not self.max_replicas:
            raise RouterError(
                f"replicas: from {self.min_replicas} to {self.max_replicas} is no range that holds one replica"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """What a fleet has to do.

    Args:
        replicas: those there, starting ones included.
        slots: of one replica.
        open: requests in replicas.
        tokens_waiting: prompt tokens that nobody has computed.
        without_replica: requests that no replica has.
    """

    replicas: int
    slots: int
    open: int
    tokens_waiting: int
    without_replica: int


def wanted_replicas(rule: ScaleRule, load: FleetLoad) -> int:
    """How many replicas this load wants, within the rule's bounds.

    One for as many open requests as three quarters of its slots, and one for as many tokens as may wait for it: the
    first keeps decodes quick, the second first tokens.
    """
    by_slots = -(-4 * load.open // (3 * load.slots))
    by_tokens = -(-load.tokens_waiting // rule.tokens_per_replica)
    wanted = max(by_slots, by_tokens, 1 if load.without_replica else 0)
    return min(rule.max_replicas, max(rule.min_replicas, wanted))
