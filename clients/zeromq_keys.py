"""A ZeroMQ client's socket: its options and keys, and what a service that does not let it in says.

The same with an event loop and without.
"""

import struct
from collections.abc import Iterator
from typing import Any

import zmq

from genbatch.actors.security.curve_keys import ClientKeys
from genbatch.proto.errors import Unauthenticated
from genbatch.proto.limits import RESPONSE_LIMITS

# Milliseconds in which the last cancellations may leave.
LINGER_MS = 500
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# What a client listens for beside its messages: the end of a connection, and a service that shuts the door.
CONNECTION_EVENTS = zmq.EVENT_DISCONNECTED | _REFUSALS
_EVENT = struct.Struct("=HI")  # what happened; a descriptor, a status or a reason


def load_client_keys(client_key: str | None, server_key: str | None) -> ClientKeys | None:
    """The keys in these files; None where none are given.

    Raises:
        KeyFileError: a file is missing, faulty, or exposed to others.
        ValueError: a server key without a client key.
    """
    if client_key is not None:
        return ClientKeys.load(client_key, server_key)
    if server_key is not None:
        raise ValueError("server_key without client_key: a service that has keys wants the client's too")
    return None


def socket_options(address: str, keys: ClientKeys | None) -> Iterator[tuple[int, Any]]:
    """What a DEALER is set to before it connects, beside what every socket is."""
    yield zmq.MAXMSGSIZE, RESPONSE_LIMITS.max_bytes
    yield zmq.RCVHWM, 0  # as much as we asked for; a full queue would cut the connection off
    yield zmq.IMMEDIATE, 1  # nothing is queued for a service that may never come
    yield zmq.IPV6, int(address.startswith("tcp://["))
    if keys is not None:
        yield from keys.options()


def read_refusal(event: bytes, address: str, *, has_keys: bool) -> Unauthenticated | None:
    """Why the service at `address` does not let this client in, if that is what the monitor's event says."""
    kind, _ = _EVENT.unpack(event)
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Unauthenticated(f"the service at {address} does not have this client's key on its list")
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if has_keys:
            return Unauthenticated(f"the service at {address} has no keys: connect without one, if you trust the way")
        return Unauthenticated(f"the service at {address} asks for a key: give client_key (--client-key FILE)")
    return None


def no_answer(address: str, timeout: float, *, has_keys: bool) -> str:
    """What to say when no connection came about."""
    other = "another one than the server key belongs to" if has_keys else "one that asks for a key"
    hint = f", or it is {other}" if has_keys or address.startswith("tcp://") else ""
    return f"no service answers at {address} within {timeout:g} s{hint}"
