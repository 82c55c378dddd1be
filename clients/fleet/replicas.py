"""Replicas: where a gateway's replicas come from. Ray is one place (ray_replicas); tests have another.

A ReplicaConnection is a gateway's way to one of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import trio

from genbatch.actors.batcher.messages import Embedded
from genbatch.clients.interface import ClientClosed, embed_for, generate_for
from genbatch.clients.remote import RemoteClient, Retry
from genbatch.clients.transports import Transport
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import Unauthenticated, Unavailable
from genbatch.proto.messages import (
    EmbedRequest,
    GenerateRequest,
    Result,
    ScoreRequest,
    Token,
)

# Seconds of silence after which a replica counts as gone while it has calls.
SILENCE_S = 5.0


class ReplicaConnection:
    """Implements the fleet's `Connection`. Use it inside `async with`.

    Args:
        transport: carries the messages, over ZeroMQ.
    """

    def __init__(self, transport: Transport, timeout: float = SILENCE_S) -> None:
        # What is tried again, and where, is the fleet's decision.
        self._client = RemoteClient(transport, timeout=timeout, retry=Retry(max_attempts=1))

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def generate(self, request: GenerateRequest, on_token: Callable[[Token], None] | None) -> Result:
        """See `Connection`."""
        with _unavailable_once_closed():
            return await generate_for(self._client, request, on_token)

    async def embed(self, request: EmbedRequest | ScoreRequest) -> Embedded:
        """See `Connection`."""
        with _unavailable_once_closed():
            vectors, prompt_tokens = await embed_for(self._client, request)
        return Embedded(vectors=vectors, prompt_tokens=prompt_tokens)

    async def ask(self, request: msgspec.Struct) -> Any:
        """See `Connection`."""
        with _unavailable_once_closed():
            return await self._client.ask(request)


@contextmanager
def _unavailable_once_closed() -> Iterator[None]:
    """A replica that is let go takes its connection along, under requests that were just about to be sent."""
    try:
        yield
    except Unauthenticated as error:  # our fault or the replica's, never the client's
        raise Unavailable(str(error)) from error
    except (trio.ClosedResourceError, ClientClosed) as error:
        raise Unavailable("the connection to the replica was closed") from error


class RayUnavailable(OptionError):
    """Ray is not installed, or not reachable."""

    def __init__(self, reason: str) -> None:
        super().__init__("replicas", reason)


class Described(msgspec.Struct, frozen=True):
    """What a replica says of itself.

    Args:
        life: another one each time it is started.
        address: where it listens.
        pids: its supervisor's, gateway's and engine's process ids.
        server_key: its public key, in Z85, where it listens on a network.
    """

    life: str
    address: str
    pids: tuple[int, ...]
    server_key: str | None


class Replicas(Protocol):
    """Makes, finds and ends replicas; a replica's name ends with a space and its index."""

    async def settle(self) -> None:
        """Finds the version that is wanted among those that are there, or makes it a new one, the latest."""

    async def names(self) -> list[str]:
        """The fleet's replicas, of all versions, by version and index."""
        ...

    async def create(self, index: int) -> str:
        """Makes the replica of the wanted version with this index, unless it is there; its name."""
        ...

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        """What the replica says of itself, once it is ready; None if it is not within `timeout_s`, or gone.

        Raises:
            RayUnavailable: it cannot be started; the message says why.
        """
        ...

    def connect(self, described: Described) -> ReplicaConnection:
        """The way to a replica."""
        ...

    async def end(self, name: str) -> None:
        """Ends a replica for good."""

    def is_ours(self, name: str) -> bool:
        """Whether a replica has the version that is wanted."""
        ...

    def is_superseded(self, names: list[str]) -> bool:
        """Whether there is a later version than the one that is wanted."""
        ...
