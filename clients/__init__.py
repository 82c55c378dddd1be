"""Ways to call the Batcher: in process, over ZeroMQ, and from the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genbatch.clients.batcher import open_batcher
    from genbatch.clients.offline_scheduler import OfflineScheduler, generate_batch
    from genbatch.clients.rpc import RPCClient
    from genbatch.clients.sync_rpc import SyncRPCClient
    from genbatch.clients.sync_zeromq import SyncZeroMQClient
    from genbatch.clients.zeromq import ZeroMQClient

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
    "OfflineScheduler": "offline_scheduler",
    "RPCClient": "rpc",
    "SyncRPCClient": "sync_rpc",
    "SyncZeroMQClient": "sync_zeromq",
    "ZeroMQClient": "zeromq",
    "generate_batch": "offline_scheduler",
    "open_batcher": "batcher",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: a client that only talks to a service must not wait seconds for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
