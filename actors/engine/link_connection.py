"""LinkConnection: a gateway's side of the link to one engine: a task that moves frames."""

import logging
from collections.abc import Callable

import trio

from genbatch.actors.engine.frame_stream import FrameStream
from genbatch.actors.engine.link_messages import LinkError, ToEngine, ToGateway, decode_for_gateway, encode_frame

logger = logging.getLogger(__name__)


class LinkConnection:
    """One engine's link, from its start to its end.

    Args:
        stream: closed at the end.
        receive: called with this connection and the messages of each frame, and with None at the end, once.
    """

    def __init__(
        self, stream: FrameStream, receive: "Callable[[LinkConnection, list[ToGateway] | None], None]"
    ) -> None:
        self.epoch = 0  # for who receives
        self.fault: LinkError | None = None  # why nothing more of it is believed
        self._stream = stream
        self._receive = receive
        self._outbox: list[ToEngine] = []
        self._news = trio.Event()
        self._scope = trio.CancelScope()

    def post(self, message: ToEngine) -> None:
        """Sends a message with those of this turn of the event loop; what waits is bounded by the ledger."""
        self._outbox.append(message)
        self._news.set()

    def close(self) -> None:
        """Ends it: the engine will see."""
        self._scope.cancel()

    async def run(self) -> None:
        """Returns when the engine or `close` has ended it."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()
            self._receive(self, None)

    async def _read(self) -> None:
        """Until the engine's end closes, even after a fault: if ours did, that one would ask for a new link."""
        while (frame := await self._stream.receive()) is not None:
            if self.fault is not None:
                continue
            messages: list[ToGateway] = []
            try:
                messages = decode_for_gateway(frame)
            except LinkError as error:
                self.fault = error
            self._receive(self, messages)

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            frame = encode_frame(self._outbox)
            self._outbox.clear()
            try:
                await self._stream.send(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # what the engine sent before its end is still read
