"""ZeroMQGuard: who gets a connection to the ZeroMQ gateway, how many there are, and which have ended.

async with open_guard(socket, keys) as guard:
    address = socket.bind(...)
    nursery.start_soon(guard.run, on_ended)
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from genbatch.actors.gateways.connection_limit import max_connections
from genbatch.actors.gateways.curve_keys import ServerKeys
from genbatch.actors.gateways.zap_handler import ZAPHandler, open_zap_handler
from genbatch.actors.gateways.zeromq_connections import EVENTS, ZeroMQConnections
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, monitored

OnEnded = Callable[[list[int]], None]


class ZeroMQGuard:
    """Stands at one listening socket; made by `open_guard`.

    Args:
        connections: of the socket.
        keys: None lets everybody in who can reach the address.
        zap: answers for `keys`.
    """

    def __init__(self, connections: ZeroMQConnections, keys: ServerKeys | None, zap: ZAPHandler | None) -> None:
        self.connections = connections
        self._keys = keys
        self._zap = zap

    @property
    def asks_for_keys(self) -> bool:
        """Whether messages carry the key of who sent them."""
        return self._keys is not None

    def is_welcome(self, key: str) -> bool:
        """Whether a key, in Z85, is still on the list; true of everybody where no keys are asked for."""
        return self._keys is None or self._keys.client_name(key) is not None

    def tenant(self, key: str) -> str | None:
        """In whose name the owner of a key calls: "" if it is not on the list; None where no keys are asked for."""
        return None if self._keys is None else self._keys.client_name(key) or ""

    async def run(self, on_ended: OnEnded) -> None:
        """Stands there until cancelled; `on_ended` gets the file descriptors of connections that have ended."""
        async with trio.open_nursery() as nursery:
            if self._zap is not None:
                nursery.start_soon(self._zap.run)
            while True:
                on_ended(await self.connections.changed())


@asynccontextmanager
async def open_guard(socket: ZeroMQSocket, keys: ServerKeys | None) -> AsyncIterator[ZeroMQGuard]:
    """Puts a guard at a ROUTER that is not bound yet.

    Args:
        keys: the service's own and its clients'; None lets everybody in who can reach the address.
    """
    async with AsyncExitStack() as stack:
        monitor = await stack.enter_async_context(monitored(socket, EVENTS))
        zap = await stack.enter_async_context(open_zap_handler(socket, keys)) if keys is not None else None
        yield ZeroMQGuard(ZeroMQConnections(monitor, max_connections()), keys, zap)
