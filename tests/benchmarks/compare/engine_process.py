"""EngineProcess: an engine that is asked by command, in a process of its own.

engine = EngineProcess("llama.cpp Q4_0", [python, "-m", "tests.benchmarks.compare.llama_engine", ...])
with engine.running():
    print(engine.call("decode", prompts=prompts, steps=64, copies=False))
engine.close()
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.compare.process_group import ProcessGroup


class EngineFailed(Exception):
    """An engine ended; the message has the end of its log."""


class EngineProcess(ProcessGroup):
    """A running engine; it is held up until `running` is entered.

    Args:
        name: what the tables call it.
        command: starts it; its first line of output is a reply that describes it.
        environment: variables beside those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        super().__init__(command, environment)
        self.name = name
        try:
            self.described = self._reply()
        except BaseException:
            self.close()
            raise
        self.stop()

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The reply to a command; it must be running.

        Raises:
            EngineFailed: it ended instead.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"{self.name}: {self.last_words()}") from None
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise EngineFailed(f"{self.name}: {self.last_words()}")
        reply: dict[str, Any] = json.loads(line)
        return reply
