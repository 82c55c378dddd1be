"""The benchmark of one model file: whose turn it is, its tables, and the peers that are left out.

The engines are stand-ins: the real ones are run by the benchmark itself.
"""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks import model_files, pipelines
from tests.benchmarks.compare import peers
from tests.benchmarks.compare.engine_process import EngineFailed
from tests.benchmarks.model_files import Figure, Peer, measure, read_raw, tables

# Answers as an engine does, and writes down what it was asked.
ENGINE = """#!{python}
import json, os, sys
engine, log = sys.argv[sys.argv.index("--worker") + 1], open({log!r}, "a")
print("{{}}", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(engine, asked.get("what", asked["do"]), os.environ.get("LD_PRELOAD", ""), file=log, flush=True)
    if asked["do"] == "start":
        answer = {{"first token, s": 0.5, "memory after it, MB": 100.0}}
    elif engine == "dies":
        sys.exit("out of memory")
    else:
        answer = {{asked["what"]: 10.0, "memory, MB": 120.0}}
    print(json.dumps(answer), flush=True)
"""


def stand_in(directory: Path) -> tuple[str, Path]:
    """A Python that is an engine whatever it is told to run, and its log."""
    log, script = directory / "log", directory / "python"
    script.write_text(ENGINE.format(python=sys.executable, log=str(log)))
    script.chmod(0o755)
    return str(script), log


def model(directory: Path) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(bytes(2_000_000))
    return path


def asked(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text().splitlines()]


def test_engines_take_turns(tmp_path: Path) -> None:
    python, log = stand_in(tmp_path)
    path = model(tmp_path)
    figures = measure(path, [Peer("A", python, "a", path), Peer("B", python, "b", path)], (1, 8), 2)
    turns = ["a decode 1", "b decode 1", "a decode 8", "b decode 8", "a prefill", "b prefill"]
    assert asked(log) == ["a start", "b start", *turns, *turns]
    assert {figure.file_mb for figure in figures} == {2.0}
    assert [figure.round for figure in figures if figure.what == "decode 8"] == [1, 1, 2, 2]


def test_engines_that_run_alone_are_ended_before_the_next_starts(tmp_path: Path) -> None:
    python, log = stand_in(tmp_path)
    path = model(tmp_path)
    measure(path, [Peer("A", python, "a", path), Peer("B", python, "b", path)], (4,), 2, alone=True)
    once = [f"{engine} {what}" for engine in "ab" for what in ("start", "decode 4", "prefill")]
    assert asked(log) == once * 2


def test_every_figure_is_kept_before_an_engine_dies(tmp_path: Path) -> None:
    python, _ = stand_in(tmp_path)
    path, raw = model(tmp_path), io.StringIO()
    engines = [Peer("A", python, "a", path), Peer("B", python, "dies", path)]
    with pytest.raises(EngineFailed, match="out of memory"):
        measure(path, engines, (1,), 1, raw=raw)
    text = tables(read_raw(raw.getvalue().splitlines(keepends=True)))
    assert "| first token, s | 0.5 | 0.5 |  |" in text
    assert "| decode 1, tok/s | 10.0 |  |  |" in text


def test_a_peer_has_its_libraries_first(tmp_path: Path) -> None:
    python, log = stand_in(tmp_path)
    path = model(tmp_path)
    peer = Peer("A", python, "a", path, preload=[tmp_path / "none.so"])
    process = peer.start((1,), None)
    try:
        with process.running():
            process.call("start")
    finally:
        process.close()
    assert asked(log) == [f"a start {tmp_path / 'none.so'}"]


# Tables


def figures_of(values: dict[str, Sequence[float]], what: str) -> list[Figure]:
    return [
        Figure("f.gguf", 98.4, number, engine, what, value)
        for engine, rounds in values.items()
        for number, value in enumerate(rounds, 1)
    ]


def test_the_ratio_is_to_the_best_peer_of_each_round() -> None:
    values = {"llama.cpp": [100.0, 50.0, 10.0], "vLLM": [20.0, 80.0, 20.0], "exact": [200.0, 240.0, 20.0]}
    text = tables(figures_of(values, "decode 8"))
    assert "| decode 8, tok/s | 50.0 | 20.0 | 200.0 | exact 2.00 (1.00 to 3.00) |" in text


def test_a_round_that_a_peer_lacks_has_a_ratio_to_those_that_have_it() -> None:
    values = {"llama.cpp": [100.0, 50.0], "vLLM": [200.0], "int8": [200.0, 200.0]}
    assert "int8 2.50 (1.00 to 4.00)" in tables(figures_of(values, "prefill"))


def test_peak_memory_is_the_last_that_was_told() -> None:
    grows = [Figure("f.gguf", 98.4, 1, "exact", "memory, MB", value) for value in (100.0, 130.0)]
    assert "| memory, MB | 130.0 |" in tables(grows)


def test_each_file_has_a_table_and_each_row_the_columns_of_its_header() -> None:
    first = figures_of({"llama.cpp": [1.0], "exact": [2.0]}, "decode 1")
    second = [Figure("g.gguf", 5000.0, 1, "llama.cpp", "prefill", 3.0)]
    text = tables([*first, *second])
    assert text.index("f.gguf, 98 MB") < text.index("g.gguf, 5000 MB")
    for block in text.split("\n\n"):
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1, block


def test_a_raw_file_that_was_cut_off_is_read_up_to_its_last_whole_line() -> None:
    line = json.dumps({"file": "f", "file_mb": 1.0, "round": 1, "engine": "e", "what": "prefill", "value": 2.0}) + "\n"
    assert read_raw([line, line[:20]]) == [Figure("f", 1.0, 1, "e", "prefill", 2.0)]


# Pipelines


class Scripted(pipelines.Pipeline):
    """Takes one prompt a step, then gives every sequence that is in a token a step."""

    def __init__(self) -> None:
        super().__init__(None)
        self.waiting: list[int] = []
        self.left: dict[int, int] = {}
        self.dropped: list[int] = []
        self.made: list[int] = []

    def _add(self, request_id: int, length: int, max_tokens: int) -> None:
        self.waiting.append(request_id)
        self.left[request_id] = max_tokens

    def _step(self) -> dict[int, int]:
        if self.waiting:
            self.waiting.pop(0)
        came = {one: 1 for one, left in self.left.items() if left and one not in self.waiting}
        for one in came:
            self.left[one] -= 1
        self.made.append(len(came))
        return came

    def _drop(self, request_ids: Sequence[int]) -> None:
        self.dropped += request_ids


def test_a_pipeline_is_timed_once_every_sequence_decodes() -> None:
    pipeline = Scripted()
    pipeline._clock = lambda: float(len(pipeline.made))  # a second a step
    assert pipeline.decode(3) == 3.0
    assert pipeline.made == [1, 2, 3, 3, *[3] * model_files.LEAST_STEPS]
    assert pipeline.dropped == [1, 2, 3]


def test_a_pipeline_is_not_timed_after_its_sequences_are_full() -> None:
    pipeline = Scripted()
    pipeline._clock = lambda: 1e-9 * len(pipeline.made)  # it would have time for more
    assert pipeline.decode(32) == pytest.approx(32e9)
    assert min(pipeline.left.values()) >= 0
    assert set(pipeline.made[32:]) == {32}


def test_a_pipeline_is_asked_whole_prompts() -> None:
    pipeline = Scripted()
    pipeline._clock = lambda: float(len(pipeline.made))
    assert pipeline.prefill() == model_files.PREFILL
    assert pipeline.dropped == list(range(1, model_files.LEAST_STEPS + 2))


@pytest.mark.parametrize(("steps", "seconds"), [(3, 7.9), (400, 1.9)])
def test_a_measurement_goes_on(steps: int, seconds: float) -> None:
    assert not model_files.enough(steps, seconds)


@pytest.mark.parametrize(("steps", "seconds"), [(4, 2.0), (1, 8.0)])
def test_a_measurement_ends(steps: int, seconds: float) -> None:
    assert model_files.enough(steps, seconds)


# Peers that are not there


def test_a_peer_without_an_environment_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("GENBATCH_BENCH_VLLM", raising=False)
    monkeypatch.setenv("GENBATCH_BENCH_OPENVINO", str(tmp_path))
    monkeypatch.setattr(peers, "peer_python", lambda: Path(sys.executable))
    engines = peers.file_engines(model(tmp_path), ["exact", "int8"])
    assert [one.name for one in engines] == ["llama.cpp", "exact", "int8"]
    assert capsys.readouterr().err.splitlines() == [
        f"OpenVINO is left out: $GENBATCH_BENCH_OPENVINO, {tmp_path}, lacks bin/python",
        "vLLM is left out: $GENBATCH_BENCH_VLLM names no virtual environment",
    ]


def test_what_is_made_of_a_file_is_kept_and_half_of_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GENBATCH_BENCH_HOME", str(tmp_path / "home"))
    path = model(tmp_path)
    half = "import pathlib, sys; pathlib.Path(sys.argv[-1]).mkdir(); sys.exit('no room')"
    with pytest.raises(OSError, match="no room"):
        peers._made(path, "int8", [sys.executable, "-c", half])
    whole = "import pathlib, sys; pathlib.Path(sys.argv[-1]).mkdir()"
    directory = peers._made(path, "int8", [sys.executable, "-c", whole])
    assert directory.is_dir()
    assert peers._made(path, "int8", ["false"]) == directory
