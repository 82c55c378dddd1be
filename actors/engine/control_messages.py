"""What a supervising process and the processes it has started say to each other."""

from typing import Any

import msgspec

from genbatch.proto.service_messages import Models


class StartEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_engine"):
    """Load the model and run the Batcher; both sorts of options as `encode_options` makes them."""

    engine_options: msgspec.Raw
    batcher_options: msgspec.Raw


class StartGateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_gateway"):
    """Listen, and work on what comes once there is an engine; the options as `encode_options` makes them."""

    service_options: msgspec.Raw
    batcher_options: msgspec.Raw


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """The socket that comes with this message leads to the other process; it replaces the one before.

    Args:
        number: names the link.
        models: what the engine serves.
    """

    number: int
    models: Models


class DrainAndStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain_and_stop"):
    """Take no new requests, end those there are within `timeout_s` seconds, and stop."""

    timeout_s: float


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Stop now; so does the end of the channel."""


class Loading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loading"):
    """See nif's Progress."""

    stage: str
    done: int
    total: int


class StartFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_failed"):
    """An error that ended the process before it was ready.

    Args:
        kind: the error's class.
        message: its text.
        attributes: those that are text.
    """

    kind: str
    message: str
    attributes: dict[str, str]


class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine_ready"):
    """The Batcher runs.

    Args:
        models: what it serves.
        stats: the answer to GetStats.
    """

    models: Models
    stats: dict[str, Any]


class GatewayReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gateway_ready"):
    """Clients can connect at these addresses."""

    addresses: tuple[str, ...]


class Unjoined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unjoined"):
    """The engine's end of the link with this number is closed, and the engine is there for the next."""

    number: int


class Hung(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hung"):
    """The engine does not get on with its work, or talks nonsense: it is to be killed."""

    reason: str


ToChild = StartEngine | StartGateway | Join | DrainAndStop | Stop
FromChild = Loading | StartFailed | EngineReady | GatewayReady | Unjoined | Hung
