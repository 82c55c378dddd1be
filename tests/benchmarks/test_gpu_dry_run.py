"""The GPU benchmark runs from end to end without a GPU, so that the one hour with one is not spent on typing errors."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_gpu_benchmark_runs_dry():
    script = Path(__file__).with_name("gpu.py")
    done = subprocess.run(
        [sys.executable, script, "--dry-run"],
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "figures mean nothing" in done.stdout
    for row in ("copy bandwidth", "decode B=2", "steps overlapped", "W1", "generate_batch", "static cache"):
        assert row in done.stdout
    assert "failed" not in done.stdout
    assert "not measured" not in done.stdout
