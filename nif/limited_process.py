"""LimitedProcess: work that nothing in this process can interrupt runs in a child process, under the kernel's limits.

    process = LimitedProcess("genbatch.nif.text.tokenizer_child")     # the module's `main` calls `serve`
    process.start(settings)                                           # the first job
    answer = process.ask(job, limit_s=2.0)                            # None if the child exceeded a limit

A model's file or a client's request may have a regular expression, a grammar or a template that takes years. Python
cannot stop a search inside C code. The kernel can: the default action of SIGPROF ends a process in any code. So the
child takes one job at a time, each with a limit of processor time and of memory. Jobs and answers are JSON behind their
length.
"""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_JOB = struct.Struct("!dQI")  # seconds of processor time and bytes of memory, 0 for no limit; the number of bytes
_ANSWER = struct.Struct("!I")  # the number of bytes


class LimitedProcess:
    """A child process. It ends with this object, and after a job that exceeds a limit. One thread at a time may use it.

    Args:
        module: the child's module, with a function `main`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._running: list[subprocess.Popen[bytes]] = []  # one at most
        weakref.finalize(self, _end_all, self._running)

    @property
    def is_running(self) -> bool:
        """Whether the child runs."""
        return bool(self._running) and self._running[0].poll() is None

    def start(self, job: Any, *, limit_s: float = 0.0) -> Any:
        """Start a new child, and return its answer to the first job as `ask` does."""
        self.end()
        self._running.append(start_child(self._module, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.ask(job, limit_s=limit_s)

    def ask(self, job: Any, *, limit_s: float = 0.0, memory: int = 0) -> Any:
        """Return the child's answer to a job; None if the child has ended.

        Args:
            job: a value for JSON.
            limit_s: the limit of processor time, in seconds; 0 for none.
            memory: the bytes by which the child may grow; 0 for no limit.
        """
        answer = b""
        for process in self._running:
            assert process.stdin is not None and process.stdout is not None
            data = json.dumps(job).encode()
            with suppress(OSError, struct.error):  # the child has ended
                process.stdin.write(_JOB.pack(limit_s, memory, len(data)) + data)
                process.stdin.flush()
                (size,) = _ANSWER.unpack(process.stdout.read(_ANSWER.size))
                answer = process.stdout.read(size)
        if not answer:
            self.end()
            return None
        return json.loads(answer)

    def end(self) -> None:
        """Kill the child."""
        _end_all(self._running)


def _end_all(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # the child is gone, so unwritten bytes do not matter
                pipe.close()
        process.wait()
    running.clear()


def start_child(module: str, *arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start a new interpreter that runs `main` of a module.

    Args:
        arguments: the command line.
        pipes: further arguments of Popen.
    """
    # Do not fork this process, because its threads and locks must not be copied.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {module} import main; main()", *arguments],
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # keep the terminal's Ctrl-C away from it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **pipes,
    )


# In the child


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer one job after another until the parent closes its end.

    Args:
        answer: returns a job's answer, a value for JSON. Its exceptions end the process.
    """
    harden()
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    while len(header := reading.read(_JOB.size)) == _JOB.size:
        limit_s, memory, size = _JOB.unpack(header)
        data = reading.read(size)
        with limited(limit_s, address_space() + memory if memory else 0):
            value = answer(json.loads(data))
        payload = json.dumps(value).encode()
        writing.write(_ANSWER.pack(len(payload)) + payload)
        writing.flush()


def harden() -> None:
    """Leave the end of this process to its parent: signals are ignored, and no core is written.

    The parent needs its children while it drains, and a service manager sends SIGTERM to all processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if the machine runs out of memory, this process is killed first
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextmanager
def limited(cpu_s: float, memory: int) -> Iterator[None]:
    """Limit the body: more processor time ends the process, and more memory raises MemoryError; 0 for no limit.

    Args:
        memory: bytes of address space, see `address_space`.
    """
    if memory:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        with suppress(ValueError, OSError):  # the system has no such limit, or a lower one
            resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def address_space() -> int:
    """Return the bytes of this process's address space; a high guess if the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30
