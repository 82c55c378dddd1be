"""ProcessGroup: a program with its children, which runs only while it is wanted.

Between two uses all of them are stopped (SIGSTOP), so that no engine takes time of another one's. They are found by
their session: a child may have made a process group of its own.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
_TAIL = 3000
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # <sys/prctl.h>


class ProcessGroup:
    """A running program, from the repository's root; its standard error goes to a log.

    Args:
        command: starts it.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # it may be stopped when we are killed, and would stay so
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets it run for as long as the block does."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Holds it up until it is wanted."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it with its children."""
        self._signal(signal.SIGKILL)
        self.process.communicate()
        self._log.close()

    def last_words(self) -> str:
        """How it ended, or that it did not, and the end of its log."""
        self._log.seek(0)
        return f"status {self.process.poll()}\n{self._log.read().decode(errors='replace')[-_TAIL:]}"

    def _signal(self, number: signal.Signals) -> None:
        for pid in _session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """The processes of the session that `leader` began, itself first."""
    found = [leader]
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) != leader:
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything; session is the fourth field behind it.
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(directory.name))
    return found
