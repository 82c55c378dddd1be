"""FrameStream: length-prefixed frames over a Unix socket; its end is the other process's end."""

import socket
import struct
from typing import Final

import trio

_LENGTH: Final = struct.Struct("<I")
# More than any result that is sent; what claims to be longer is no frame of ours.
MAX_FRAME_BYTES = 2**30
_RECEIVE_BYTES = 64 * 2**10


class FrameStream:
    """One end of a socketpair, for one task that receives and one that sends.

    Args:
        end: is closed with the stream.
    """

    def __init__(self, end: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        self._received = bytearray()

    async def receive(self) -> bytes | None:
        """The next frame; None once the other end is closed.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: this end is.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError:  # reset: it died with data of ours unread
                return None
            if not data:
                return None
            self._received += data

    async def send(self, frame: bytes) -> None:
        """Sends a frame; returns once the kernel has all of it.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: one of the ends is closed.
        """
        assert len(frame) <= MAX_FRAME_BYTES, len(frame)
        await self._stream.send_all(_LENGTH.pack(len(frame)) + frame)

    async def aclose(self) -> None:
        """Closes this end."""
        await self._stream.aclose()

    def _take(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise trio.BrokenResourceError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            frame = bytes(view[_LENGTH.size : end])
        del self._received[:end]
        return frame
