"""The results as Markdown: ratios first, then what clients saw, floors, agreement and what was tried."""

from collections.abc import Iterable, Sequence
from typing import Any

from tests.benchmarks.compare.measured import Results, Spread

_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "itl_before_ms", "itl_during_ms")


def report(results: Results, *, date: str, machine: str, command: str, system: str) -> str:
    """The whole report.

    Args:
        date, machine, command: of the run.
        system: what llama.cpp was built for.
    """
    sections = [
        f"# Side by side\n\n{date}, {machine}: `{command}`\n\n"
        "Engines run in turns, one at a time, in processes of their own; figures of one row are of the same rounds. "
        "A ratio is ours to theirs, round by round: median (least to most). Prompts, lengths and greedy draws are the "
        "same for all.\n",
        _comparisons(results),
        _latencies(results),
        _floors(results),
        _agreements(results),
        _variants(results, system),
    ]
    if results.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in results.notes) + "\n")
    return "\n".join(section for section in sections if section)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _comparisons(results: Results) -> str:
    rows = [
        (
            one.case,
            one.ours,
            _spread(Spread.of(one.ours_tok_s)),
            one.theirs,
            _spread(Spread.of(one.theirs_tok_s)),
            _spread(one.ratio, ".2f"),
            "" if one.goal is None else f"{one.goal:.2f}",
            str(len(one.ours_tok_s)),
        )
        for one in results.comparisons
    ]
    header = ("case", "ours", "tok/s", "theirs", "tok/s", "ratio", "goal", "rounds")
    return "## Tokens a second\n\n" + table(header, rows) if rows else ""


def _latencies(results: Results) -> str:
    rows = []
    for case, engine, figures in results.latencies:
        cells = [_pair(figures.get(name)) for name in _LATENCIES]
        rows.append((case, engine, f"{figures['output_throughput']:.0f}", *cells))
    header = (
        "case",
        "engine",
        "output tok/s",
        "TTFT",
        "TPOT",
        "ITL",
        "E2EL",
        "ITL before the prefill",
        "ITL during it",
    )
    head = "## What clients saw over ZeroMQ\n\nMilliseconds, p50 / p99; a row a run.\n\n"
    return head + table(header, rows) if rows else ""


def _floors(results: Results) -> str:
    rows = []
    for one in results.floors:
        step, floor = Spread.of([1e3 * s for s in one.step_s]), Spread.of([1e3 * s for s in one.floor_s])
        rows.append(
            (f"{one.mode}, B={one.batch}", _spread(step, ".2f"), _spread(floor, ".2f"), _spread(one.percent, ".0f"))
        )
    header = ("decode step", "through the Batcher, ms", "kernels alone, ms", "% of the floor's speed")
    return "## The floor\n\n" + table(header, rows) if rows else ""


def _agreements(results: Results) -> str:
    rows = [(one.engine, one.reference, f"{one.share:.1%}", str(one.tokens)) for one in results.agreements]
    head = "## Greedy tokens that agree\n\nUp to the first that differs, before anything was timed.\n\n"
    return head + table(("engine", "reference", "equal", "of tokens"), rows) if rows else ""


def _variants(results: Results, system: str) -> str:
    if not results.variants:
        return ""
    cases = list(next(iter(results.variants.values())))
    rows = [(name, *(f"{rates[case]:.0f}" for case in cases)) for name, rates in results.variants.items()]
    head = (
        f"## llama.cpp's variants\n\nTokens a second, one short run each, to find its best; FA: fused attention. "
        f"{system.strip(' |')}.\n\n"
    )
    return head + table(("variant", *cases), rows)


def _spread(spread: Spread, digits: str = ".0f") -> str:
    if spread.least == spread.most:
        return f"{spread.median:{digits}}"
    return f"{spread.median:{digits}} ({spread.least:{digits}} to {spread.most:{digits}})"


def _pair(value: Any) -> str:
    return "" if value is None else f"{value['p50']:.0f} / {value['p99']:.0f}"
