"""Which function measures which part."""

import sys
import time
from collections.abc import Callable
from functools import partial

from tests.benchmarks.compare.batch_parts import LONG, SHORT, Disagreement, agreement, decode, prefill, prefix, variants
from tests.benchmarks.compare.engines import Engines
from tests.benchmarks.compare.load_parts import chats, long_prompt, poisson, transformers
from tests.benchmarks.compare.measured import Results
from tests.benchmarks.compare.plan import Plan
from tests.benchmarks.compare.session import Session

MEASURES: dict[str, Callable[[Session], None]] = {
    "agreement": agreement,
    "variants": variants,
    "w5": partial(decode, context=SHORT, part="w5"),
    "w5_long": partial(decode, context=LONG, part="w5_long"),
    "prefill": prefill,
    "prefix": prefix,
    "w2": partial(chats, part="w2"),
    "w3": partial(chats, part="w3"),
    "w4": poisson,
    "w6": long_prompt,
    "transformers": transformers,
}


def run_parts(plan: Plan, engines: Engines, results: Results) -> None:
    """Runs the plan's parts in their order, and says how long each took.

    A part that fails is noted, and the others run.

    Raises:
        Disagreement: see `agreement`; nothing is timed then.
        ExceptionGroup: what made parts fail.
    """
    session = Session(plan, engines, results)
    errors = []
    for part in plan.parts:
        started_at = time.monotonic()
        print(part, file=sys.stderr, flush=True)
        try:
            MEASURES[part](session)
        except Disagreement:
            raise
        except Exception as error:
            print(f"  failed: {error}", file=sys.stderr, flush=True)
            results.notes.append(f"{part} failed: {error}")
            errors.append(error)
        print(f"  {time.monotonic() - started_at:.0f} s", file=sys.stderr, flush=True)
    if errors:
        raise ExceptionGroup("parts failed", errors)
