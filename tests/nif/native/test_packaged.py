"""Kernels that a wheel carries: which CPU gets which, and that no compiler is asked for them."""

from pathlib import Path

import pytest

from genbatch.nif.native import build, packaged
from genbatch.nif.native.build import build_library
from genbatch.nif.native.packaged import LEVELS, level_of, packaged_library

INTEL, AMD = "vendor_id\t: GenuineIntel", "vendor_id\t: AuthenticAMD"
HASWELL = "flags\t\t: fpu sse2 avx avx2 fma bmi1 bmi2 f16c movbe abm"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        (f"{INTEL}\nflags\t\t: fpu sse2 avx", None),
        (f"{INTEL}\n{HASWELL.replace(' fma', '')}", None),
        (f"{INTEL}\n{HASWELL}", "v3"),
        (f"{AMD}\n{HASWELL} avx_vnni", "v3-vnni"),
        (f"{INTEL}\n{HASWELL} avx512f", "v3"),
        (f"{INTEL}\n{SKYLAKE}", "v4"),
        (f"{INTEL}\n{SKYLAKE} avx512_vnni", "v4-vnni"),
        (f"{INTEL}\n{SKYLAKE} avx512_vnni avx512_bf16 avx_vnni amx_int8", "v4-vnni"),
        (f"{AMD}\n{SKYLAKE} avx512_vnni avx512_bf16", "v4-vnni-bf16"),
        ("", None),
        ("Features\t: fp asimd evtstrm aes", "arm"),
        ("Features\t: fp asimd fphp asimdhp asimddp", "arm-dotprod"),
        ("Features\t: fp asimd asimddp sve i8mm bf16", "arm-i8mm"),
        ("Features\t: fp evtstrm", None),
    ],
)
def test_a_cpu_gets_the_best_level_that_it_has_all_of(cpu: str, name: str | None) -> None:
    machine = "aarch64" if cpu.startswith("Features") else "x86_64"
    level = level_of(cpu, machine)
    assert level_of(cpu, "riscv64") is None
    assert (None if level is None else level.name) == name


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation that brings a library for this machine, which is said to be a Haswell."""
    monkeypatch.setattr(packaged.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packaged.sys, "platform", "linux")
    monkeypatch.setattr(build, "_cpu", lambda: f"{INTEL}\n{HASWELL}")
    monkeypatch.setattr(build, "packaged_library", lambda cpu: packaged_library(cpu, tmp_path))
    path = tmp_path / packaged.library_name(level_of(HASWELL, "x86_64") or LEVELS["x86_64"][-1])
    path.write_bytes(b"kernels")
    return path


def test_a_library_that_the_wheel_brings_needs_no_compiler(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/missing")
    assert build_library() == wheel


def test_a_library_of_other_sources_is_not_taken(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "step.c").write_text("int other;")
    monkeypatch.setattr(packaged, "SOURCE_DIRECTORY", sources)
    assert packaged_library(f"{INTEL}\n{HASWELL}", wheel.parent) is None


def test_another_kind_of_machine_compiles_its_own(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packaged_library(f"{INTEL}\n{SKYLAKE}", wheel.parent) is None
    monkeypatch.setattr(packaged.platform, "machine", lambda: "aarch64")
    assert packaged_library(f"{INTEL}\n{HASWELL}", wheel.parent) is None
