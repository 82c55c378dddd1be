"""check_http: whether the HTTP gateway can and may be started, told before a model is loaded."""

from importlib.util import find_spec

from genbatch.actors.gateways.bind_policy import check_bind
from genbatch.actors.gateways.security import Security
from genbatch.actors.http.http_address import HTTPAddress, parse_http_address
from genbatch.nif.errors import OptionError

NEEDED = ("starlette", "hypercorn", "prometheus_client")


def check_http(address: str, security: Security) -> HTTPAddress:
    """Where the gateway is to listen.

    Args:
        address: see parse_http_address.
        security: who is let in, and the certificate.

    Raises:
        AddressError: it is no address, or one that strangers could reach.
        OptionError: the extra is not installed.
    """
    wanted = parse_http_address(address)
    check_bind("http", address, wanted.host, lacking=security.lacking_for_tokens)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise OptionError("http", f"needs {', '.join(missing)}; run pip install 'genbatch[http]'")
    return wanted
