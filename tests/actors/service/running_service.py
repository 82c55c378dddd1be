"""RunningService: `genbatch serve` as a process of its own, with its engine and its gateway, to be mistreated."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

TIMEOUT_S = 300.0  # of a loaded machine; only what hangs reaches it


class RunningService:
    """Starts at `__enter__`, is killed at `__exit__` if it has not ended; its processes must not outlive it."""

    def __init__(self, model: Path | None, directory: Path, *flags: str) -> None:
        self.address = f"ipc://{directory}/zeromq.sock"
        self.log = ""
        self._command = [
            *(sys.executable, "-c", "from genbatch.clients.cli.main import main; main()", "serve"),
            *([] if model is None else [str(model)]),
            *("--bind", self.address, "--dtype", "float32", "--n-gpu-layers", "0", "--n-ctx", "2048", *flags),
        ]
        self._environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._lines = threading.Condition()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for(" ready ")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until the log has `text` so many times."""
        with self._lines:
            found = self._lines.wait_for(lambda: self.log.count(text) >= count, TIMEOUT_S)
        assert found, f"no {text!r} in:\n{self.log}"

    @property
    def engine(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._child("engine_process")

    @property
    def engines(self) -> list[int]:
        """Those of all engines, in the order in which they were started."""
        return sorted(self._children("engine_process"))

    @property
    def gateway(self) -> int | None:
        """The gateway's."""
        return self._child("gateway_process")

    def _child(self, module: str) -> int | None:
        named = self._children(module)
        return named[0] if named else None

    def _children(self, module: str) -> list[int]:
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in children if module in Path(f"/proc/{child}/cmdline").read_text()]
        except OSError:  # one has just ended
            return []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._lines:
                self.log += line
                self._lines.notify_all()


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than a dead one that its parent has not looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int | None, number: signal.Signals = signal.SIGKILL) -> int:
    """Sends the signal to a process that is there."""
    assert pid is not None
    os.kill(pid, number)
    return pid
