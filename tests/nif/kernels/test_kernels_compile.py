"""The compiler takes the kernels, though no GPU is there to run them; `make gpu-compile` does all for every GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends import backends

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
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


def test_attention_that_the_compiler_does_not_pipeline_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the module's import takes away
    from tests.nif.kernels.compile_kernels import faults_of
    from tests.nif.kernels.offline_compiler import Compiled

    # As Triton 3.6 and 3.9 compiled decodes of 32 heads over 8 of 128 elements for 9.0.
    kind, variant = (
        "_decode_attention_kernel",
        "{'KEYS': 64, 'HEAD': 128, 'HEAD_PAD': 128} {'num_warps': 4, 'num_stages': 4}",
    )
    slow = Compiled(kind, variant, shared=22592, registers=255, spilled=152, loads_wide=True, copies=0, products="mma")
    fast = Compiled(kind, variant, shared=73216, registers=168, spilled=0, loads_wide=True, copies=140, products="mma")
    assert [fault.split()[0] for fault in faults_of(slow, 90)] == ["spills", "copies", "2"]
    assert faults_of(fast, 90) == []
