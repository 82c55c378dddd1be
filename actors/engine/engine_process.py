"""The engine process: the Batcher with its model and its KV, and the link to the gateway.

A crash of the Batcher ends the process: after a device fault, and after most other faults, only a new process can be
trusted.
"""

import gc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import trio

from genbatch.actors.engine.child_process import (
    AdapterSource,
    ControlChannel,
    EngineReady,
    Join,
    Loading,
    PrepareEngine,
    ServingChanged,
    StartEngine,
    StartFault,
    Unjoined,
    run_child,
    set_up_garbage_collection,
)
from genbatch.actors.engine.freed_memory import keep_returning_freed_memory, resident_bytes
from genbatch.actors.engine.link import EngineSession, FrameStream
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorDown
from genbatch.actors.runtime.supervisor import background
from genbatch.proto.service_messages import Models, ModelsRequest, StatsRequest

# The number of reported parts in each stage of loading.
_PARTS = 100
# Seconds between two looks for a moment without open requests, and seconds after which no look follows.
_LOOK_EVERY_S, _PREPARE_IN_S = 1.0, 30.0


def main() -> None:
    """Run until the parent sends Stop, or ends."""
    run_child(lambda channel: EngineProcess(channel).serve())


async def _import_model_side() -> ModuleType:
    """Import on a thread: it takes half a second, and the parent may send Stop meanwhile."""
    gc.disable()  # nothing that is imported is garbage, and scanning it takes a tenth of the time
    try:
        return await trio.to_thread.run_sync(import_module, "genbatch.actors.engine.model_side", abandon_on_cancel=True)
    finally:
        gc.enable()


async def _import_everything() -> None:
    """Import torch and transformers' modules, too."""
    await _import_model_side()
    await trio.to_thread.run_sync(import_module, "genbatch.nif.models.model", abandon_on_cancel=True)


class EngineProcess:
    """The engine process's work for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._batcher: ActorRef
        self._nursery: trio.Nursery
        self._session = trio.CancelScope()
        self._served: EngineSession | None = None  # of the connected gateway
        self._reported: tuple[str, int] = ("", 0)  # last reported stage and part of loading
        self._changes: deque[tuple[ServingChanged, trio.Event]] = deque()  # changes not sent to the parent yet

    async def serve(self) -> None:
        """Serve until the parent sends Stop, or ends.

        Raises:
            StartFault: the Batcher could not be started.
        """
        async with background() as self._nursery:
            while True:
                match await self._channel.receive():
                    case PrepareEngine(needs_torch):
                        self._nursery.start_soon(_import_everything if needs_torch else _import_model_side)
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
            side = await _import_model_side()
            self._batcher, rehearsed = await side.open_batcher(
                self._nursery, start, self._tell_progress, self._tell_models
            )
        except Exception as error:
            raise StartFault(error) from error
        models = await self._batcher.call(ModelsRequest(), timeout=None)
        stats = await self._batcher.call(StatsRequest(), timeout=None)
        set_up_garbage_collection()
        self._nursery.start_soon(keep_returning_freed_memory)
        num_bytes = resident_bytes() + stats.get("kv_bytes", 0)  # blocks are resident once they are used
        await self._tell(EngineReady(models, stats, num_bytes, rehearsed))
        await self._prepare_rest(side.prepare_rest)

    async def _prepare_rest(self, prepare: Callable[[ActorRef], None]) -> None:
        """Build what only some requests need, once no request is open.

        The work holds Python's lock for up to 0.3 s. After a crash the open requests arrive as soon as the engine is
        ready, and the work would delay them.
        """
        with suppress(ActorDown):
            with trio.move_on_after(_PREPARE_IN_S):
                while True:
                    await trio.sleep(_LOOK_EVERY_S)
                    stats = await self._batcher.call(StatsRequest(), timeout=None)
                    if not stats["requests_running"] and not stats["requests_waiting"]:
                        break
            prepare(self._batcher)

    async def _follow(self, number: int, stream: FrameStream) -> None:
        """Serve one gateway."""
        with self._session:
            self._served = session = EngineSession(self._batcher, stream)
            try:
                await session.run()
            finally:
                if self._served is session:
                    self._served = None
        await self._tell(Unjoined(number))

    def _tell_models(self, models: Models, adapters: list[AdapterSource]) -> None:
        """Tell the parent about changed models first, and then the gateway.

        The parent needs the adapters for the next engine. In the other order, a crash in between would undo a change
        that the client already knows of.
        """
        sent = trio.Event()
        self._changes.append((ServingChanged(models, adapters), sent))
        self._nursery.start_soon(self._tell_change)
        if self._served is not None:
            self._served.tell_models(models, sent)

    async def _tell_change(self) -> None:
        change, sent = self._changes.popleft()  # the oldest: tasks start in any order
        await self._tell(change)
        sent.set()

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """Report progress; runs on the event loop's thread."""
        part = _PARTS * done // total if total else 0
        if self._reported != (stage, part):
            self._reported = (stage, part)
            self._nursery.start_soon(self._tell, Loading(stage, done, total))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent has ended, which ends this process, too
            await self._channel.send(message)
