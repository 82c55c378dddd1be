"""The flags of `genbatch bench`, and which workload reads which."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from genbatch.clients.bench.case import CaseOptions
from genbatch.clients.bench.load import DEFAULT_SEED
from genbatch.clients.bench.workloads import (
    CHAT_REQUESTS,
    FIXED_BATCHES,
    FIXED_CONTEXTS,
    POISSON_LOADS,
    LoadOptions,
    Workload,
)
from genbatch.clients.cli.command import UsageError

_LOAD = "Load"
_TRAFFIC = "Traffic"
_MEASURES = "Measures"

_CHATS = (Workload.W2, Workload.W3, Workload.W4)
# A flag that is not here is read by every workload.
_READ_BY = {
    "num_prompts": _CHATS,
    "no_sharing": (Workload.W3,),
    "batch": (Workload.W5,),
    "context": (Workload.W5,),
    "floor": (Workload.W5,),
    "load": (Workload.W4,),
    "capacity": (Workload.W4,),
    "request_rate": (Workload.W2, Workload.W3),
    "burstiness": _CHATS,
}


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """What is asked of the service."""

    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help=f"Requests of w2, w3 and w4; {CHAT_REQUESTS} if not given.", rich_help_panel=_LOAD),
    ] = None
    scale: Annotated[
        float, typer.Option(help="Multiplies every length; less than 1 fits a small model.", rich_help_panel=_LOAD)
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Decides lengths, tokens and arrivals.", rich_help_panel=_LOAD)] = (
        DEFAULT_SEED
    )
    salt: Annotated[
        int,
        typer.Option(
            help="Another one changes the tokens and nothing else: an earlier run's are in the prefix cache.",
            rich_help_panel=_LOAD,
        ),
    ] = 0
    no_sharing: Annotated[
        bool,
        typer.Option("--no-sharing", help="w3: every request has a system prompt of its own.", rich_help_panel=_LOAD),
    ] = False
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: requests at once; may be given again; else {_listed(FIXED_BATCHES)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: tokens of a prompt; may be given again; else {_listed(FIXED_CONTEXTS)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip

    def options(self, vocab_size: int) -> LoadOptions:
        """What the workloads are made from.

        Raises:
            UsageError: the scale is none.
        """
        if not 0 < self.scale < math.inf:
            raise UsageError(f"scale: must be above 0, not {self.scale:g}")
        return LoadOptions(
            vocab_size=vocab_size,
            seed=self.seed,
            salt=self.salt,
            num_prompts=self.num_prompts or CHAT_REQUESTS,
            scale=self.scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFlags:
    """When it is asked."""

    request_rate: Annotated[
        float | None,
        typer.Option(help="w2, w3: requests a second; all at once if not given.", rich_help_panel=_TRAFFIC),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the gaps between requests: 1 is Poisson, less is burstier.", rich_help_panel=_TRAFFIC
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way at once.", rich_help_panel=_TRAFFIC)
    ] = None
    load: Annotated[
        list[float] | None,
        typer.Option(
            help=f"w4: share of the capacity; may be given again; else {_listed(POISSON_LOADS)}.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None
    capacity: Annotated[
        float | None,
        typer.Option(
            help="w4: requests a second that the service answers; else w2 is run first to see.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None

    def check(self) -> None:
        """Raises:
        UsageError: a rate is none, or a flag does nothing without another one.
        """
        for name in ("request_rate", "burstiness", "capacity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}: must be above 0, not {value:g}")
        if any(not 0 < share < math.inf for share in self.load or ()):
            raise UsageError("load: a share of the capacity is above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureFlags:
    """What is measured beside the latencies."""

    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="Count requests that keep to it, such as ttft:500, tpot:50 or e2el:9000; may be given again.",
            rich_help_panel=_MEASURES,
        ),
    ] = None
    floor: Annotated[
        bool,
        typer.Option(
            "--floor", help="w5, private service: time the kernels alone first, as 100 %.", rich_help_panel=_MEASURES
        ),
    ] = False
    return_context_logits: Annotated[
        bool,
        typer.Option(
            "--return-context-logits",
            help="Through the batch manager in this process: responses bring the prompt's logits.",
            rich_help_panel=_MEASURES,
        ),
    ] = False
    return_generation_logits: Annotated[
        bool,
        typer.Option(
            "--return-generation-logits",
            help="Through the batch manager in this process: responses bring the logits of generated tokens.",
            rich_help_panel=_MEASURES,
        ),
    ] = False

    @property
    def logits(self) -> dict[str, bool]:
        """The batch manager's options for the logits asked for; empty if there are none."""
        wanted = {
            "gather_context_logits": self.return_context_logits,
            "gather_generation_logits": self.return_generation_logits,
        }
        return {name: True for name, value in wanted.items() if value}


def case_options(workload: Workload, load: LoadFlags, traffic: TrafficFlags, measures: MeasureFlags) -> CaseOptions:
    """What sets the workload's cases apart.

    Raises:
        UsageError: a flag that this workload does not read, or a value out of its range.
    """
    for name, value in (asdict(load) | asdict(traffic) | asdict(measures)).items():
        readers = _READ_BY.get(name, tuple(Workload))
        if value not in (None, False) and workload not in readers:
            raise UsageError(f"{name}: {workload} does not read it, only {' and '.join(readers)}")
    traffic.check()
    if traffic.burstiness is not None and traffic.request_rate is None and workload is not Workload.W4:
        raise UsageError("burstiness: without a request_rate all requests are sent at once")
    return CaseOptions(
        request_rate=traffic.request_rate or math.inf,
        sharing=not load.no_sharing,
        batches=load.batch or FIXED_BATCHES,
        contexts=load.context or FIXED_CONTEXTS,
        loads=traffic.load or POISSON_LOADS,
    )
