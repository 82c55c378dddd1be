"""BoundedStream: a connection whose peer must read what it is sent."""

import trio

# Seconds in which a client must make room for the next part. Without this bound one that stops reading, and stays,
# would hold its task for ever: hypercorn shields what it sends from cancellation.
STALLED_S = 10.0


class BoundedStream(trio.abc.HalfCloseableStream):
    """A socket's stream that is closed when a part cannot be sent in time.

    Args:
        stream: the connection.
        stalled_s: seconds for each part.
    """

    def __init__(self, stream: trio.SocketStream, stalled_s: float = STALLED_S) -> None:
        self._stream = stream
        self._stalled_s = stalled_s
        self.closed = trio.Event()

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket, for the addresses of both ends."""
        return self._stream.socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises:
        trio.BrokenResourceError: the peer does not read, or has gone.
        """
        with trio.move_on_after(self._stalled_s) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            await trio.aclose_forcefully(self)  # whoever waits to receive is told too
            raise trio.BrokenResourceError("the peer does not read")

    async def wait_send_all_might_not_block(self) -> None:
        """As the stream's."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As the stream's."""
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """As the stream's."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As the stream's."""
        self.closed.set()
        await self._stream.aclose()
