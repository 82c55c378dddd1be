"""The gateway process: every address of the service, and the link to the engine process. Imports no torch.

It owns the ledger, so clients notice an engine's death by the ends of their requests at most, never by a connection's.
"""

from contextlib import suppress
from typing import Any

import trio

from genbatch.actors.batching.batcher_messages import Drain
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.engine.child_main import StartFault, run_child
from genbatch.actors.engine.control_channel import ControlChannel
from genbatch.actors.engine.control_messages import (
    DrainAndStop,
    GatewayReady,
    Hung,
    Join,
    StartGateway,
)
from genbatch.actors.engine.linked_gateways import LinkedGateways
from genbatch.actors.engine.wire_options import decode_options
from genbatch.actors.gateways.listeners import LAST_WORDS_S
from genbatch.actors.observe import observe
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.service_options import ServiceOptions


def main() -> None:
    """Runs until the parent says so, or is gone."""
    run_child(lambda channel: GatewayProcess(channel).serve())


class GatewayProcess:
    """What the process does for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._gateways: LinkedGateways
        self._nursery: trio.Nursery

    async def serve(self) -> None:
        """Returns when the parent says so, or is gone, or after a drain.

        Raises:
            StartFault: an address could not be listened at.
        """
        async with background() as self._nursery:
            while True:
                match await self._channel.receive():
                    case StartGateway() as start:
                        await self._open(start)
                    case Join() as join:
                        await self._gateways.side.send(join, self._channel.take_socket())
                    case DrainAndStop(timeout_s):
                        self._nursery.start_soon(self._drain, timeout_s)
                    case _:
                        return

    async def _open(self, start: StartGateway) -> None:
        try:
            self._gateways = LinkedGateways(
                decode_options(start.batcher_options, BatcherOptions),
                decode_options(start.service_options, ServiceOptions),
                on_hung=self._tell_hung,
            )
            await self._nursery.start(observe, self._gateways.telemetry)
            await self._nursery.start(self._gateways.supervisor.run)
        except StartFailed as failed:
            cause = failed.__cause__
            raise StartFault(cause if isinstance(cause, Exception) else failed) from failed
        except Exception as error:
            raise StartFault(error) from error
        await self._channel.send(GatewayReady(self._gateways.addresses))

    async def _drain(self, timeout_s: float) -> None:
        await self._gateways.link.call(Drain(timeout_s), timeout=None, control=True)
        await trio.sleep(LAST_WORDS_S)
        self._nursery.cancel_scope.cancel()

    def _tell_hung(self, reason: str) -> None:
        self._nursery.start_soon(self._tell, Hung(reason))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone, which ends this process, too
            await self._channel.send(message)
