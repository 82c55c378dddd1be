"""The peer of a connection, and the account that is charged for the connection's requests (ADR 43).

    process:4711      over a Unix socket: the process that connected
    user:1000         the same, for a process in another container, since its number means nothing here
    host:10.0.0.7     over TCP: the machine; with IPv6 its network of 64 bits; all loopback addresses are one

A connection costs a client nothing, so a connection has no share of the service, and neither has a door. HTTP, RPC and
ZeroMQ clients of one machine share one account. Clients with a key or a token have their tenant's account instead
(`Caller.payer`).
"""

import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Final, Protocol

from genbatch.actors.batcher.messages import LOCALHOST

# The account of a connection that ended before its peer was read.
GONE = "host:gone"
# A Unix socket's credentials of its peer: Linux's `struct ucred` (process, user, group), macOS's LOCAL_PEERPID.
_UCRED: Final = struct.Struct("=3i")
_SOL_LOCAL, _LOCAL_PEERPID = 0, 2
_NETWORK_BITS = 64  # of an IPv6 address: a machine can use any address below them


class AnySocket(Protocol):
    """A socket of the standard library or of trio."""

    @property
    def family(self) -> int: ...

    def getpeername(self) -> object: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Args:
        name: the connection's name, for logs and for the names of its requests.
        account: the client's name for shares and turns.
    """

    name: str
    account: str


def account_of_socket(connection: AnySocket) -> str:
    """Return the account of a connected socket's peer."""
    try:
        if connection.family == socket.AF_UNIX:
            return _account_of_process(connection)
        match connection.getpeername():
            case (str(host), *_):
                return account_of_host(host)
    except OSError:
        pass
    return GONE


def account_of_descriptor(descriptor: int) -> str:
    """Return the account of a connection that libzmq owns."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # libzmq has just closed it
        return GONE
    try:
        return account_of_socket(borrowed)
    finally:
        borrowed.detach()


def account_of_host(host: str) -> str:
    """Return the account of a machine by its address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"host:{host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and not address.is_loopback:
            return f"host:{ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False)}"
        address = address.ipv4_mapped or address
    return LOCALHOST if address.is_loopback else f"host:{address}"


def _account_of_process(connection: AnySocket) -> str:
    if not hasattr(socket, "SO_PEERCRED"):
        process = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4)
        return f"process:{int.from_bytes(process, 'little')}"
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    process_id, user_id, _ = _UCRED.unpack(credentials)
    return f"process:{process_id}" if process_id else f"user:{user_id}"
