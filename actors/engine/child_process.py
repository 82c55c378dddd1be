"""ChildProcess: a process of this program's own, from its start to its certain end.

    child = ChildProcess("engine", "genbatch.actors.engine.engine_process")
    await child.channel.send(StartEngine(...))
    ...
    await child.end()

It ends with the one that started it: the channel's end tells it, and on Linux the kernel kills it.
"""

import os
import socket
import subprocess
import sys
from typing import Any

import trio

from genbatch.actors.engine.control_channel import ControlChannel
from genbatch.actors.engine.control_messages import FromChild
from genbatch.actors.log_lines import LEVEL_VARIABLE

# Seconds from the end of its channel to its exit code; what takes longer is killed.
EXIT_S = 1.0


class ChildProcess:
    """Starts `module`'s `main()` in a new interpreter.

    Must be made on a thread that lasts as long as the process: its end would end the process. It blocks until the
    interpreter is loaded, some milliseconds.

    Args:
        name: for logs.
        module: its main() calls run_child, which knows the arguments.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            # Not fork alone: threads and locks of this process must not be copied. -P: no module is to be found in
            # whatever directory this is run in, unless it can be found there from here.
            code = f"from {module} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us, who then stop it
                # Where nobody has started our logging, it says no more than Python's does.
                env={LEVEL_VARIABLE: "warning", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.channel: ControlChannel[Any] = ControlChannel(ours, FromChild)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def stop(self, message: object) -> bool:
        """Tells it to end; returns whether it was still there to be told."""
        try:
            await self.channel.send(message)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; fine if it has ended."""
        self._process.kill()

    async def end(self, grace_s: float = 0.0) -> int:
        """Waits for its end, kills it after `grace_s` seconds; returns its exit code, -n for signal n.

        May be called again.
        """
        try:
            if self._process.returncode is None:
                with trio.move_on_after(grace_s):
                    while await self.channel.receive() is not None:  # until it has closed its end
                        pass
                    await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        finally:
            self._process.kill()
            with trio.CancelScope(shield=True):
                code = await trio.to_thread.run_sync(self._process.wait)
            self.channel.close()
        return code
