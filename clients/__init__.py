"""Ways to call the Batcher: in process, over ZeroMQ, and from the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genbatch.clients.in_process import open_batcher
    from genbatch.clients.offline import OfflineScheduler, generate_batch
    from genbatch.clients.remote import RPCClient, ZeroMQClient
    from genbatch.clients.sync import SyncRPCClient, SyncZeroMQClient

__all__ = [
    "OfflineScheduler",
    "RPCClient",
    "SyncRPCClient",
    "SyncZeroMQClient",
    "ZeroMQClient",
    "generate_batch",
    "open_batcher",
]

_MODULES = {
    "OfflineScheduler": "offline",
    "RPCClient": "remote",
    "SyncRPCClient": "sync",
    "SyncZeroMQClient": "sync",
    "ZeroMQClient": "remote",
    "generate_batch": "offline",
    "open_batcher": "in_process",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: a client that only talks to a service must not wait seconds for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
