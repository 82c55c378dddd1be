"""The error that sends a model to the general path."""

from genbatch.nif.errors import NativeError


class NativeUnavailable(NativeError):
    """The C kernels cannot run this model here; `reason` says why in words for a log line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
