"""Case: one load at one rate; what each workload comes to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from genbatch.clients.bench.load import Load
from genbatch.clients.bench.workloads import (
    FIXED_BATCHES,
    FIXED_CONTEXTS,
    POISSON_LOADS,
    LoadOptions,
    Workload,
    chat,
    fixed_batch,
    long_prefill,
    shared_prompt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run and summed up together.

    Args:
        request_rate: requests a second; infinite sends all at once.
        batch, context: of W5, else None.
    """

    load: Load
    request_rate: float = math.inf
    batch: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """What one workload has beyond another.

    Args:
        request_rate: of W2 and W3.
        sharing: of W3.
        batches, contexts: of W5, each with each.
        loads: of W4, shares of the capacity.
    """

    request_rate: float = math.inf
    sharing: bool = True
    batches: Sequence[int] = FIXED_BATCHES
    contexts: Sequence[int] = FIXED_CONTEXTS
    loads: Sequence[float] = POISSON_LOADS


def cases_of(workload: Workload, load: LoadOptions, options: CaseOptions, capacity: float = math.inf) -> list[Case]:
    """The cases of a workload, in the order they are run.

    Args:
        capacity: requests a second of which W4's loads are shares.
    """
    match workload:
        case Workload.W2:
            return [Case(load=chat(load), request_rate=options.request_rate)]
        case Workload.W3:
            return [Case(load=shared_prompt(load, sharing=options.sharing), request_rate=options.request_rate)]
        case Workload.W4:
            return [
                Case(load=chat(load, f"W4 chat at {share:g} of capacity"), request_rate=share * capacity)
                for share in options.loads
            ]
        case Workload.W5:
            return [
                Case(load=fixed_batch(load, batch, context), batch=batch, context=context)
                for context in options.contexts
                for batch in options.batches
            ]
        case Workload.W6:
            return [Case(load=long_prefill(load))]
