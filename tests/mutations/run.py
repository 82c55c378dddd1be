"""Run: some tests in a process of their own, over a copy of the source."""

import contextlib
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

# What takes long to import and is none of ours; each run begins with it there.
HEAVY = [
    "torch._dynamo",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "jinja2",
    "trio",
    "zmq",
    "hypothesis",
    "pytest",
]
PASSED, FAILED = 0, 1  # pytest's exit codes
NOT_THE_COPY = 100
# Bytes of one process: a change may be what kept memory from growing.
MOST_MEMORY = 12 << 30

_servers = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Run:
    """How it went.

    Args:
        exit_code: pytest's; None if it did not end in time.
        red: the tests that failed.
        output: what pytest wrote.
    """

    exit_code: int | None
    red: tuple[str, ...]
    output: str


def prepare() -> None:
    """To be called once, before the first run."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _servers.set_forkserver_preload(HEAVY)


def run_tests(
    copy: Path, tests: list[str], *, stop_at_first: bool, timeout_s: float, options: Sequence[str] = ()
) -> Run:
    """Runs tests (paths below tests/, with ::names) over the source at `copy`; `options` are pytest's."""
    log = copy / "output.txt"
    options = [*options, "-x"] if stop_at_first else options
    process = _servers.Process(target=_run, args=(copy, tests, options, log))
    process.start()
    process.join(timeout_s)
    exit_code = process.exitcode
    _end_group(process)
    output = log.read_text(errors="replace") if log.exists() else ""
    # Names with parameters are one test.
    red = dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) tests/(\S+?::\w+)", output, re.MULTILINE))
    return Run(exit_code, tuple(red), output)


def _end_group(process: BaseProcess) -> None:
    """Ends what is left of a run, and the processes that its tests started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def put_first(names: str) -> None:
    """Let the processes that a test starts import from the folder, which is on PYTHONPATH.

    A .pth file of the environment may put the checkout before PYTHONPATH. Python imports sitecustomize after it.
    """
    (Path(names) / "sitecustomize.py").write_text(f"import sys\n\nsys.path.insert(0, {names!r})\n")


def origin_in_a_child() -> str:
    """Return the file from which a process of the service imports the product."""
    find = "import importlib.util; print(importlib.util.find_spec('genbatch').origin)"
    return subprocess.run([sys.executable, "-P", "-c", find], capture_output=True, text=True, check=True).stdout


def _run(copy: Path, tests: list[str], options: Sequence[str], log: Path) -> None:
    """In the process: has `genbatch` and `tests` come from the copy, then runs pytest."""
    os.setpgid(0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, hard))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    names = str(copy / ".ns")
    os.environ["PYTHONPATH"] = names
    put_first(names)
    # What is compiled is kept in the copy: tests do not change, and of the product a file's digest is compared.
    sys.dont_write_bytecode = False
    sys.path[:] = [names, str(copy), *(entry for entry in sys.path if entry)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("genbatch", "tests")]:
        del sys.modules[name]
    found = importlib.util.find_spec("genbatch.actors")
    if found is None or not str(found.origin).startswith(names) or not origin_in_a_child().startswith(names):
        sys.exit(NOT_THE_COPY)
    import pytest

    always = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    # Plugins among what is there already need no rewriting.
    always += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(int(pytest.main([*always, *options, *(f"tests/{test}" for test in tests)])))
