"""Ways to call the Batcher: in process, over ZeroMQ and msgpack-RPC, offline, and from the command line."""

from typing import Any

import genbatch


def __getattr__(name: str) -> Any:
    """`from genbatch.clients import open_batcher` still works, as it did before `genbatch` itself had these names."""
    return getattr(genbatch, name)
