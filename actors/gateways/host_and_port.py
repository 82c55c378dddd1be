"""The HOST:PORT of an address."""

from genbatch.actors.gateways.errors import AddressError


def host_and_port(address: str, rest: str) -> tuple[str, int]:
    """The host, an IPv6 one in its brackets, and the port in the `rest` of an address; "*" is a port to be chosen, 0.

    Raises:
        AddressError: it has not that form.
    """
    host, _, port = rest.rpartition(":")
    if host and port == "*":
        return host, 0
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise AddressError(address, "a tcp:// address is tcp://HOST:PORT")
    return host, int(port)
