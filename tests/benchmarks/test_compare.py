"""The comparison's arithmetic, table and drawing, the peer's slots over a scripted decoder, and its engines' processes.

What needs llama.cpp is run by the benchmark itself.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.compare.engine_process import EngineFailed, EngineProcess
from tests.benchmarks.compare.llama_slots import LlamaSlots, SlotRequest
from tests.benchmarks.compare.markdown import report
from tests.benchmarks.compare.measured import Agreement, Comparison, Results, Spread, StepFloor, agreed
from tests.benchmarks.compare.plan import FULL, PARTS, QUICK
from tests.benchmarks.compare.plot import plot
from tests.benchmarks.compare.process_group import ROOT

LATENCY = {"p50": 1.0, "p99": 2.0, "mean": 1.2}


def some_results() -> Results:
    results = Results(notes=["one note"])
    one = Comparison("W5 B=8", "genbatch int8", "llama.cpp Q4_0 & <more>", goal=2.0)
    one.add(300.0, 100.0)
    one.add(200.0, 100.0)
    one.add(90.0, 60.0)
    results.comparisons.append(one)
    results.floors.append(StepFloor("int8", 8, step_s=[0.010], floor_s=[0.008]))
    results.agreements.append(Agreement("genbatch int8", "transformers float32", 0.875, 64))
    results.latencies.append(("W2 chat", "genbatch int8", {"output_throughput": 42.0, "ttft_ms": LATENCY}))
    results.variants["llama.cpp Q4_0 FA"] = {"B=8": 123.4}
    return results


# Figures


def test_the_ratio_is_taken_round_by_round() -> None:
    [one] = some_results().comparisons
    assert one.ratio == Spread(2.0, 1.5, 3.0)  # of the medians it would be 200 / 100, of the sums 590 / 260
    assert Spread.of(one.ours_tok_s) == Spread(200.0, 90.0, 300.0)


def test_the_share_of_the_floor_is_that_of_its_speed() -> None:
    assert some_results().floors[0].percent.median == pytest.approx(80)


def test_agreement_ends_at_the_first_token_that_differs() -> None:
    assert agreed([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert agreed([[1, 2], [3, 4]], [[1, 2], [4, 4]]) == 0.5
    assert agreed([[1, 2]], [[1, 2]]) == 1.0


def test_every_part_of_the_full_run_has_its_share_of_the_time() -> None:
    assert FULL.parts == PARTS
    assert sum(FULL.part_s(part) for part in PARTS) <= FULL.minutes * 60
    assert FULL.rounds >= 5
    assert QUICK.rounds == 1


# What is written


def test_the_report_has_every_figure_and_where_it_is_from() -> None:
    text = report(some_results(), date="2026-01-01", machine="2 cores", command="compare --quick", system="AVX = 1 | ")
    assert "2026-01-01, 2 cores: `compare --quick`" in text
    row = "W5 B=8 | genbatch int8 | 200 (90 to 300) | llama.cpp Q4_0 & <more> | 100 (60 to 100) | 2.00 (1.50 to 3.00)"
    assert row in text
    assert "| int8, B=8 | 10.00 | 8.00 | 80 |" in text
    assert "| genbatch int8 | transformers float32 | 87.5% | 64 |" in text
    assert "| W2 chat | genbatch int8 | 42 | 1 / 2 |" in text
    assert "| llama.cpp Q4_0 FA | 123 |" in text
    assert "- one note" in text


def test_every_row_of_a_table_has_the_columns_of_its_header() -> None:
    text = report(some_results(), date="d", machine="m", command="c", system="s")
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1, block


def test_parts_that_were_not_run_are_not_there() -> None:
    text = report(Results(), date="d", machine="m", command="c", system="s")
    assert "##" not in text


def test_the_drawing_is_svg_with_bars_as_long_as_their_figures() -> None:
    root = ElementTree.fromstring(plot(some_results().comparisons, "a title & more"))
    assert root.tag.endswith("svg")
    widths = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] / widths[1] == pytest.approx(200 / 100, rel=0.01)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "2.00x" in texts
    assert "llama.cpp Q4_0 & <more>" in texts


# The peer's slots


class ScriptedDecoder:
    """Remembers what each sequence was fed; a sequence's next token is the number of tokens it holds."""

    n_batch = 8

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.sizes: list[int] = []

    def step(self, entries: Sequence[tuple[int, Sequence[int], int, bool]]) -> list[int]:
        self.sizes.append(sum(len(tokens) for _, tokens, _, _ in entries))
        drawn = []
        for seq_id, tokens, position, wanted in entries:
            held = self.held.setdefault(seq_id, [])
            assert len(held) == position, "positions have no gaps"
            held += tokens
            if wanted:
                drawn.append(len(held))
        return drawn

    def seq_rm(self, seq_id: int) -> None:
        self.held.pop(seq_id, None)

    def seq_cp(self, source: int, target: int) -> None:
        assert target not in self.held
        self.held[target] = list(self.held[source])


def served(decoder: ScriptedDecoder, slots: LlamaSlots, asked: Sequence[tuple[list[int], int]]) -> list[SlotRequest]:
    """Every request's end, in the order of the asking."""
    ended: list[SlotRequest] = []
    requests = [SlotRequest(prompt, count, lambda index, token: None, ended.append) for prompt, count in asked]
    for request in requests:
        slots.add(request)
    while not slots.is_idle:
        slots.step()
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    return requests


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 4))
def test_every_request_of_the_peer_gets_all_its_tokens(asked: list[tuple[int, int]], n_slots: int) -> None:
    decoder: Any = ScriptedDecoder()
    prompts = [([9] * length, count) for length, count in asked]
    for request, (length, count) in zip(served(decoder, LlamaSlots(decoder, n_slots), prompts), asked, strict=True):
        assert request.answer == [length + index for index in range(count)]
    assert max(decoder.sizes) <= decoder.n_batch
    assert decoder.held == {}


def test_the_peer_starts_from_a_copy_of_the_kept_prefix() -> None:
    decoder: Any = ScriptedDecoder()
    slots = LlamaSlots(decoder, 2)
    slots.keep_prefix([1] * 10)
    decoder.sizes.clear()
    with_it, without = served(decoder, slots, [([1] * 10 + [2], 2), ([3, 4], 2)])
    assert (with_it.cached_tokens, with_it.answer) == (10, [11, 12])
    assert (without.cached_tokens, without.answer) == (0, [2, 3])
    assert sum(decoder.sizes) == 1 + 2 + 2  # the prompts' new tokens, then a decode of each


def test_a_cancelled_request_of_the_peer_frees_its_slot() -> None:
    decoder: Any = ScriptedDecoder()
    slots = LlamaSlots(decoder, 1)
    ended: list[SlotRequest] = []
    first, second = (SlotRequest([9], 5, lambda index, token: None, ended.append) for _ in range(2))
    slots.add(first)
    slots.add(second)
    slots.step()
    slots.cancel(first)
    while not slots.is_idle:
        slots.step()
    assert ended == [second]


# Engines' processes

ENGINE = """
import os, sys
from tests.benchmarks.compare.command_lines import CommandLines
lines = CommandLines()
os.write(1, b"noise of a library")
lines.reply({"name": "an engine"})
lines.serve({"add": lambda a, b: {"sum": a + b}, "die": lambda: sys.exit("gone")})
"""


def test_an_engine_answers_commands_and_its_noise_is_no_answer() -> None:
    engine = EngineProcess("an engine", [sys.executable, "-c", ENGINE])
    try:
        assert engine.described == {"name": "an engine"}
        with engine.running():
            assert engine.call("add", a=2, b=3) == {"sum": 5}
    finally:
        engine.close()


def test_an_engine_that_is_not_asked_does_nothing() -> None:
    engine = EngineProcess("an engine", [sys.executable, "-c", ENGINE])
    try:
        states = Path(f"/proc/{engine.process.pid}/stat")
        # Stopping is a signal's effect, which the kernel brings about in a moment.
        deadline = time.monotonic() + 120
        while states.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
        with engine.running():
            assert engine.call("add", a=1, b=1) == {"sum": 2}
    finally:
        engine.close()


def test_an_engine_that_dies_is_told_with_its_last_words() -> None:
    engine = EngineProcess("an engine", [sys.executable, "-c", ENGINE])
    try:
        with engine.running(), pytest.raises(EngineFailed, match="gone"):
            engine.call("die")
    finally:
        engine.close()


# Its end

MEASURES = """
import trio
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio

async def measure():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        print("measures", flush=True)
        try:
            await trio.sleep_forever()
        finally:
            print("at", type(trio.current_time()))

exit_on_sigterm()
try:
    run_trio(measure)
finally:
    print("wrote")
"""


def test_sigterm_ends_what_trio_runs_and_then_the_results_are_written() -> None:
    command = [sys.executable, "-c", MEASURES]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measures\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    assert (output, errors, process.returncode) == ("at <class 'float'>\nwrote\n", "", 128 + signal.SIGTERM)
