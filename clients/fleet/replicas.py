"""Replicas: where a gateway's replicas come from. Ray is one place (ray_replicas); tests have another."""

from typing import Protocol

import msgspec

from genbatch.clients.fleet.connection import ReplicaConnection
from genbatch.nif.errors import OptionError


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
