"""What the main functions of a service's processes have in common."""

import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from genbatch.actors.engine.control_channel import ControlChannel
from genbatch.actors.engine.control_messages import ToChild
from genbatch.actors.engine.parent_death import die_with_parent, leave_signals_to_parent
from genbatch.actors.engine.start_errors import to_message
from genbatch.actors.log_lines import start_logging

logger = logging.getLogger(__name__)


class StartFault(Exception):
    """The process does not get ready, and whoever started it is to be told why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_child(serve: Callable[[ControlChannel[Any]], Awaitable[None]]) -> None:
    """Runs `serve` over the channel that ChildProcess has opened, and ends the process."""
    leave_signals_to_parent()
    die_with_parent(int(sys.argv[2]))
    start_logging()
    try:
        code = trio.run(_serve, serve, socket.socket(fileno=int(sys.argv[1])))
    except BaseException:
        logger.critical("the process fails", exc_info=True)
        code = 1
    # A step that hangs, or a load that goes on, holds a thread that the interpreter would wait for.
    logging.shutdown()
    os._exit(code)


async def _serve(serve: Callable[[ControlChannel[Any]], Awaitable[None]], end: socket.socket) -> int:
    channel: ControlChannel[Any] = ControlChannel(end, ToChild)
    try:
        await serve(channel)
    except StartFault as fault:
        await channel.send(to_message(fault.error))
        return 1
    return 0
