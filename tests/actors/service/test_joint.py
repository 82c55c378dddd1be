"""The socketpairs of a Joint: whatever happens while they are handed over, each end is somebody's or closed."""

import socket

import pytest
import trio

from genbatch.actors.engine.child_process import Join
from genbatch.actors.service.processes import Joint
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

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        self.ends.append(hand_over)


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
