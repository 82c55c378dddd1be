"""Building the kernels: the cache, lesser machines, sanitizers, and the reasons why there may be no kernels."""

import ctypes
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native import build, library
from genbatch.nif.native.abi import HEADER
from genbatch.nif.native.build import SOURCE_DIRECTORY, NativeUnavailable, build_library, compile_sources, native_flags
from genbatch.nif.native.model_weights import ModelWeights, check_supported
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import RaggedBatch

# Optimising takes most of a build, three quarters without vectors; these builds are for their results.
QUICK = "-Og"
LESSER = {
    "x86_64": {
        "AVX2": ("-march=haswell",),
        "SSE2": ("-march=x86-64",),
        "AVX-512 without VNNI": ("-march=skylake-avx512",),
        "pairs of bfloat16": ("-march=native", "-DDOT_BF16"),
    },
    "aarch64": {"no dot product": ("-march=armv8-a",)},
}
MACHINE = os.uname().machine


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


NEEDS = {
    "AVX2": {"avx2", "fma"},
    "AVX-512 without VNNI": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
    "pairs of bfloat16": {"avx512_bf16"},
}


# A build takes ten seconds: `make test` has the first of them, which most machines have.
MACHINES = [
    pytest.param(machine, marks=[pytest.mark.long] if number else [])
    for number, machine in enumerate(LESSER.get(MACHINE, {}))
]


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("machine", MACHINES)
def test_lesser_machines_compute_the_same(
    native_model: Callable[..., Model],
    layout: Callable[..., RaggedBatch],
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    mode: str,
) -> None:
    missing = NEEDS.get(machine, set()) - cpu_flags()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    model = native_model("qwen2", "bfloat16" if mode == "bfloat16" else "float32")
    tokens = list(range(3, 93))
    logits = []
    for flags in (native_flags(), (*LESSER[MACHINE][machine], QUICK)):
        opened = library.open_library(build_library(flags))
        monkeypatch.setattr("genbatch.nif.native.model_weights.native_library", lambda opened=opened: opened)
        weights = ModelWeights(model, "int8" if mode == "int8" else "none")
        runner = NativeRunner(weights, n_threads=2)
        runner.allocate([6, 6], 16)
        first = runner.forward(layout(2, [(0, tokens[:61], 0)], 6, 16))
        logits.append(np.concatenate([first, runner.forward(layout(2, [(0, tokens[61:], 61)], 6, 16))]))
        runner.close()
    want, got = logits
    # Integers are exact everywhere; floats are summed over other vectors, which puts some of what is rounded to 8 bits
    # one step aside, and pairs of bfloat16 round activations.
    tolerance = {"float32": 1e-4, "bfloat16": 4e-2, "int8": 1e-1}[mode]
    assert float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max()) < tolerance


def test_a_build_is_made_once_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE_DIRECTORY", tmp_path)  # the kernels' own sources take ten seconds
    (tmp_path / "kernel.c").write_text("int kernel(void) { return 1; }\n")
    first = build_library(("-O0",))
    assert ctypes.CDLL(str(first)).kernel() == 1
    monkeypatch.setattr(build, "compile_sources", lambda *_: pytest.fail("compiled twice"))
    assert build_library(("-O0",)) == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no scratch is left


def test_other_sources_or_flags_get_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compile_sources", lambda _c, _f, _s, output: output.write_bytes(b""))
    names = {build_library(()).name, build_library(("-DX",)).name}
    copied = tmp_path / "sources"
    shutil.copytree(build.SOURCE_DIRECTORY, copied)
    (copied / "simd.h").write_text("changed")
    monkeypatch.setattr(build, "SOURCE_DIRECTORY", copied)
    names.add(build_library(()).name)
    assert len(names) == 3


def test_without_a_compiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match=r"no C compiler \(cc, gcc, clang\) is installed"):
        build_library()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'fatal error: out of ink' >&2; exit 1; }\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailable, match="out of ink"):
        build_library()


def test_a_library_that_does_not_load_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match="do not load"):
        library.open_library(tmp_path / "library.so")


def test_a_library_of_another_interface_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int unrelated(void) { return 0; }\n")
    other = tmp_path / "other.so"
    compile_sources("cc", ("-shared", "-fPIC"), [tmp_path / "other.c"], other)
    with pytest.raises(NativeUnavailable, match="memory_allocate"):
        library.open_library(other)


def test_ctypes_places_every_field_where_the_compiler_does(tmp_path: Path) -> None:
    mirrors = {
        "part": library.Part,
        "linear": library.Linear,
        "norm": library.Norm,
        "experts": library.Experts,
        "recurrence": library.StateLayer,
        "latent": library.Latent,
        "altup": library.AltUp,
        "layer": library.Layer,
        "pair": library.Pair,
        "clusters": library.Clusters,
        "table": library.Table,
        "model": library.ModelStruct,
        "cache": library.Cache,
        "step": library.Step,
        "lora": library.Lora,
    }
    lines, expected = [], []
    for name, mirror in mirrors.items():
        lines.append(f"(long)sizeof({name})")
        expected.append(ctypes.sizeof(mirror))
        for field in (pair[0] for pair in mirror._fields_):
            lines += [f"(long)offsetof({name}, {field})", f"(long)sizeof((({name} *)0)->{field})"]
            expected += [getattr(mirror, field).offset, getattr(mirror, field).size]
    for name in ("largest", "lora_half"):
        dtype = HEADER.dtype(name)
        assert dtype.fields is not None
        lines += [f"(long)sizeof({name})", *(f"(long)offsetof({name}, {field})" for field in dtype.fields)]
        expected += [dtype.itemsize, *(offset for _, offset, *_ in dtype.fields.values())]
    calls = "".join(f'    printf("%ld ", {line});\n' for line in lines)
    source, program = tmp_path / "places.c", tmp_path / "places"
    source.write_text(f'#include <stdio.h>\n#include "abi.h"\nint main(void) {{\n{calls}    return 0;\n}}\n')
    subprocess.run(["cc", f"-I{SOURCE_DIRECTORY}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert [int(word) for word in printed.split()] == expected
    assert set(HEADER.structs) == {*mirrors, "largest", "lora_half"}


def test_a_function_of_the_header_is_declared_as_c_declares_it() -> None:
    built = library.open_library(build_library())
    assert built.pack_u4.restype is ctypes.c_bool
    assert built.pack_u4.argtypes[3:5] == [ctypes.c_bool, ctypes.c_float]
    assert built.memory_free.restype is None
    assert built.engine_step.argtypes == [ctypes.c_void_p, ctypes.POINTER(library.Step), ctypes.c_void_p]
    assert not built.digits_pay.argtypes


def test_what_the_kernels_do_not_compute_is_named(tiny_model: Callable[[str], Model]) -> None:
    with pytest.raises(NativeUnavailable, match="heads of 8 elements"):
        check_supported(tiny_model("qwen3"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sanitizers", "libraries", "names"),
    [
        (
            "address,undefined",
            ("libasan.so", "libubsan.so"),
            ["float32", "bfloat16", "int8", "int4", "predictions", "stored", "adapters"],
        ),
        ("thread", ("libtsan.so",), ["float32"]),
    ],
)
def test_the_kernels_are_clean_under_the_sanitizers(
    sanitizers: str, libraries: tuple[str, ...], names: list[str]
) -> None:
    compiler, setarch = shutil.which("gcc"), shutil.which("setarch")
    if compiler is None or setarch is None:
        pytest.skip("gcc, whose sanitizer runtimes can be preloaded, or setarch is not installed")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in libraries
    ]
    runtimes = [done.stdout.strip() for done in found]
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip("gcc's sanitizer runtimes are not installed")
    # The thread sanitizer wants addresses that are not drawn.
    program = [setarch, "-R", sys.executable, str(Path(__file__).parent / "sanitized_run.py"), sanitizers]
    done = subprocess.run(
        program,
        env={
            **os.environ,
            "CC": compiler,
            "LD_PRELOAD": " ".join(runtimes),
            # Python and torch keep what they allocated; only wrong accesses count.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == names


def test_the_compiler_is_announced_and_only_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(
        build, "compile_sources", lambda _compiler, _flags, _sources, output: output.write_bytes(b"a library")
    )
    stages: list[str] = []
    for _ in range(2):
        build_library(progress=lambda stage, done, total: stages.append(stage))
    assert stages == ["compile"]


def test_where_the_cache_cannot_be_written_the_kernels_are_built_for_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", "/proc/genbatch")  # read-only for everybody
    monkeypatch.setattr(
        build, "compile_sources", lambda _compiler, _flags, _sources, output: output.write_bytes(b"a library")
    )
    first = build_library()
    assert first.read_bytes() == b"a library" and build_library() == first
    [told] = [record.getMessage() for record in caplog.records]
    assert "compiled for this process only" in told and "$GENBATCH_CACHE" in told


# Run where the cache is a file system of its own: full, or read-only once the library is there.
IN_PLACE = """
import logging, os, subprocess, sys
from pathlib import Path

cache, kind = Path(os.environ["GENBATCH_CACHE"]), sys.argv[1]
tmpfs = ["mount", "-t", "tmpfs", "-o", "mode=700,size=" + ("256k" if kind == "full" else "64m"), "none", str(cache)]
if subprocess.run(tmpfs, stderr=subprocess.DEVNULL).returncode:
    sys.exit(77)
from genbatch.nif.native import build, library
from genbatch.nif.native.abi import HEADER

logging.basicConfig(format="%(message)s")
if kind != "full":
    cached = build.build_library(("-O0",))
    subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
    assert build.build_library(("-O0",)) == cached
flags = ("-O0", "-DX")
built = build.build_library(flags)
assert built == build.build_library(flags) and not built.is_relative_to(cache)
library.open_library(built)
print(sorted(path.name for path in cache.rglob("genbatch*")), file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_full_or_read_only_cache_leaves_the_kernels_to_this_process(tmp_path: Path, kind: str) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare, by which a test mounts a file system, is not installed")
    done = subprocess.run(
        [unshare, "--user", "--map-root-user", "--mount", sys.executable, "-c", IN_PLACE, kind],
        env={**os.environ, "GENBATCH_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (1, 77) and "genbatch" not in done.stderr:
        pytest.skip("this system mounts no file system for a test")
    assert done.returncode == 0, done.stderr
    reason = "No space left" if kind == "full" else "Read-only file system"
    assert "compiled for this process only" in done.stderr and reason in done.stderr
    assert done.stderr.endswith("[]\n")  # nothing of the build is left


def test_a_cache_that_is_filled_while_the_compiler_runs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path))
    full: list[Path] = []

    def compile_sources(compiler: str, flags: Sequence[str], sources: Sequence[Path], output: Path) -> None:
        if output.is_relative_to(tmp_path):
            full.append(tmp_path)
            raise NativeUnavailable("cc failed: cannot write")
        output.write_bytes(b"a library")

    def check_room(folder: Path) -> None:
        if folder.is_relative_to(tmp_path) and full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "compile_sources", compile_sources)
    monkeypatch.setattr(build, "_check_room", check_room)
    assert build_library(("-DFILLED",)).read_bytes() == b"a library"
    assert "No space left" in caplog.text


def test_without_room_anywhere_the_reason_names_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_room(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_check_room", check_room)
    with pytest.raises(NativeUnavailable, match=r"no folder has room .*/dev/shm: No"):
        build_library(("-DNOWHERE",))


@pytest.mark.parametrize(
    ("machine", "cpu", "flags"),
    [
        ("x86_64", "vendor_id : AuthenticAMD", ("-march=native", "-DDOT_BF16")),
        ("AMD64", "vendor_id : GenuineIntel", ("-march=native",)),
        ("aarch64", "", ("-mcpu=native",)),
        ("arm64", "", ("-mcpu=native",)),
    ],
)
def test_each_kind_of_machine_has_its_own_flags(
    monkeypatch: pytest.MonkeyPatch, machine: str, cpu: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(build, "_cpu", lambda: cpu)
    assert native_flags() == flags
