"""ServiceProcess: `genbatch serve` as a user starts it, reached over ZeroMQ."""

import sys
from collections.abc import Sequence

import trio

from genbatch import ZeroMQClient
from genbatch.proto.errors import Unavailable
from tests.benchmarks.compare.engine_process import EngineFailed
from tests.benchmarks.compare.process_group import ProcessGroup
from tests.benchmarks.compare.sigterm import run_trio

_START_S = 180.0
_GENBATCH = "from genbatch.clients.cli.main import main; main()"


class ServiceProcess(ProcessGroup):
    """A running service; it is held up until `running` is entered.

    Args:
        name: what the tables call it.
        address: where it listens.
        flags: of `genbatch serve`, beside the address.
    """

    def __init__(self, name: str, address: str, flags: Sequence[str]) -> None:
        super().__init__([sys.executable, "-c", _GENBATCH, "serve", "--bind", address, *flags])
        self.name = name
        self.address = address
        try:
            run_trio(self._answers)
        except BaseException:
            self.close()
            raise
        self.stop()

    async def _answers(self) -> None:
        with trio.move_on_after(_START_S):
            while self.process.poll() is None:
                try:
                    async with ZeroMQClient(self.address, timeout=2.0) as client:
                        await client.models()
                        return
                except Unavailable:
                    await trio.sleep(0.2)
        raise EngineFailed(f"{self.name}: {self.last_words()}")
