"""`genbatch serve --record` in real processes, and `genbatch replay` of what it left."""

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from genbatch import SyncZeroMQClient
from genbatch.actors.recording.records import RecordReader
from genbatch.clients.cli.main import app
from tests.actors.service.running_service import TIMEOUT_S, RunningService


def test_what_a_killed_service_recorded_replays_to_identical_ticks(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "incident.flight"
    with RunningService(tiny_model_dir("native_llama"), tmp_path, "--record", str(path)) as service:
        with SyncZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
            result = client.generate("The capital of France is", max_tokens=12, ignore_eos=True)
        service.process.kill()  # and with it what it had not written yet
    assert len(result.token_ids) == 12
    assert path.stat().st_mode & 0o777 == 0o600

    said = CliRunner().invoke(app, ["replay", str(path), "--ticks"])
    assert said.exit_code == 0, said.output
    assert "request 1 " in said.output and "1.0@0[0:" in said.output and " ticks are the same" in said.output
    assert f"{result.token_ids[-1]} (length)" in said.output

    num_records = len(list(RecordReader(path)))
    path.write_bytes(path.read_bytes() + b"\x00\x01")
    cut = CliRunner().invoke(app, ["replay", str(path)])
    assert cut.exit_code == 0 and f"the file ends inside record {num_records + 1}" in cut.output


def test_what_is_no_record_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    said = CliRunner().invoke(app, ["replay", str(tmp_path / "text")])
    assert said.exit_code == 2 and "is no flight record" in said.output
