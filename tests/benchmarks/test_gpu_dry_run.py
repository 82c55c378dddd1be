"""The GPU benchmark runs from end to end without a GPU, so that the one hour with one is not spent on typing errors."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_gpu_benchmark_runs_dry(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    script = Path(__file__).with_name("gpu.py")
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "--result", result],
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "figures mean nothing" in done.stdout
    for row in (
        "copy bandwidth",
        "decode B=2",
        "steps overlapped",
        "TTFT, 20 prompt tokens",
        "W1",
        "generate_batch",
        "static cache",
    ):
        assert row in done.stdout
    assert "failed" not in done.stdout
    assert "not measured" not in done.stdout
    cases = {row["case"]: row["figure"] for row in json.loads(result.read_text())["rows"]}
    assert "(exit 0)" in cases["tests"]
    assert "compute-sanitizer racecheck" in cases
    assert "steps held up" in cases
