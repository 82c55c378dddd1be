"""Replicas: the interface for creating and finding replicas. Ray is one implementation (ray_replicas).

A ReplicaConnection is a gateway's connection to one replica.
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
    DrawnTokens,
    EmbedRequest,
    GenerateRequest,
    Result,
    ScoreRequest,
    Token,
)

# The timeout in seconds after which a silent replica with open calls counts as gone.
SILENCE_S = 5.0


class ReplicaConnection:
    """Implements the fleet's `Connection`. Use it inside `async with`.

    Args:
        transport: carries the messages, over ZeroMQ.
    """

    def __init__(self, transport: Transport, timeout: float = SILENCE_S) -> None:
        # No retry here: the fleet decides about retries and their replica.
        self._client = RemoteClient(transport, timeout=timeout, retry=Retry(max_attempts=1))

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def generate(
        self,
        request: GenerateRequest,
        on_token: Callable[[Token], None] | None,
        drawn: tuple[DrawnTokens, ...] = (),
    ) -> Result:
        """See `Connection`."""
        with _unavailable_once_closed():
            if on_token is None:
                return await generate_for(self._client, request)
            async with self._client.continued(request, drawn) as stream:
                async for token in stream:
                    on_token(token)
            return stream.result

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
    """Raise Unavailable for a closed connection: a retired replica's connection may close just before a send."""
    try:
        yield
    except Unauthenticated as error:  # the gateway or the replica is at fault, never the client
        raise Unavailable(str(error)) from error
    except (trio.ClosedResourceError, ClientClosed) as error:
        raise Unavailable("the connection to the replica was closed") from error


class RayUnavailable(OptionError):
    """Ray is not installed or cannot be reached."""

    def __init__(self, reason: str) -> None:
        super().__init__("replicas", reason)


class Described(msgspec.Struct, frozen=True):
    """A replica's description of itself.

    Args:
        life: an id that changes at each start of the replica.
        address: the address that the replica listens on.
        pids: the process ids of its supervisor, gateway and engine.
        server_key: the replica's public key in Z85, if it listens on a network; else None.
    """

    life: str
    address: str
    pids: tuple[int, ...]
    server_key: str | None


class Replicas(Protocol):
    """Creates, finds and ends replicas; a replica's name ends with a space and its index.

    Attributes:
        take_over_refusal: why no other gateway can take the place of this process; "" if one can.
    """

    take_over_refusal: str

    async def settle(self) -> None:
        """Find the existing version of this gateway's options, or create a new version, which becomes the latest."""

    async def names(self) -> list[str]:
        """List the fleet's replicas of all versions, by version and index."""
        ...

    async def create(self, index: int) -> str:
        """Create this gateway's replica with this index unless it exists; returns the replica's name."""
        ...

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        """Wait until the replica is ready and return its description; None after `timeout_s`, or if it is gone.

        Raises:
            RayUnavailable: the replica cannot start; the message gives the reason.
        """
        ...

    def connect(self, described: Described) -> ReplicaConnection:
        """Make a connection to a replica."""
        ...

    async def end(self, name: str) -> None:
        """End a replica for good."""

    def is_ours(self, name: str) -> bool:
        """Return whether a replica has this gateway's version."""
        ...

    def is_superseded(self, names: list[str]) -> bool:
        """Return whether a later version than this gateway's exists."""
        ...
