"""Joint: each end of a socketpair has an owner or is closed, and a gateway is told how the last engine has ended."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from genbatch.actors.engine.child_process import ChildProcess, Join, ProcessDied, StartEngine
from genbatch.actors.service import processes
from genbatch.actors.service.processes import EngineRunner, Joint
from genbatch.proto.service_messages import Models

pytestmark = pytest.mark.trio


class Stuck:
    """A side that takes nothing, as one that is being stopped."""

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        try:
            await trio.sleep_forever()
        finally:
            hand_over.close()


class Gone:
    async def send(self, message: Join, hand_over: socket.socket) -> None:
        hand_over.close()
        raise BrokenPipeError


class Kept:
    """A side that keeps what it gets."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.joins: list[Join] = []
        self.came = trio.Event()  # replaced at each message

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        self.ends.append(hand_over)
        self.joins.append(message)
        self.came.set()
        self.came = trio.Event()


@pytest.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The ends of all socketpairs but the event loop's own."""
    ends: list[socket.socket] = []
    whole = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        one, other = whole()
        ends.extend((one, other))
        return one, other

    monkeypatch.setattr(socket, "socketpair", pair)
    return ends


async def test_a_join_that_is_cancelled_leaves_no_socket_open(made: list[socket.socket]) -> None:
    joint = Joint()
    await joint.gateway_is_ready(Kept())
    with trio.CancelScope() as scope:
        scope.cancel()
        await joint.engine_is_ready(Stuck(), Models(models=()))
    assert scope.cancelled_caught
    assert [end.fileno() for end in made] == [-1, -1]


async def test_a_side_that_is_gone_does_not_keep_the_other_from_its_end(made: list[socket.socket]) -> None:
    joint, gateway = Joint(), Kept()
    await joint.gateway_is_ready(gateway)
    await joint.engine_is_ready(Gone(), Models(models=()))
    [end] = gateway.ends
    with end:
        assert end.recv(1) == b""  # it sees at once that nobody is there
    assert all(one.fileno() == -1 for one in made)


def by_signal(number: signal.Signals) -> Callable[[EngineRunner], None]:
    """Return a function that ends the runner's engine as someone else on this machine would."""

    def end(runner: EngineRunner) -> None:
        assert runner.pid is not None
        os.kill(runner.pid, number)

    return end


@pytest.mark.parametrize(
    ("end", "oom_kills", "was_killed"),
    [
        pytest.param(by_signal(signal.SIGKILL), [3, 3], True, id="from outside"),
        pytest.param(by_signal(signal.SIGKILL), [3, 4], False, id="for its memory"),
        pytest.param(by_signal(signal.SIGKILL), [None, None], False, id="nobody knows"),
        pytest.param(by_signal(signal.SIGABRT), [3, 3], False, id="a crash"),
        pytest.param(lambda runner: runner.kill("it hangs"), [3, 3], False, id="a hang"),
    ],
)
async def test_the_gateway_is_told_once_whether_the_last_engine_was_killed_from_outside(
    end: Callable[[EngineRunner], None],
    oom_kills: list[int | None],
    was_killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # the child imports from the tests
    counts = iter([*oom_kills, oom_kills[-1]])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    joint, gateway = Joint(), Kept()
    await joint.gateway_is_ready(gateway)
    start = StartEngine(msgspec.Raw(b"\x80"), msgspec.Raw(b"\x80"))
    runner = EngineRunner(
        start, joint, lambda *_: None, lambda: ChildProcess("engine", "tests.actors.engine.ready_at_once")
    )
    came = gateway.came
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live_and_die, runner)
        await came.wait()
        end(runner)
    came = gateway.came
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live_and_die, runner)
        await came.wait()
        await joint.unjoined(gateway.joins[-1].number)  # a new link to the same engine
        nursery.cancel_scope.cancel()
    assert [join.was_killed for join in gateway.joins] == [False, was_killed, False]
    for one in gateway.ends:
        one.close()


async def live_and_die(runner: EngineRunner) -> None:
    with pytest.raises(ProcessDied):
        await runner.run()
