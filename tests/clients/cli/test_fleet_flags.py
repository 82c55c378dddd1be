"""The flags of `genbatch serve` for replicas and ranks: what contradicts itself is refused before anything starts."""

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from genbatch.clients.cli.main import app
from genbatch.clients.fleet import gateway, ray_replicas
from genbatch.clients.fleet.gateway import FleetOptions
from genbatch.nif.errors import OptionError


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "smollm2", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--router", "prefix"), "router: there are no replicas"),
        (("--fleet", "mine"), "fleet: there are no replicas"),
        (("--replicas", "2", "--max-replicas", "3"), "replicas: set either --replicas, or"),
        (("--min-replicas", "3", "--max-replicas", "2"), "replicas: 3 to 2 is not a range"),
    ],
)
def test_flags_that_make_no_fleet_are_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


def test_without_ray_replicas_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "-m pip install 'ray>=" in refusal("--replicas", "2")


@pytest.mark.parametrize(
    ("arguments", "router", "fleet"),
    [((), "prefix", "smollm2"), (("--router", "round_robin", "--fleet", "ours"), "round_robin", "ours")],
)
def test_a_fleet_has_the_router_and_the_name_that_were_given(
    arguments: tuple[str, ...], router: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def open_fleet(replicas: str, options: FleetOptions, *_: object) -> None:
        opened.append((replicas, options))
        raise OptionError("fleet", "that is all")

    monkeypatch.setattr(ray_replicas, "RayReplicas", lambda name, *_: name)
    monkeypatch.setattr(gateway, "open_fleet", open_fleet)
    assert "that is all" in refusal("--replicas", "2", *arguments)
    ((name, options),) = opened
    assert (name, options.router) == (fleet, router)
    assert (options.rule.min_replicas, options.rule.max_replicas) == (2, 2)


def test_ranks_that_torchrun_did_not_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert "tensor_parallel: 2, and torchrun started 3 ranks" in refusal("--tensor-parallel", "2")
