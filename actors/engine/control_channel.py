"""ControlChannel: messages between a process and the one that started it, and sockets that go with them.

A Unix socketpair; its end is the other process's end. A socket to be handed over travels with the bytes of its message.
"""

import array
import os
import socket
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec
import trio

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES = 64 * 2**10
_MAX_SOCKETS = 4  # in one read; each comes with a message of its own


class ChannelError(Exception):
    """The other process sent what is no message."""


class ControlChannel(Generic[T]):
    """One end.

    Args:
        end: is closed with the channel.
        kind: the messages that come here.
    """

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = trio.Lock()
        self._received = bytearray()
        self._sockets: list[socket.socket] = []

    async def send(self, message: object, hand_over: socket.socket | None = None) -> None:
        """Sends a message, and a socket that is closed here once it is there.

        Raises:
            OSError: the other process has ended.
        """
        payload = self._encoder.encode(message)
        data = _LENGTH.pack(len(payload)) + payload
        rights = []
        if hand_over is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [hand_over.fileno()]))]
        try:
            async with self._sending:
                # Begun is begun: half a message would make nonsense of those after it.
                with trio.CancelScope(shield=True):
                    sent = await self._socket.sendmsg([data], rights)
                    while sent < len(data):
                        sent += await self._socket.send(data[sent:])
        finally:
            if hand_over is not None:
                hand_over.close()

    async def receive(self) -> T | None:
        """The next message; None once the other process has ended.

        Raises:
            ChannelError: it sent something else.
        """
        while True:
            payload = self._take()
            if payload is not None:
                try:
                    return self._decoder.decode(payload)
                except msgspec.DecodeError as error:
                    raise ChannelError(str(error)) from error
            try:
                data, ancillary, _, _ = await self._socket.recvmsg(
                    _RECEIVE_BYTES, socket.CMSG_SPACE(_MAX_SOCKETS * array.array("i").itemsize)
                )
            except ConnectionError:
                return None
            self._accept(ancillary)
            if not data:
                return None
            self._received += data

    def take_socket(self) -> socket.socket:
        """The socket that came with the message received last."""
        return self._sockets.pop(0)

    def close(self) -> None:
        """Closes this end, and sockets that nobody took."""
        for end in self._sockets:
            end.close()
        self._socket.close()

    def _accept(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                    self._sockets.append(socket.socket(fileno=fd))

    def _take(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return payload
