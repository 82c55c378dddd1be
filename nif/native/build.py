"""Compiles the C files for the machine at hand, once, into the cache directory.

Where that cannot be done, NativeUnavailable sends the model to the general path.
"""

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from genbatch.nif.errors import NativeError
from genbatch.nif.models.model_source import OTHER_CACHE, cache_directory
from genbatch.nif.trusted_files import NotOurs, is_ours, private_folder


class NativeUnavailable(NativeError):
    """The C kernels cannot run this model here; `reason` says why in words for a log line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def available_cores() -> int:
    """Cores that this process may use: its affinity and, in a container, its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup of this version: only the affinity counts
    return cores


log = logging.getLogger("genbatch")

SOURCE_DIRECTORY = Path(__file__).parent
# gnu11 for madvise and sched_yield; no contraction: see simd.h.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 300


def native_flags() -> tuple[str, ...]:
    """The flags that let the compiler use everything this CPU has, and what the kernels should know about it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    # See gemm_bf16.c: only AMD's cores multiply pairs of bfloat16 faster than floats.
    return ("-march=native", "-DDOT_BF16") if "AuthenticAMD" in _cpu() else ("-march=native",)


def _report_to_nobody(stage: str, done: int, total: int) -> None:
    pass


def build_library(
    machine_flags: Sequence[str] | None = None, progress: Callable[[str, int, int], None] = _report_to_nobody
) -> Path:
    """Path of the shared library for this machine, compiled if the cache has none.

    Args:
        machine_flags: instead of `native_flags()`; tests build for lesser machines.
        progress: called with the stage "compile" before the compiler runs, some ten seconds.

    Raises:
        NativeUnavailable: there is no compiler, or it failed.
    """
    compiler = _compiler()
    flags = [*FLAGS, *(native_flags() if machine_flags is None else machine_flags)]
    sources = sorted(SOURCE_DIRECTORY.glob("*.c"))
    if not sources:
        raise NativeUnavailable("the installation lacks the C sources")
    target = _library_folder() / f"{_key(compiler, flags)}.so"
    if is_ours(target):
        return target
    progress("compile", 0, 0)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            output = Path(scratch) / "library.so"
            compile_sources(compiler, flags, sources, output)
            # A rename replaces atomically: a second process may have built the same meanwhile.
            output.replace(target)
    except OSError as fault:
        raise NativeUnavailable(f"cannot write the compiled kernels to {target.parent}: {fault}") from fault
    return target


def _library_folder() -> Path:
    """Where the library is kept: in the cache, or for this process alone where that cannot be written or believed."""
    wanted = cache_directory() / "native"
    try:
        folder = private_folder(wanted)
        with tempfile.TemporaryFile(dir=folder):  # a file system may be read-only
            return folder
    except (NotOurs, OSError) as fault:
        return _folder_of_this_process(wanted, str(fault))


@cache
def _folder_of_this_process(wanted: Path, reason: str) -> Path:
    log.warning("the kernels of %s are compiled for this process alone: %s; %s", wanted, reason, OTHER_CACHE)
    folder = tempfile.mkdtemp(prefix="genbatch-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def compile_sources(compiler: str, flags: Sequence[str], sources: Sequence[Path], output: Path) -> None:
    """Compiles the sources side by side and links them.

    Raises:
        NativeUnavailable: the compiler failed; the reason holds the first line of its complaint.
    """
    objects = [output.with_name(f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(available_cores()) as threads:
        jobs = [
            threads.submit(_run, compiler, (*flags, "-c", str(source), "-o", str(target)))
            for source, target in zip(sources, objects, strict=True)
        ]
    for job in jobs:
        job.result()
    _run(compiler, (*flags, "-shared", *map(str, objects), "-o", str(output), "-lm"))


def _run(compiler: str, arguments: Sequence[str]) -> None:
    try:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NativeUnavailable(f"{compiler} did not run: {fault}") from fault
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NativeUnavailable(f"{compiler} failed: {lines[0].strip() if lines else done.returncode}")


def _compiler() -> str:
    wanted = os.environ.get("CC")
    candidates = (wanted,) if wanted else _COMPILERS
    found = next((path for path in map(shutil.which, candidates) if path), None)
    if found is None:
        raise NativeUnavailable(f"no C compiler ({', '.join(candidates)}) is installed")
    return found


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Names a build by all that it depends on: sources, flags, compiler and CPU."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCE_DIRECTORY.glob("*.c"), *SOURCE_DIRECTORY.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NativeUnavailable(f"{compiler} did not run: {fault}") from fault
    for part in (compiler, *flags, platform.machine(), _cpu()):
        digest.update(part.encode() + b"\0")
    digest.update(version.stdout)
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """The CPU's model and features: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))
