"""Why a service does not start to listen: its address, or its keys."""

from collections.abc import Sequence
from pathlib import Path

from genbatch.actors.runtime.errors import ActorError

# The options that keep strangers out, and how to get what they want.
_HOW = {
    "keys": "--keys DIR, made by `genbatch keys new DIR`",
    "tokens": "--tokens FILE, made by `genbatch keys token NAME`",
    "tls_cert": "--tls-cert FILE, the service's certificate",
    "tls_key": "--tls-key FILE, the certificate's private key",
}


class AddressError(ActorError):
    """The service cannot or must not listen at the address; the message names it and the reason."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}")
        self.address = address
        self.reason = reason


class InsecureBind(AddressError):
    """Other machines could reach the address, and something that would keep strangers out is missing.

    Args:
        option: the option that has the address.
        address: what it has.
        lacking: the options that are missing: of keys, tokens, tls_cert and tls_key.
    """

    def __init__(self, option: str, address: str, lacking: Sequence[str]) -> None:
        needed = " and ".join(_HOW[name] for name in lacking)
        trusted = "; in a network where something else keeps strangers out: --http-insecure" if option == "http" else ""
        super().__init__(
            address,
            f"{option}: other machines could reach it, and nothing would keep strangers out; "
            f"listen on 127.0.0.1, [::1], localhost or a file, or also give {needed}{trusted}",
        )
        self.option = option
        self.lacking = tuple(lacking)


class KeyFileError(ActorError):
    """A file of keys, tokens or certificates is missing, faulty, exposed to others, or in the way."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
