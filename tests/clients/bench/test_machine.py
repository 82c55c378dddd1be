"""What is said of a machine, read from the text that Linux gives."""

import os
from pathlib import Path

from genbatch.clients.bench.machine import machine

CPUINFO = """processor\t: 0
model name\t: A Fast CPU @ 3.0GHz
flags\t\t: fpu sse avx2 avx512f avx512_vnni amx_tile

processor\t: 1
model name\t: Another
"""


def test_the_machine_is_named_with_its_cores_and_the_instructions_that_matter(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    text = machine(tmp_path / "cpuinfo")
    assert text.endswith("of A Fast CPU @ 3.0GHz (avx2, avx512f, avx512_vnni)")
    assert text.startswith(str(len(os.sched_getaffinity(0))))


def test_a_system_that_does_not_tell_is_named_by_what_python_knows(tmp_path: Path) -> None:
    assert " of " in machine(tmp_path / "missing")
