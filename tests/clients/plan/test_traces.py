"""Traces: read as Mooncake writes them, made from a seed, written and read again."""

import json
from pathlib import Path

import pytest

from genbatch.clients.bench.workloads import LoadOptions, shared_prompt
from genbatch.clients.plan.traces import MADE, TraceError, TraceOptions, read_trace, write_trace
from tests.benchmarks.fleet import load_trace

MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, '
    '"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 2353]}'
)


def test_mooncakes_lines_are_read_and_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + "\n\n" + json.dumps({"timestamp": 0, "input_length": 3, "output_length": 1}) + "\n")
    trace = read_trace(path)
    first, second = trace.requests
    assert (first.at, first.prompt, first.output, first.blocks) == (0.0, 3, 1, ())
    # The fourteenth block is not whole: nobody can share it.
    assert (second.at, second.prompt, second.output, second.blocks) == (27.482, 6955, 52, tuple(range(46, 59)))
    assert trace.duration_s == 27.482


def test_tenants_share_no_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps(line | {"tenant": tenant}) + "\n" for tenant in ("a", "b", "a")))
    one, other, again = (request.blocks for request in read_trace(path).requests)
    assert one == again and not set(one) & set(other)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no requests"),
        ("[]", "line 1"),
        ('{"timestamp": 0, "input_length": 3}', "missing required field `output_length`"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "temperature": 1}', "temperature"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "lengths start at 1"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "times at 0"),
        ("\xff", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=said):
        read_trace(path)


@pytest.mark.parametrize("name", MADE)
def test_a_made_trace_depends_on_its_seed_and_survives_a_file(name: str, tmp_path: Path) -> None:
    options = TraceOptions(rate=5.0, duration_s=40.0, scale=0.5, tenants=2)
    trace = MADE[name](options)
    assert trace.requests == MADE[name](options).requests
    assert trace.requests != MADE[name](TraceOptions(rate=5.0, duration_s=40.0, scale=0.5, tenants=2, seed=1)).requests
    assert 100 < len(trace.requests) < 350
    assert all(0 <= request.at < 40 and len(request.blocks) == request.prompt // 64 for request in trace.requests)
    named: dict[str, set[int]] = {}
    for request in trace.requests:
        named.setdefault(request.tenant, set()).update(request.blocks)
    assert len(named) == 2 and not set.intersection(*named.values())

    write_trace(trace, tmp_path / "trace.jsonl")
    read = read_trace(tmp_path / "trace.jsonl", 64)
    assert [(one.prompt, one.output, len(one.blocks), one.tenant) for one in read.requests] == [
        (one.prompt, one.output, len(one.blocks), one.tenant) for one in trace.requests
    ]


def test_a_next_turn_begins_with_all_before_it() -> None:
    trace = MADE["agents"](TraceOptions(rate=5.0, duration_s=60.0))
    ended = {request.blocks + request.answered for request in trace.requests}
    follow = [r for r in trace.requests if any(r.blocks[: len(before)] == before for before in ended if before)]
    assert len(follow) > len(trace.requests) / 2


def test_a_benchmarks_load_is_a_trace() -> None:
    load = shared_prompt(LoadOptions(vocab_size=1000, num_prompts=5))
    trace = load_trace(load, [0.0, 0.5, 1.0, 1.5, 2.0])
    assert [request.prompt for request in trace.requests] == [len(one.prompt) for one in load.requests]
    assert len({request.blocks[:8] for request in trace.requests}) == 1  # the 512 tokens in front
    assert len({request.blocks for request in trace.requests}) > 1


@pytest.mark.parametrize(("name", "value"), [("rate", 0.0), ("scale", float("nan")), ("duration_s", float("inf"))])
def test_options_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(TraceError, match=name):
        TraceOptions(**{name: value})  # type: ignore[arg-type]


def test_a_rate_that_brings_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="brings no request"):
        MADE["batch"](TraceOptions(rate=1e-9, duration_s=1.0))
