"""The engine process: the Batcher, with its model and its KV, and the link to whoever sends it requests.

A crash of the Batcher ends the process: after a device fault, and after most others, only a new one can be trusted.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

import trio

from genbatch.actors.batching.batcher_messages import GetModels, GetStats
from genbatch.actors.engine.child_main import StartFault, run_child
from genbatch.actors.engine.control_channel import ControlChannel
from genbatch.actors.engine.control_messages import EngineReady, Join, Loading, StartEngine, Unjoined
from genbatch.actors.engine.engine_session import EngineSession
from genbatch.actors.engine.frame_stream import FrameStream
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.supervisor import background

# Parts of a stage of loading that are told of one by one.
_PARTS = 100


def main() -> None:
    """Runs until the parent says Stop, or is gone."""
    run_child(lambda channel: EngineProcess(channel).serve())


class EngineProcess:
    """What the process does for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._batcher: ActorRef
        self._nursery: trio.Nursery
        self._session = trio.CancelScope()
        self._told: tuple[str, int] = ("", 0)  # stage and part of loading

    async def serve(self) -> None:
        """Returns when the parent says so, or is gone.

        Raises:
            StartFault: the Batcher could not be started.
        """
        async with background() as self._nursery:
            while True:
                match await self._channel.receive():
                    case StartEngine() as start:
                        self._nursery.start_soon(self._open, start)
                    case Join(number):
                        self._session.cancel()
                        self._session = trio.CancelScope()
                        self._nursery.start_soon(self._follow, number, FrameStream(self._channel.take_socket()))
                    case _:
                        return

    async def _open(self, start: StartEngine) -> None:
        try:
            # On a thread, as torch takes seconds to import, in which the parent may say Stop.
            side = await trio.to_thread.run_sync(
                import_module, "genbatch.actors.engine.model_side", abandon_on_cancel=True
            )
            self._batcher = await side.open_batcher(self._nursery, start, self._tell_progress)
        except Exception as error:
            raise StartFault(error) from error
        models = await self._batcher.call(GetModels(), timeout=None)
        stats = await self._batcher.call(GetStats(), timeout=None)
        await self._tell(EngineReady(models, stats))

    async def _follow(self, number: int, stream: FrameStream) -> None:
        """Serves one gateway."""
        with self._session:
            await EngineSession(self._batcher, stream).run()
        await self._tell(Unjoined(number))

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """On the event loop's thread."""
        part = _PARTS * done // total if total else 0
        if self._told != (stage, part):
            self._told = (stage, part)
            self._nursery.start_soon(self._tell, Loading(stage, done, total))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone, which ends this process, too
            await self._channel.send(message)
