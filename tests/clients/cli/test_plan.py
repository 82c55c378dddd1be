"""`genbatch plan`: finds the smallest fleet, draws it, and names what is wrong with its flags."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genbatch.clients.cli.main import app
from tests.clients.plan.measured import report


@pytest.fixture
def bench(tmp_path: Path) -> str:
    path = tmp_path / "w5.json"
    path.write_text(json.dumps(report()))
    return str(path)


def test_a_plan_finds_the_smallest_fleet_for_each_router(bench: str, tmp_path: Path) -> None:
    arguments = ["plan", "--trace", "agents", "--rate", "2", "--duration", "40", "--scale", "0.15", "--bench", bench]
    arguments += ["--share", "0.75", "--write-trace", str(tmp_path / "agents.jsonl")]
    routers = ["--router", "round_robin", "--router", "prefix"]
    made = CliRunner().invoke(
        app, [*arguments, *routers, "--cost", "1.5", "--plot", str(tmp_path / "plan.png")], env={"COLUMNS": "150"}
    )
    assert made.exit_code == 0, made.output
    needs = [int(line.split()[0]) for line in made.output.splitlines() if " replicas: 75 %" in line]
    assert len(needs) == 2 and needs[1] < needs[0]
    assert "cost/Mtok" in made.output
    for router in ("round_robin", "prefix"):
        assert (tmp_path / f"plan-{router}.png").read_bytes().startswith(b"\x89PNG")

    again = ["plan", "--trace", str(tmp_path / "agents.jsonl"), "--block-tokens", "64", "--bench", bench]
    read = CliRunner().invoke(app, [*again, "--replicas", str(needs[1]), "--share", "0.75"], env={"COLUMNS": "150"})
    assert read.exit_code == 0 and f"{needs[1]} replicas: 75 %" in read.output


def test_a_target_out_of_reach_is_said(bench: str) -> None:
    arguments = ["--trace", "chat", "--rate", "9", "--duration", "20", "--bench", bench, "--replicas", "1:2"]
    said = CliRunner().invoke(app, ["plan", *arguments, "--target", "ttft:1"])
    assert said.exit_code == 0 and "no fleet within these bounds: 95 % of the requests within ttft:1" in said.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "replicas: '0'"),
        (["--replicas", "4:2"], "replicas: '4:2'"),
        (["--router", "fastest"], "router 'fastest'"),
        (["--scheduler", "lifo"], "scheduler: 'lifo'"),
        (["--target", "e2el:9"], "target: must be ttft or tpot"),
        (["--target", "ttft"], "goodput: 'ttft'"),
        (["--rate", "-1"], "rate: must be above 0"),
        (["--n-ctx", "100"], "n_ctx: 100 positions"),
        (["--plot", "plan.unknown"], "plot: plan.unknown"),
        (["--trace", "missing.jsonl"], "No such file"),
        (["--trace", "missing.jsonl", "--seed", "3"], "seed: only for a generated trace"),
        (["--bench", "missing.json"], "missing.json: No such file"),
    ],
)
def test_flags_that_make_no_plan_are_refused(bench: str, arguments: list[str], said: str) -> None:
    fine = ["--trace", "batch", "--duration", "9", "--rate", "1", "--bench", bench, "--replicas", "1"]
    if "missing.jsonl" in arguments:
        fine = ["--bench", bench]
    refused = CliRunner().invoke(app, ["plan", *fine, *arguments])
    assert refused.exit_code == 2 and said in " ".join(refused.output.split()), refused.output
