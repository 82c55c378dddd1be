"""The compiler takes the kernels, though no GPU is there to run them; `make gpu-compile` does all for every GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends import backends

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif("nvidia" not in backends, reason="this triton has no NVIDIA backend")
def test_kernels_compile_for_a_gpu_without_spilling_and_as_wide_as_we_build_on() -> None:
    # A process of its own: in this one Triton interprets.
    done = subprocess.run(
        [sys.executable, "-m", "tests.nif.kernels.compile_kernels", "--capabilities", "90", "--slice"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".ns")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "kernels compiled" in done.stdout
