"""GatewayRunner: one life of a gateway process; a child for a supervisor, which starts the next."""

from collections.abc import Callable

import trio

from genbatch.actors.engine.child_process import EXIT_S, ChildProcess
from genbatch.actors.engine.control_messages import (
    DrainAndStop,
    GatewayReady,
    Hung,
    StartFailed,
    StartGateway,
    Stop,
)
from genbatch.actors.engine.joint import Joint
from genbatch.actors.engine.start_errors import ProcessDied, ProcessFailed, to_error

# Seconds that its last messages have to leave in when it is told to stop.
STOP_S = 2.0


class GatewayRunner:
    """Runs gateway processes, one after another, until one was drained.

    Args:
        start: what each is told.
        joint: is told of each.
        kill_engine: called with the reason when a gateway says that the engine is hung.
    """

    def __init__(self, start: StartGateway, joint: Joint, kill_engine: Callable[[str], None]) -> None:
        self.addresses: tuple[str, ...] = ()
        self._start = start
        self._joint = joint
        self._kill_engine = kill_engine
        self._child: ChildProcess | None = None
        self._is_stopping = False
        self._stopped = trio.Event()

    @property
    def pid(self) -> int | None:
        """The process id of the gateway that runs."""
        return None if self._child is None else self._child.pid

    async def drain(self, timeout_s: float) -> None:
        """Has the gateway refuse what is new, end what is open, and end; returns when it has."""
        self._is_stopping = True
        if self._child is None:
            return
        if await self._child.stop(DrainAndStop(timeout_s)):
            await self._stopped.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Starts a process and lives as long; `started` when it listens.

        Raises:
            AddressError, KeyFileError: it cannot listen, and this is why.
            ProcessFailed: it did not start.
            ProcessDied: it ended without having been told to.
        """
        child = self._child = ChildProcess("gateway", "genbatch.actors.engine.gateway_process")
        self._stopped = trio.Event()
        grace_s = 0.0
        try:
            self.addresses = (await self._wait_until_ready(child)).addresses
            task_status.started()
            await self._joint.gateway_is_ready(child.channel)
            while (message := await child.channel.receive()) is not None:
                if isinstance(message, Hung):
                    self._kill_engine(message.reason)
            code = await child.end(EXIT_S)
            if not self._is_stopping:
                raise ProcessDied("gateway", code)
        except trio.Cancelled:
            grace_s = STOP_S
            raise
        finally:
            self._joint.gateway_is_gone(child.channel)
            self._child = None
            self._stopped.set()
            with trio.CancelScope(shield=True):
                if grace_s:
                    await child.stop(Stop())
                await child.end(grace_s)

    async def _wait_until_ready(self, child: ChildProcess) -> GatewayReady:
        await child.channel.send(self._start)
        while (message := await child.channel.receive()) is not None:
            match message:
                case GatewayReady():
                    return message
                case StartFailed():
                    raise to_error(message)
        code = await child.end(EXIT_S)
        raise ProcessFailed(f"the gateway process ended with code {code} before it was ready")
