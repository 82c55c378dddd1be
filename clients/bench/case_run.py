"""run_case: sends a case's load and sums up what came of it."""

import math
from collections.abc import Callable
from typing import Any

from genbatch.clients.bench.arrivals import arrival_times
from genbatch.clients.bench.case import Case
from genbatch.clients.bench.goodput import Goodput
from genbatch.clients.bench.load_run import Streams, run_load
from genbatch.clients.bench.summary import decode_rate, disturbance, prefill_rate, summary


async def run_case(
    client: Streams,
    case: Case,
    *,
    seed: int,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    goodput: Goodput | None = None,
    floor_s: float | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The case's figures, see `summary`; with a fixed batch its rates, with a long prefill what it did to the others.

    Args:
        floor_s: seconds of the fixed batch's step by the kernels alone, where that is known.
    """
    arrivals = arrival_times(len(case.load.requests), case.request_rate, burstiness=burstiness, seed=seed)
    run = await run_load(client, case.load, arrivals=arrivals, max_concurrency=max_concurrency, on_end=on_end)
    figures = summary(run, goodput)
    figures["request_rate"] = None if math.isinf(case.request_rate) else case.request_rate
    if case.batch is not None:
        rate = decode_rate(run.times)
        figures |= {"prefill_tok_s": prefill_rate(run.times), "decode_tok_s": rate}
        if floor_s is not None:
            figures["floor_tok_s"] = case.batch / floor_s
            figures["percent_of_floor"] = None if rate is None else 100 * rate * floor_s / case.batch
    if any(one.after_tokens for one in case.load.requests):
        figures |= disturbance(run.times)
    return figures
