"""EngineRunner: one life of an engine process; a child for a supervisor, which starts the next."""

import logging
from collections.abc import Callable

import trio

from genbatch.actors.engine.child_process import EXIT_S, ChildProcess
from genbatch.actors.engine.control_messages import EngineReady, Loading, StartEngine, StartFailed, Stop, Unjoined
from genbatch.actors.engine.joint import Joint
from genbatch.actors.engine.start_errors import ProcessDied, ProcessFailed, to_error

logger = logging.getLogger(__name__)

# Seconds that it has to free its memory in when it is told to stop.
STOP_S = 5.0


class EngineRunner:
    """Runs engine processes, one after another.

    Args:
        start: what each is told.
        joint: is told of each.
        progress: called as progress(stage, done, total) while one loads.
    """

    def __init__(self, start: StartEngine, joint: Joint, progress: Callable[[str, int, int], None]) -> None:
        self.ready: EngineReady | None = None  # what the last one said
        self._start = start
        self._joint = joint
        self._progress = progress
        self._child: ChildProcess | None = None
        self._is_up = False

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs or loads."""
        return None if self._child is None else self._child.pid

    def kill(self, reason: str) -> None:
        """Ends an engine that does not get on; one that still loads is not the one that is meant."""
        if self._child is not None and self._is_up:
            logger.error("killing the engine process %d: %s", self._child.pid, reason)
            self._joint.engine_is_gone(self._child.channel)
            self._child.kill()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Starts a process and lives as long; `started` when the Batcher runs.

        Raises:
            ModelError, OptionError, SchedulerError: it did not start, and this is why.
            ProcessFailed: it did not start.
            ProcessDied: it ended.
        """
        child = self._child = ChildProcess("engine", "genbatch.actors.engine.engine_process")
        grace_s = 0.0
        try:
            self.ready = await self._wait_until_ready(child)
            self._is_up = True
            task_status.started()
            await self._joint.engine_is_ready(child.channel, self.ready.models)
            while (message := await child.channel.receive()) is not None:
                if isinstance(message, Unjoined):
                    await self._joint.unjoined(message.number)
            raise ProcessDied("engine", await child.end(EXIT_S))
        except trio.Cancelled:
            grace_s = STOP_S
            raise
        finally:
            self._joint.engine_is_gone(child.channel)
            self._is_up = False
            self._child = None
            with trio.CancelScope(shield=True):
                if grace_s:
                    await child.stop(Stop())
                await child.end(grace_s)

    async def _wait_until_ready(self, child: ChildProcess) -> EngineReady:
        await child.channel.send(self._start)
        while (message := await child.channel.receive()) is not None:
            match message:
                case Loading():
                    self._progress(message.stage, message.done, message.total)
                case EngineReady():
                    return message
                case StartFailed():
                    raise to_error(message)
        code = await child.end(EXIT_S)
        raise ProcessFailed(f"the engine process ended with code {code} before it was ready")
