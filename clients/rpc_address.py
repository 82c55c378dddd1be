"""What an msgpack-RPC client's address says."""

from dataclasses import dataclass

from genbatch.proto.errors import Unavailable


@dataclass(frozen=True, slots=True)
class RPCAddress:
    """The file of a Unix socket, or a host and a port."""

    path: str | None = None
    host: str = ""
    port: int = 0


def read_rpc_address(address: str) -> RPCAddress:
    """Reads unix://PATH, rpc://HOST:PORT or tcp://HOST:PORT.

    Raises:
        Unavailable: it is none of these.
    """
    transport, _, rest = address.partition("://")
    if transport == "unix" and rest:
        return RPCAddress(path=rest)
    host, _, port = rest.rpartition(":")
    if transport in ("rpc", "tcp") and host and port.isascii() and port.isdecimal() and int(port) < 2**16:
        return RPCAddress(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise Unavailable(f"{address} is no address to connect to: it must be unix://PATH or rpc://HOST:PORT")
