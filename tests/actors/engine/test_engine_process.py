"""EngineProcess, without a process: what it tells its parent, and whom it serves."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from genbatch.actors.engine import engine_process
from genbatch.actors.engine.child_process import (
    AdapterSource,
    EngineReady,
    Join,
    Loading,
    ServingChanged,
    StartEngine,
    StartFault,
    StopNow,
    Unjoined,
)
from genbatch.actors.engine.engine_process import EngineProcess
from genbatch.actors.engine.link import EngineSession, FrameStream
from genbatch.actors.scheduling.plan import RehearsedStep, StepWork
from genbatch.nif.errors import ModelError
from genbatch.proto.service_messages import Models

NONE, CHANGED = Models(models=()), Models(models=())
REHEARSED = (RehearsedStep(StepWork(decodes=1, keys=1), 0.01),)
START = StartEngine(engine_options=b"", batcher_options=b"")  # type: ignore[arg-type]


class Parent:
    """The other end of the channel; implements ControlChannel."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.say, self._said = trio.open_memory_channel[Any](10)
        self.is_gone = False
        self.is_answered = trio.Event()
        self.has_room = trio.Event()
        self.has_room.set()
        self._sending = trio.Lock()

    async def receive(self) -> Any:
        return await self._said.receive()

    async def send(self, message: Any) -> None:
        async with self._sending:
            await trio.lowlevel.checkpoint()
            await self.has_room.wait()
            if self.is_gone:
                raise BrokenPipeError
            self.heard.append(message)
            self.is_answered.set()

    def take_socket(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.close()
        return theirs


class Session:
    """Stands for EngineSession: lasts until it is let go or cancelled."""

    made: "list[Session]"

    def __init__(self, batcher: Any, stream: FrameStream) -> None:
        self._stream = stream
        self.told: list[trio.Event] = []
        self.let_go = trio.Event()
        self.made.append(self)

    async def run(self) -> None:
        try:
            await self.let_go.wait()
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    def tell_models(self, models: Models, told: trio.Event) -> None:
        self.told.append(told)


class Batcher:
    """Stands for the ref of one."""

    def __init__(self) -> None:
        self.stats = {"steps": 3, "requests_running": 1, "requests_waiting": 0}

    async def call(self, message: Any, timeout: float | None) -> Any:
        await trio.lowlevel.checkpoint()
        return NONE if type(message).__name__ == "ModelsRequest" else dict(self.stats)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `open_batcher` was given, and what it raises; EngineSession and the garbage collector stand aside."""
    sides = SimpleNamespace(progress=None, models=None, fault=None, kept=0, prepared=trio.Event(), batcher=Batcher())

    async def open_batcher(nursery: Any, start: Any, progress: Any, models: Any) -> tuple[Batcher, Any]:
        sides.progress, sides.models = progress, models
        await trio.lowlevel.checkpoint()
        if sides.fault is not None:
            raise sides.fault
        return sides.batcher, REHEARSED

    def keep() -> None:
        sides.kept += 1

    def prepare_rest(batcher: Batcher) -> None:
        sides.prepared.set()

    side = SimpleNamespace(open_batcher=open_batcher, prepare_rest=prepare_rest)
    monkeypatch.setattr(engine_process, "import_module", lambda name: side)
    monkeypatch.setattr(Session, "made", [], raising=False)
    monkeypatch.setattr(engine_process, "EngineSession", Session)
    monkeypatch.setattr(engine_process, "set_up_garbage_collection", keep)
    return sides


async def started(nursery: trio.Nursery, parent: Parent) -> EngineProcess:
    process = EngineProcess(parent)  # type: ignore[arg-type]
    nursery.start_soon(process.serve)
    await parent.say.send(START)
    with trio.fail_after(100):
        await parent.is_answered.wait()  # the import is on a thread
    return process


@pytest.mark.trio
async def test_it_is_ready_with_its_models_and_stats_and_ends_when_the_parent_says_so(sides: SimpleNamespace) -> None:
    parent = Parent()
    async with trio.open_nursery() as nursery:
        await started(nursery, parent)
        [ready] = parent.heard
        assert ready == EngineReady(NONE, sides.batcher.stats, ready.num_bytes, REHEARSED) and ready.num_bytes > 0
        assert sides.kept == 1
        await parent.say.send(StopNow())


@pytest.mark.trio
@pytest.mark.parametrize("ends", [True, False])
async def test_the_rest_is_prepared_once_no_request_is_open_or_it_took_too_long(
    sides: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(engine_process, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(engine_process, "_PREPARE_IN_S", 1000.0 if ends else 0.2)
    parent = Parent()
    async with trio.open_nursery() as nursery:
        await started(nursery, parent)
        if ends:
            await trio.sleep(0.02)
            assert not sides.prepared.is_set()
            sides.batcher.stats["requests_running"] = 0
        with trio.fail_after(100):
            await sides.prepared.wait()
        await parent.say.send(StopNow())


@pytest.mark.trio
async def test_progress_is_told_once_a_hundredth_of_a_stage(sides: SimpleNamespace) -> None:
    parent = Parent()
    async with trio.open_nursery() as nursery:
        await started(nursery, parent)
        parent.heard.clear()
        for stage, done, total in (
            ("fetch", 0, 1000),
            ("fetch", 9, 1000),
            ("fetch", 10, 1000),
            ("fetch", 19, 1000),
            ("pack", 19, 1000),
            ("warm", 0, 0),
        ):
            sides.progress(stage, done, total)
            await trio.testing.wait_all_tasks_blocked()
        told = [(message.stage, message.done) for message in parent.heard if isinstance(message, Loading)]
        assert told == [("fetch", 0), ("fetch", 10), ("pack", 19), ("warm", 0)]
        parent.is_gone = True  # who is told no more does not end the process
        sides.progress("warm", 1, 1)
        await trio.testing.wait_all_tasks_blocked()
        await parent.say.send(StopNow())


@pytest.mark.trio
async def test_one_gateway_is_served_at_a_time_and_it_and_the_parent_hear_of_other_models(
    sides: SimpleNamespace,
) -> None:
    parent = Parent()
    async with trio.open_nursery() as nursery:
        await started(nursery, parent)
        parent.heard.clear()
        sides.models(CHANGED, [])  # before there is a gateway
        await parent.say.send(Join(1, NONE))
        await trio.testing.wait_all_tasks_blocked()
        sides.models(CHANGED, [])
        await parent.say.send(Join(2, NONE))  # replaces the first
        await trio.testing.wait_all_tasks_blocked()
        assert parent.heard == [ServingChanged(CHANGED, []), ServingChanged(CHANGED, []), Unjoined(1)]
        sides.models(CHANGED, [])
        first, second = Session.made
        assert len(first.told) == len(second.told) == 1
        second.let_go.set()
        await trio.testing.wait_all_tasks_blocked()
        assert parent.heard[3:] == [ServingChanged(CHANGED, []), Unjoined(2)]
        sides.models(CHANGED, [])
        assert len(second.told) == 1
        await parent.say.send(StopNow())


@pytest.mark.trio
async def test_the_parent_hears_of_changes_in_their_order_and_the_gateway_when_it_has(sides: SimpleNamespace) -> None:
    parent = Parent()
    async with trio.open_nursery() as nursery:
        await started(nursery, parent)
        parent.heard.clear()
        await parent.say.send(Join(1, NONE))
        await trio.testing.wait_all_tasks_blocked()
        parent.has_room = trio.Event()
        changes = [[AdapterSource(str(number), "p", "d")] for number in range(12)]
        for adapters in changes:
            sides.models(CHANGED, adapters)
        await trio.testing.wait_all_tasks_blocked()
        [session] = Session.made
        assert not any(told.is_set() for told in session.told)
        parent.has_room.set()
        await trio.testing.wait_all_tasks_blocked()
        assert parent.heard == [ServingChanged(CHANGED, adapters) for adapters in changes]
        assert all(told.is_set() for told in session.told) and len(session.told) == 12
        await parent.say.send(StopNow())


class Silent:
    """Stands for the ref of a Batcher that never answers."""

    async def call(self, message: Any, **options: Any) -> Any:
        await trio.sleep_forever()


@pytest.mark.trio
async def test_nothing_reaches_the_gateway_after_a_change_before_the_parent_was_told() -> None:
    ours, theirs = socket.socketpair()
    gateway, told = FrameStream(ours), trio.Event()
    session = EngineSession(Silent(), FrameStream(theirs))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        await trio.testing.wait_all_tasks_blocked()
        session.tell_models(NONE, told)
        with trio.move_on_after(0.05) as waited:
            await gateway.receive()
        assert waited.cancelled_caught, "were the engine killed now, the change would be undone"
        told.set()
        with trio.fail_after(100):
            assert await gateway.receive() is not None
        await gateway.aclose()


@pytest.mark.trio
async def test_what_keeps_the_batcher_from_starting_ends_the_process(sides: SimpleNamespace) -> None:
    sides.fault = ModelError("m", "no such model")
    parent = Parent()
    await parent.say.send(START)
    with pytest.raises(StartFault, match="no such model") as caught:
        await EngineProcess(parent).serve()  # type: ignore[arg-type]
    assert caught.value.error is sides.fault and not parent.heard
