"""Who may be reached from where: this machine always, others only with what keeps strangers out. The one place for it.

check_bind("bind", "tcp://0.0.0.0:5555", "0.0.0.0", lacking=["keys"])  # raises InsecureBind
"""

import ipaddress
from collections.abc import Sequence

from genbatch.actors.gateways.errors import InsecureBind


def check_bind(option: str, address: str, host: str, *, lacking: Sequence[str]) -> None:
    """Refuses to let other machines in without what keeps strangers out.

    Args:
        option: the option that has the address, such as "bind".
        address: what it has, for the message.
        host: the host in it; "*" and "" are all interfaces.
        lacking: of what this protocol needs on a network, the options that were not given; see Security.

    Raises:
        InsecureBind: others could reach the host, and something is lacking.
    """
    if lacking and not is_loopback(host):
        raise InsecureBind(option, address, lacking)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach the host.

    Names other than localhost are not looked up: they may mean another address the next time.
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
