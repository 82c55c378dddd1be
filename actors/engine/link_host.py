"""LinkHost: runs the connections of an EngineLink, in the process where the gateways are."""

import socket
from contextlib import suppress

import trio

from genbatch.actors.engine.control_messages import Join
from genbatch.actors.engine.frame_stream import FrameStream
from genbatch.actors.engine.link_connection import LinkConnection
from genbatch.actors.engine.link_events import LinkFrame, LinkUp
from genbatch.actors.engine.link_messages import ToGateway
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorDown


class LinkHost:
    """The gateways' side of a Joint; `run` is a child for a supervisor.

    Args:
        link: who is told.
    """

    def __init__(self, link: ActorRef) -> None:
        self._link = link
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # it takes no new tasks

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Takes the gateways' end of a new link."""
        if self._nursery is None:
            hand_over.close()
        else:
            connection = LinkConnection(FrameStream(hand_over), self._receive)
            self._nursery.start_soon(connection.run)
            with suppress(ActorDown):
                self._link.info(LinkUp(connection, message.models), control=True)
        await trio.lowlevel.checkpoint()  # last: the socket is somebody's by now

    def _receive(self, connection: LinkConnection, messages: list[ToGateway] | None) -> None:
        with suppress(ActorDown):
            self._link.info(LinkFrame(connection, messages), control=True)
