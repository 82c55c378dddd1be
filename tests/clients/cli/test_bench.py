"""`genbatch bench` over a real tiny model: every workload, here and over ZeroMQ, and flags that are refused."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from genbatch import open_batcher
from genbatch.clients.cli.main import app

VOCAB = 320


@pytest.fixture
def private(tiny_model_dir: Callable[[str], Path]) -> list[str]:
    return ["--model", str(tiny_model_dir("llama")), "--dtype", "float32", "--n-gpu-layers", "0"]


@pytest.fixture
def address(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    """A service in a thread of its own, at the address."""
    ready, scope = threading.Event(), trio.CancelScope()
    where, token = f"ipc://{tmp_path / 'socket'}", []

    async def serve() -> None:
        model = str(tiny_model_dir("llama"))
        with scope:
            async with open_batcher(model, dtype="float32", n_gpu_layers=0, batch_timeout=0.0, bind=where):
                token.append(trio.lowlevel.current_trio_token())
                ready.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert ready.wait(300)
        yield where
    finally:
        if token:
            token[0].run_sync_soon(scope.cancel)
        thread.join(300)


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["bench", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    for run in report["runs"]:
        assert run["failed"] == {}, run
        assert run["workload"] in " ".join(result.output.split()) or len(report["runs"]) > 1
    return report


def test_w2_of_a_running_service_is_measured_where_its_client_is(address: str, tmp_path: Path) -> None:
    small = ["--num-prompts", "6", "--scale", "0.04", "--max-concurrency", "3"]
    report = bench(
        tmp_path, "-w", "w2", "--connect", address, *small, "--goodput", "ttft:60000", "--goodput", "tpot:1e-6"
    )
    [run] = report["runs"]
    assert (run["completed"], run["num_prompts"]) == (6, 6)
    assert run["total_output_tokens"] == 10 + 2 + 3 + 6 + 7 + 2
    assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"] <= run["e2el_ms"]["p99"]
    assert run["output_throughput"] == pytest.approx(run["total_output_tokens"] / run["duration_s"])
    assert run["request_goodput"] == 0.0
    assert report["model"]["vocab_size"] == VOCAB
    assert report["address"] == address


def test_w2_of_a_private_service_may_be_paced(private: list[str], tmp_path: Path) -> None:
    report = bench(tmp_path, "-w", "w2", *private, "--num-prompts", "4", "--scale", "0.02", "--request-rate", "50")
    [run] = report["runs"]
    assert run["request_rate"] == 50
    assert run["duration_s"] >= 3 / 50 * 0.5
    assert report["address"] is None


def test_w3_shares_its_system_prompt_unless_told_otherwise(private: list[str], tmp_path: Path) -> None:
    small = ["-w", "w3", *private, "--num-prompts", "4", "--scale", "0.1", "--max-concurrency", "1"]
    [on], [off] = (bench(tmp_path, *small, *extra)["runs"] for extra in ([], ["--no-sharing"]))
    assert on["total_input_tokens"] == off["total_input_tokens"]
    assert on["cached_tokens"] >= 3 * 32
    assert off["cached_tokens"] == 0


def test_w4_takes_its_rates_from_the_capacity(private: list[str], tmp_path: Path) -> None:
    small = ["-w", "w4", *private, "--num-prompts", "4", "--scale", "0.02", "--load", "0.5", "--load", "0.9"]
    given = bench(tmp_path, *small, "--capacity", "100")
    assert [run["request_rate"] for run in given["runs"]] == [50, 90]
    measured = bench(tmp_path, *small)
    first, second = (run["request_rate"] for run in measured["runs"])
    assert second / first == pytest.approx(0.9 / 0.5)


def test_w5_tells_decode_and_prefill_apart_and_how_far_the_floor_is(private: list[str], tmp_path: Path) -> None:
    report = bench(tmp_path, "-w", "w5", *private, "--batch", "1", "--batch", "3", "--context", "16", "--floor")
    assert [run["workload"] for run in report["runs"]] == ["W5 B=1 context 16", "W5 B=3 context 16"]
    for run in report["runs"]:
        assert run["prefill_tok_s"] > 0
        assert run["percent_of_floor"] == pytest.approx(100 * run["decode_tok_s"] / run["floor_tok_s"])


def test_w6_tells_what_a_long_prompt_does_to_the_others(private: list[str], tmp_path: Path) -> None:
    [run] = bench(tmp_path, "-w", "w6", *private, "--scale", "0.03")["runs"]
    assert run["completed"] == 9
    assert run["itl_before_ms"]["p99"] > 0
    assert run["itl_during_ms"]["p99"] > 0


@pytest.mark.parametrize(
    ("flags", "context", "generation"),
    [
        (["--return-context-logits"], True, False),
        (["--return-generation-logits"], False, True),
        (["--return-context-logits", "--return-generation-logits"], True, True),
    ],
)
def test_b31_each_bench_flag_toggles_its_logits(
    private: list[str], tmp_path: Path, flags: list[str], context: bool, generation: bool
) -> None:
    [run] = bench(tmp_path, "-w", "w2", *private, "--num-prompts", "3", "--scale", "0.02", *flags)["runs"]
    rows = run["total_input_tokens"] * context + run["total_output_tokens"] * generation
    assert run["context_logits_rows"] == run["total_input_tokens"] * context
    assert run["generation_logits_rows"] == run["total_output_tokens"] * generation
    assert run["logits_bytes"] == rows * VOCAB * 4


def test_b31_without_the_flags_nothing_is_said_of_logits(private: list[str], tmp_path: Path) -> None:
    [run] = bench(tmp_path, "-w", "w2", *private, "--num-prompts", "2", "--scale", "0.02")["runs"]
    assert "context_logits_rows" not in run


def test_requests_that_fail_are_counted_and_not_averaged(address: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    # The tiny model has 256 positions: the long prompt does not fit, the others do.
    arguments = ["bench", "-w", "w6", "--connect", address, "--scale", "0.1", "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    [run] = json.loads(out.read_text())["runs"]
    assert run["failed"] == {"prompt_too_long": 1}
    assert run["completed"] == 8
    assert run["itl_during_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-w", "w2", "--batch", "8"], "batch: w2 has no such flag"),
        (["-w", "w5", "--num-prompts", "8"], "num_prompts: w5"),
        (["-w", "w4", "--request-rate", "8"], "request_rate: w4"),
        (["-w", "w2", "--no-sharing"], "no_sharing: w2"),
        (["-w", "w2", "--floor"], "floor: w2"),
        (["-w", "w2", "--request-rate", "0"], "request_rate: must be above 0"),
        (["-w", "w2", "--burstiness", "2"], "burstiness: needs --request-rate"),
        (["-w", "w4", "--load", "-1"], "load:"),
        (["-w", "w2", "--scale", "0"], "scale:"),
        (["-w", "w2", "--goodput", "speed:1"], "goodput: 'speed:1'"),
        (
            ["-w", "w2", "--return-context-logits", "--connect", "ipc:///x"],
            "return_context_logits: only for a model in",
        ),
        (["-w", "w2", "--return-generation-logits", "--quantize", "int8"], "quantize: the batch manager"),
        (["-w", "w5", "--floor", "--connect", "ipc:///x"], "floor: only for a model in this process"),
        (["-w", "w2", "--n-parallel", "3", "--connect", "ipc:///x"], "n_parallel: only"),
        (["-w", "w2", "--out", "/no/such/folder/x.json"], "out: there is no folder"),
        (["-w", "w9"], "w9"),
        ([], "--workload"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
