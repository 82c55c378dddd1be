"""CommandLines: an engine's end of its pipe: JSON commands in, a line each; one JSON reply to each.

Needs the standard library only, because it runs in the peers' environment too. Whatever else prints to standard output,
from Python or from C, goes to standard error instead.
"""

import json
import os
from collections.abc import Callable
from typing import Any

Handlers = dict[str, Callable[..., dict[str, Any]]]


class CommandLines:
    """Standard input and output of an engine process."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._received = b""

    def fileno(self) -> int:
        """For pollers: readable when a command is there."""
        return 0

    def receive(self) -> list[dict[str, Any]]:
        """The commands that have come, waiting for the first bytes.

        Raises:
            EOFError: there will be no more.
        """
        data = os.read(0, 1 << 20)
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def reply(self, value: dict[str, Any]) -> None:
        """Answers a command, or says that the engine is ready."""
        self._replies.write(json.dumps(value) + "\n")
        self._replies.flush()

    def serve(self, handlers: Handlers) -> None:
        """Answers until there are no more commands."""
        while True:
            try:
                commands = self.receive()
            except EOFError:
                return
            for command in commands:
                self.reply(handlers[command.pop("do")](**command))
