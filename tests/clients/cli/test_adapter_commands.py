"""`genbatch adapters` and `genbatch serve --lora`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genbatch.clients.cli.main import app
from tests.actors.service.running_service import RunningService
from tests.lora_adapters import make_adapter


def test_adapters_of_a_service_are_listed_loaded_and_unloaded(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_model_dir("native_llama")
    for name in ("one", "two"):
        make_adapter(base, tmp_path / name, ["q_proj"])
    monkeypatch.chdir(tmp_path)
    with RunningService(base, tmp_path, "--engine", "thread", "--lora", "one=one") as service:
        assert "adapters" in service.log

        def run(*arguments: str) -> tuple[int, str]:
            result = CliRunner().invoke(app, ["adapters", *arguments, "--connect", service.address])
            return result.exit_code, result.output

        assert run("list") == (0, "one\n")
        assert run("load", "two", "two") == (0, "two is loaded\n")
        assert run("list") == (0, "one\ntwo\n")
        assert run("unload", "one") == (0, "one is unloaded\n")
        code, output = run("load", "three", "nowhere")
        assert code == 2 and "is not a directory" in output
        assert run("unload", "one")[0] == 2
        assert run("list") == (0, "two\n")


def test_a_service_must_be_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["adapters", "list", "--connect", f"ipc://{tmp_path}/nobody.sock"])
    assert result.exit_code == 2 and "no service is running" in result.output
