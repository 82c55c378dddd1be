"""The flags of `genbatch serve` that say how many replicas serve, and how requests are divided among them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from genbatch.clients.cli.command import UsageError

if TYPE_CHECKING:
    from genbatch.actors.fleet.scaling import ScaleRule

_REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    """A fleet of replicas on Ray; without any of these there is one engine, and no Ray."""

    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Serve with so many replicas on Ray; needs genbatch\\[ray].", rich_help_panel=_REPLICAS
        ),
    ] = None
    min_replicas: Annotated[
        int | None,
        typer.Option(min=0, help="Fewest replicas; 0: the first request waits for one.", rich_help_panel=_REPLICAS),
    ] = None
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Most replicas; more are started as requests wait.", rich_help_panel=_REPLICAS),
    ] = None
    replica_cpus: Annotated[
        float, typer.Option(min=0.0, help="CPUs that Ray sets aside for a replica.", rich_help_panel=_REPLICAS)
    ] = 1.0
    replica_gpus: Annotated[
        float, typer.Option(min=0.0, help="GPUs that Ray sets aside for a replica.", rich_help_panel=_REPLICAS)
    ] = 0.0
    router: Annotated[
        str | None,
        typer.Option(
            help='prefix, least_tokens, round_robin or "module:Class"; prefix if not given.', rich_help_panel=_REPLICAS
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster to join; else that of this machine, or one is started; local always starts one.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Gateways that say the same name share its replicas; the model's name if not given.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a fleet.

        Raises:
            UsageError: a flag of fleets, and none that says how large it is to be.
        """
        wanted = (self.replicas, self.min_replicas, self.max_replicas) != (None, None, None)
        for name in ("router", "ray_address", "fleet"):
            if not wanted and getattr(self, name) is not None:
                raise UsageError(f"{name}: there are no replicas; say --replicas or --max-replicas")
        return wanted

    def rule(self) -> "ScaleRule":
        """How many replicas there should be.

        Raises:
            UsageError: a number and bounds.
            RouterError: bounds that hold no number.
        """
        from genbatch.actors.fleet.scaling import ScaleRule

        if self.replicas is not None:
            if self.min_replicas is not None or self.max_replicas is not None:
                raise UsageError("replicas: either a number or --min-replicas and --max-replicas")
            return ScaleRule(min_replicas=self.replicas, max_replicas=self.replicas)
        low = 1 if self.min_replicas is None else self.min_replicas
        return ScaleRule(min_replicas=low, max_replicas=max(low, 1) if self.max_replicas is None else self.max_replicas)
