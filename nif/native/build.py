"""Compiles the C files for this machine, once, to the cache directory. A wheel has compiled libraries.

If they cannot be compiled, NativeUnavailable is raised, and the model runs in torch.
"""

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genbatch.nif.errors import NativeError
from genbatch.nif.host import available_cores
from genbatch.nif.models.model_source import OTHER_CACHE, cache_directory
from genbatch.nif.native.packaged import packaged_library
from genbatch.nif.trusted_files import NotOurs, is_ours, private_folder


class NativeUnavailable(NativeError):
    """The C kernels cannot run this model on this machine; `reason` is for a log line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


log = logging.getLogger("genbatch")

SOURCE_DIRECTORY = Path(__file__).parent
# gnu11 for madvise and sched_yield; no contraction: see simd.h.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 900
# Object files, the library and the compiler's temporary files take 6 MB.
_BUILD_BYTES = 2**24
# A file system in memory, for machines on which other file systems are full.
_MEMORY_FOLDER = "/dev/shm"


def native_flags() -> tuple[str, ...]:
    """Return the compiler flags for this CPU's instructions, and the macros that describe the CPU to the kernels."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    # See gemm_bf16.c: only AMD's cores multiply pairs of bfloat16 faster than floats.
    return ("-march=native", "-DDOT_BF16") if "AuthenticAMD" in _cpu() else ("-march=native",)


def _report_to_nobody(stage: str, done: int, total: int) -> None:
    pass


def build_library(
    machine_flags: Sequence[str] | None = None, progress: Callable[[str, int, int], None] = _report_to_nobody
) -> Path:
    """Return the path of this machine's library: the wheel's, a cached build, or a new build.

    Args:
        machine_flags: flags instead of `native_flags()`, with which tests build for older machines.
        progress: called with the stage "compile" before the compiler runs for some ten seconds.

    Raises:
        NativeUnavailable: there is no compiler, or the compiler failed.
    """
    if machine_flags is None and (packaged := packaged_library(_cpu())) is not None:
        return packaged  # the library is installed with this code, so it is as trustworthy
    compiler = _compiler()
    flags = (*FLAGS, *(native_flags() if machine_flags is None else machine_flags))
    sources = tuple(sorted(SOURCE_DIRECTORY.glob("*.c")))
    if not sources:
        raise NativeUnavailable("the installation lacks the C sources")
    target = cache_directory() / "native" / f"{_key(compiler, flags)}.so"
    if is_ours(target):
        return target
    try:
        private_folder(target.parent)
        if is_ours(target):  # now true if the folder was open to other users
            return target
        _check_room(target.parent)
    except (NotOurs, OSError) as fault:
        return _built_for_this_process(compiler, flags, sources, target, str(fault), progress)
    progress("compile", 0, 0)
    try:
        _build(compiler, flags, sources, target)
    except (NativeUnavailable, OSError) as fault:
        try:
            _check_room(target.parent)
        except OSError as full:  # the disk became full meanwhile
            return _built_for_this_process(compiler, flags, sources, target, str(full), progress)
        if isinstance(fault, NativeUnavailable):
            raise
        raise NativeUnavailable(f"cannot write the compiled kernels to {target.parent}: {fault}") from fault
    return target


def _build(compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / "library.so"
        compile_sources(compiler, flags, sources, output)
        # Rename, which replaces atomically, because a second process may have built the same library meanwhile.
        output.replace(target)


def _check_room(folder: Path) -> None:
    """Check that a build can be written; raises OSError if the file system is full, read-only or over a quota."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(_BUILD_BYTES))
        probe.flush()


_built: dict[Path, Path] = {}  # libraries of this process only, by their place in the cache


def _built_for_this_process(
    compiler: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    target: Path,
    reason: str,
    progress: Callable[[str, int, int], None],
) -> Path:
    """Build a library for this process only: in memory, or in a private folder that this process removes at its end.

    Raises:
        NativeUnavailable: no place has room for the build.
    """
    if target in _built:
        return _built[target]
    log.warning("the kernels of %s are compiled for this process only: %s; %s", target.parent, reason, OTHER_CACHE)
    progress("compile", 0, 0)
    folder = _private_scratch()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _build(compiler, flags, sources, folder / target.name)
        _built[target] = _in_memory(folder / target.name)
    except OSError as fault:
        raise NativeUnavailable(f"cannot write the compiled kernels to {folder}: {fault}") from fault
    return _built[target]


def _in_memory(library: Path) -> Path:
    """Move a library to an anonymous file in memory, if the system has such files.

    A file system for temporary files may forbid to run its files.
    """
    if not hasattr(os, "memfd_create"):
        return library
    descriptor = os.memfd_create("genbatch-kernels")
    with library.open("rb") as source, open(descriptor, "wb", closefd=False) as copy:
        shutil.copyfileobj(source, copy)
    library.unlink()
    return Path(f"/proc/self/fd/{descriptor}")


def _private_scratch() -> Path:
    """Create a private folder in a place with room for a build.

    Raises:
        NativeUnavailable: no place has room.
    """
    faults = []
    for parent in (tempfile.gettempdir(), _MEMORY_FOLDER):
        try:
            folder = Path(tempfile.mkdtemp(prefix="genbatch-native-", dir=parent))
        except OSError as fault:
            faults.append(f"{parent}: {fault.strerror}")
            continue
        try:
            _check_room(folder)
        except OSError as fault:
            faults.append(f"{parent}: {fault.strerror}")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder
    raise NativeUnavailable(f"no folder has room to compile the kernels ({'; '.join(faults)})")


def compile_sources(compiler: str, flags: Sequence[str], sources: Sequence[Path], output: Path) -> None:
    """Compile the sources in parallel and link them.

    Raises:
        NativeUnavailable: the compiler failed; the reason has the first line of its errors.
    """
    # The compiler's temporary files go to the same folder.
    environment = {**os.environ, "TMPDIR": str(output.parent)}
    objects = [output.with_name(f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(available_cores()) as threads:
        jobs = [
            threads.submit(_run, compiler, (*flags, "-c", str(source), "-o", str(target)), environment)
            for source, target in zip(sources, objects, strict=True)
        ]
    for job in jobs:
        job.result()
    _run(compiler, (*flags, "-shared", *map(str, objects), "-o", str(output), "-lm"), environment)


def _run(compiler: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [compiler, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NativeUnavailable(f"{compiler} did not run: {fault}") from fault
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NativeUnavailable(f"{compiler} failed: {lines[0].strip() if lines else done.returncode}")


def _compiler() -> str:
    chosen = os.environ.get("CC")
    candidates = (chosen,) if chosen else _COMPILERS
    compiler = next((path for path in map(shutil.which, candidates) if path), None)
    if compiler is None:
        raise NativeUnavailable(f"no C compiler ({', '.join(candidates)}) is installed")
    return compiler


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Return a build's name, a digest of its sources, flags, compiler and CPU."""
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
    """Return the CPU's model and features, because different machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))
