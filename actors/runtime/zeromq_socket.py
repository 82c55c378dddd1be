"""ZeroMQSocket: a pyzmq socket for trio that loses and duplicates nothing when a waiting task is cancelled.

    async with open_socket(zmq.DEALER) as socket:
        socket.connect("ipc:///run/genbatch/socket")
        await socket.send([b"hello"])
        parts = await socket.recv()

A ZeroMQ socket's file descriptor is edge-triggered and signals "some event", which every send and receive may consume.
So one task per socket waits for the descriptor, and each operation reads the socket's events again at its end.
"""

import ctypes
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import trio
import zmq

T = TypeVar("T")
Frames = list[bytes]

# Per socket, in each direction; messages beyond it wait at their sender, where they are counted.
HIGH_WATER_MARK = 256
# Milliseconds. A connection that does not speak ZeroMQ, or has gone silent, is dropped.
HANDSHAKE_IVL = 5000
# Neither end may drop the other for a standstill of some seconds, of a machine that sleeps or swaps. A process that
# dies is noticed at once without heartbeats, and calls of a silent client by its lease.
HEARTBEAT_IVL, HEARTBEAT_TIMEOUT, HEARTBEAT_TTL = 1000, 10_000, 10_000


# The most messages of ignored clients that are dropped at once, some milliseconds.
_MAX_DROPPED = 4096
# Plain numbers: pyzmq's members of enums take longer to pass on.
_NOBLOCK, _SRCFD = int(zmq.NOBLOCK), int(zmq.SRCFD)


class Signed(NamedTuple):
    """A message and its sender, as ZeroMQ knows it.

    Args:
        user_id: the user id that a ZAP handler gave the client at its handshake; "" without a handler.
        connection: file descriptor of its connection; None if ZeroMQ does not know it, for example if the connection
            ended before ZeroMQ had looked at the message.
        parts: the frames.
    """

    user_id: str
    connection: int | None
    parts: Frames


class ZeroMQSocket:
    """One socket and the tasks that wait for it; made by `open_socket`.

    `send`, `recv` and `recv_many` may be cancelled at any time: either the message passed and the call returned, or
    it did not and the call raised Cancelled. All of it is for the event loop's thread.

    Attributes:
        ignored: identities of clients; `recv_many_signed` drops their messages.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._is_router = socket.TYPE == zmq.ROUTER
        self._has_user_ids = False
        self._receivers = trio.lowlevel.ParkingLot()
        self._senders = trio.lowlevel.ParkingLot()
        self._closed = False
        self.ignored: dict[bytes, None] = {}
        self._dropped = (0, 0)

    @property
    def context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        """The context it was made in."""
        return self._socket.context

    def set(self, option: int, value: Any) -> None:
        """Set a ZeroMQ option; most options must be set before `bind` and `connect`."""
        self._socket.setsockopt(option, value)
        if option == zmq.CURVE_SERVER:
            self._has_user_ids = True  # of others it would be the peer's own claim

    def bind(self, address: str) -> str:
        """Listen at an address; return it, with the chosen port for a port of 0 or "*"."""
        self._socket.bind(address)
        last = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        return last.rstrip(b"\0").decode()

    def unbind(self, address: str) -> None:
        """Stop listening at an address that `bind` returned, and end the connections through that address."""
        self._socket.unbind(address)

    def connect(self, address: str) -> None:
        """Connect in the background, now and whenever the connection is lost."""
        self._socket.connect(address)

    def monitor(self, events: int) -> "zmq.Socket[bytes]":
        """Return a socket that receives a message for each of `events`, such as zmq.EVENT_DISCONNECTED.

        Use `monitored`, unless the process ends with the monitor: libzmq blocks if the monitor is not read.
        """
        monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
        return monitor

    def stop_monitor(self) -> None:
        """End the monitor's messages."""
        if not self._closed:
            self._socket.disable_monitor()

    async def recv(self) -> Frames:
        """Return the next message's frames.

        Raises:
            trio.ClosedResourceError: the socket was closed.
        """
        return await self._operate(self._recv_now, self._receivers, zmq.POLLIN)

    async def recv_many(self, max_messages: int) -> list[Frames]:
        """Wait for a message, and return it with the messages behind it, `max_messages` at most; raises as `recv`."""
        return await self._operate(partial(_take, self._recv_now, max_messages), self._receivers, zmq.POLLIN)

    async def recv_many_signed(self, max_messages: int, max_bytes: int) -> list["Signed"]:
        """Receive as `recv_many`, with the sender of each message; for sockets that others connect to.

        Returns fewer messages, or none, if ignored clients have sent many.

        Args:
            max_bytes: stops after the message with which the messages have this many bytes.
        """
        take = partial(self._recv_many_signed_now, max_messages, max_bytes)
        return await self._operate(take, self._receivers, zmq.POLLIN)

    def take_dropped(self) -> tuple[int, int]:
        """Return the frames and the bytes of ignored clients since the last call."""
        dropped, self._dropped = self._dropped, (0, 0)
        return dropped

    def try_recv_many(self, max_messages: int) -> list[Frames]:
        """Return the messages that are there now, `max_messages` at most; none once the socket was closed."""
        if self._closed or not self._events() & zmq.POLLIN:
            return []
        try:
            return _take(self._recv_now, max_messages)
        except zmq.Again:
            return []
        finally:
            self._dispatch()

    def has_messages(self) -> bool:
        """Return whether a message could be received now."""
        if self._closed:
            return False
        try:
            return bool(self._events() & zmq.POLLIN)
        finally:
            self._dispatch()  # looking may have eaten the descriptor's edge

    async def send(self, parts: Sequence[bytes]) -> None:
        """Hand a message to ZeroMQ; wait while the peers' queues are full.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            zmq.ZMQError: with errno EHOSTUNREACH, a ROUTER has no such peer.
        """
        await self._operate(lambda: self._send_now(parts), self._senders, zmq.POLLOUT)

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """Hand a message to ZeroMQ without waiting; return whether ZeroMQ took it.

        Raises: as `send` does.
        """
        try:
            return self.try_send_unsettled(parts)
        finally:
            self._dispatch()

    def try_send_unsettled(self, parts: Sequence[bytes]) -> bool:
        """Send as `try_send`, several messages in a row; call `settle` after them, before any await."""
        self._check_open()
        try:
            self._send_now(parts)
        except zmq.Again:
            return False
        return True

    def settle(self) -> None:
        """Wake the tasks that can continue after the sent messages."""
        self._dispatch()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; waiting tasks get ClosedResourceError, unsent messages have `linger_ms` to leave."""
        if self._closed:
            return
        self._closed = True
        trio.lowlevel.notify_closing(self._fd)
        self._receivers.unpark_all()
        self._senders.unpark_all()
        self._socket.disable_monitor()
        self._socket.close(linger_ms)

    async def pump(self) -> None:
        """Wake the waiting tasks; this task alone waits for the file descriptor."""
        try:
            while not self._closed:
                self._dispatch()
                await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            return

    def _dispatch(self) -> None:
        """Wake the tasks that can continue; each operation calls this, since it may consume the descriptor's edge."""
        if self._closed:
            return
        events = self._events()
        if events & zmq.POLLIN:
            self._receivers.unpark()  # one: it dispatches again once it has its message
        if self._is_router or events & zmq.POLLOUT:
            # A ROUTER's POLLOUT may be another peer's than the one that a task waits for.
            self._senders.unpark_all()

    async def _operate(self, operation: Callable[[], T], lot: trio.lowlevel.ParkingLot, event: int) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()  # never between taking a message and returning it
        while True:
            self._check_open()
            try:
                result = operation()
            except zmq.Again:
                await self._park(lot, event)
            except zmq.ZMQError:
                self._dispatch()
                raise
            else:
                self._dispatch()
                return result

    async def _park(self, lot: trio.lowlevel.ParkingLot, event: int) -> None:
        """Wait for the turn, unless the failed operation itself has made room by letting ZeroMQ work."""
        events = self._events()
        if lot is not self._receivers and events & zmq.POLLIN:
            self._receivers.unpark()
        if lot is not self._senders and (self._is_router or events & zmq.POLLOUT):
            self._senders.unpark_all()
        if events & event and not (self._is_router and event == zmq.POLLOUT):
            await trio.lowlevel.checkpoint()
            return
        await lot.park()  # raises Cancelled only if it was not woken, so no wake-up is lost

    def _events(self) -> int:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _recv_now(self) -> Frames:
        parts: Frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return parts

    def _recv_signed_now(self, identity: bytes) -> "Signed":
        # `more` of a frame costs a tenth of getsockopt(RCVMORE), and only one frame needs to be an object.
        frame = self._socket.recv(_NOBLOCK, False)
        connection = _property(frame, _SRCFD)
        user_id = str(_property(frame, "User-Id") or "") if self._has_user_ids else ""
        parts = [identity, frame.bytes]
        while frame.more:
            frame = self._socket.recv(_NOBLOCK, False)
            parts.append(frame.bytes)
        return Signed(user_id, None if connection is None else int(connection), parts)

    def _recv_many_signed_now(self, max_messages: int, max_bytes: int) -> list["Signed"]:
        receive, messages, num_dropped = self._socket.recv, [], 0
        try:
            while num_dropped < _MAX_DROPPED:
                identity = receive(_NOBLOCK)
                if identity in self.ignored:
                    self._drop()
                    num_dropped += 1
                    continue
                messages.append(message := self._recv_signed_now(identity))
                max_bytes -= sum(map(len, message.parts))
                if len(messages) == max_messages or max_bytes <= 0:
                    break
        except zmq.Again:
            if not messages and not num_dropped:
                raise
        return messages

    def _drop(self) -> None:
        """Take the frames behind an identity."""
        num_frames, num_bytes = self._dropped
        has_more = True
        while has_more:
            frame = self._socket.recv(_NOBLOCK, False)
            num_frames, num_bytes, has_more = num_frames + 1, num_bytes + len(frame), frame.more
        self._dropped = num_frames, num_bytes

    def _send_now(self, parts: Sequence[bytes]) -> None:
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the ZeroMQ socket was closed")


def _property(frame: zmq.Frame, name: int | str) -> int | str | None:
    """Return a property of a frame's connection; None if ZeroMQ does not have the property."""
    try:
        value: int | str = frame.get(name)
    except zmq.ZMQError:  # EINVAL
        return None
    return value


def _take(take_one: Callable[[], T], max_messages: int) -> list[T]:
    """Take one message, or zmq.Again, and the messages behind it."""
    messages = [take_one()]
    try:
        while len(messages) < max_messages:
            messages.append(take_one())
    except zmq.Again:
        pass
    return messages


def set_defaults(socket: "zmq.Socket[bytes]") -> None:
    """Set the options that the sockets of both ends have: short queues, and heartbeats against silent peers."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_IVL)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_IVL)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL)


@asynccontextmanager
async def open_socket(kind: int, *, linger_ms: int = 0) -> AsyncIterator[ZeroMQSocket]:
    """Open a socket in a separate ZeroMQ context, and close it when the body ends.

    Args:
        kind: zmq.ROUTER, zmq.DEALER, ...
        linger_ms: how long the end waits for unsent messages to leave.
    """
    context = zmq.Context()
    # libzmq numbers a ROUTER's clients from rand() on, and seeds it nowhere: the first was 0x6b8b4567 in every process.
    # A peer may claim a number as its identity, and the client that gets this number makes libzmq abort the process.
    # guard: numbers of clients
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))
    raw = context.socket(kind)
    set_defaults(raw)
    try:
        async with pumped(raw, linger_ms=linger_ms) as socket:
            yield socket
    finally:
        if linger_ms:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(context.term)
        else:
            context.term()


@asynccontextmanager
async def pumped(raw: "zmq.Socket[bytes]", *, linger_ms: int = 0) -> AsyncIterator[ZeroMQSocket]:
    """Make a pyzmq socket usable on trio while the body runs, then close it."""
    socket = ZeroMQSocket(raw)
    # No nursery: its group would wrap what the body raises, and last messages are sent while all else is cancelled.
    trio.lowlevel.spawn_system_task(socket.pump, name="zeromq pump")
    try:
        yield socket
    finally:
        socket.close(linger_ms)


@asynccontextmanager
async def monitored(socket: ZeroMQSocket, events: int) -> AsyncIterator[ZeroMQSocket]:
    """Open a socket that receives a message for each of `events` of another socket while the body runs."""
    async with pumped(socket.monitor(events)) as monitor:
        try:
            yield monitor
        finally:
            socket.stop_monitor()
