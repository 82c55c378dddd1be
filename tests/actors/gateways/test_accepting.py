"""Connections are taken one a turn of the event loop, and those that have hung up in the queue not at all."""

import errno
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from genbatch.actors.gateways import accepting
from genbatch.actors.gateways.accepting import Leftovers, accept_from
from genbatch.actors.gateways.listening import as_listeners, open_sockets
from tests.actors.gateways.scripted_batcher import PATIENCE_S

pytestmark = pytest.mark.trio


@dataclass
class Door:
    """A listener that nobody accepts from yet, and what came of those who connected."""

    listeners: list[trio.SocketListener]
    connect: Callable[[], socket.socket]
    heard: list[bytes] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    async def serve(self, stream: trio.SocketStream) -> None:
        data = await stream.receive_some()
        self.heard.append(bytes(data))
        await stream.send_all(b"bye")
        self.changed.set()
        self.changed = trio.Event()

    async def until_heard(self, count: int) -> None:
        while len(self.heard) < count:
            await self.changed.wait()


@pytest.fixture(params=["unix", "tcp"])
async def door(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Door]:
    with ExitStack() as stack, trio.fail_after(PATIENCE_S):
        path = tmp_path / "s" if request.param == "unix" else None
        listeners = as_listeners(await open_sockets("tcp://127.0.0.1:0" if path is None else f"unix://{path}"))

        def connect() -> socket.socket:
            here = listeners[0].socket.getsockname()
            made = stack.enter_context(socket.socket(listeners[0].socket.family))
            made.connect(here)
            return made

        yield Door(listeners, connect)
        for listener in listeners:
            await listener.aclose()


@asynccontextmanager
async def accepting_at(door: Door) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_from, door.listeners, door.serve, nursery)
        yield
        nursery.cancel_scope.cancel()


def hang_up(connection: socket.socket) -> None:
    """At once and in both directions, with something said before."""
    connection.send(b"half a word")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, over TCP
    connection.close()


async def test_who_has_hung_up_in_the_queue_is_not_met_and_the_others_are_in_their_order(door: Door) -> None:
    for number in range(100):
        one = door.connect()
        if number % 10 == 5:
            one.send(bytes([number]))
        else:
            hang_up(one)
    async with accepting_at(door):
        await door.until_heard(10)
    assert door.heard == [bytes([number]) for number in range(5, 100, 10)]


async def test_one_a_turn_is_taken_of_those_who_are_there(door: Door) -> None:
    for _ in range(30):
        door.connect().send(b"a")
    begun: list[int] = []

    async def note(stream: trio.SocketStream) -> None:
        begun.append(turns)

    turns = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_from, door.listeners, note, nursery)
        while len(begun) < 30:
            await trio.lowlevel.checkpoint()
            turns += 1
        nursery.cancel_scope.cancel()
    assert max(Counter(begun).values()) <= 2  # a turn of ours may end between two others


async def test_who_has_said_all_they_want_to_say_is_served(door: Door) -> None:
    one = door.connect()
    one.send(b"all of it")
    one.shutdown(socket.SHUT_WR)
    async with accepting_at(door):
        await door.until_heard(1)
        assert door.heard == [b"all of it"]
        one.setblocking(False)
        await trio.lowlevel.wait_readable(one)
        assert one.recv(10) == b"bye"
        await trio.lowlevel.wait_readable(one)
        assert one.recv(10) == b"", "its connection is not closed"


async def test_clients_that_still_send_are_served_before_those_that_have_said_all(door: Door) -> None:
    for number in range(100):
        one = door.connect()
        one.send(bytes([number]))
        if number % 10 != 5:
            one.shutdown(socket.SHUT_WR)
    async with accepting_at(door):
        await door.until_heard(100)
    assert door.heard[:10] == [bytes([number]) for number in range(5, 100, 10)]
    assert door.heard[10:] == [bytes([number]) for number in range(100) if number % 10 != 5]


async def test_few_of_those_that_have_said_all_wait_and_the_others_are_closed(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "MAX_LEFTOVERS", 3)
    flood = [door.connect() for _ in range(20)]
    for one in flood:
        one.send(b"a")
        one.shutdown(socket.SHUT_WR)
    last = door.connect()
    last.send(b"last")
    async with accepting_at(door):
        await door.until_heard(4)
        assert door.heard == [b"last", b"a", b"a", b"a"]
        for one in flood[3:]:
            one.setblocking(False)
            await trio.lowlevel.wait_readable(one)
            with suppress(ConnectionError):
                assert one.recv(10) == b""


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOBUFS])
async def test_while_there_is_no_room_for_a_connection_it_waits(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    monkeypatch.setattr(accepting, "NO_ROOM_S", 0)
    left, next_of = 3, accepting._next_of

    def without_room(queue: socket.socket, leftovers: Leftovers) -> socket.socket | None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(error, "no room")
        return next_of(queue, leftovers)

    monkeypatch.setattr(accepting, "_next_of", without_room)
    door.connect().send(b"a")
    with caplog.at_level(logging.ERROR):
        async with accepting_at(door):
            await door.until_heard(1)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3


async def test_a_queue_that_is_no_more_ends_accepting(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(queue: socket.socket, leftovers: Leftovers) -> None:
        raise OSError(errno.EBADF, "no such queue")

    monkeypatch.setattr(accepting, "_next_of", fail)
    door.connect()
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await accept_from(door.listeners, door.serve, nursery)
    assert caught.group_contains(OSError, match="no such queue")
