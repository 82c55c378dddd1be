"""What an EngineLink is told that is no call: of its connections, and of time."""

from dataclasses import dataclass

from genbatch.actors.engine.link_connection import LinkConnection
from genbatch.actors.engine.link_messages import ToGateway
from genbatch.proto.service_messages import Models


@dataclass(frozen=True, slots=True)
class LinkUp:
    """An engine is there."""

    connection: LinkConnection
    models: Models


@dataclass(frozen=True, slots=True)
class LinkFrame:
    """An engine's messages; None: its end."""

    connection: LinkConnection
    messages: list[ToGateway] | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class CancelOver:
    """The time to end what was cancelled, at the end of a drain, is over."""
