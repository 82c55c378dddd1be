"""SyncRPCClient: the service over msgpack-RPC on a TCP or Unix socket, without an event loop or threads.

with SyncRPCClient("unix:///run/user/1000/genbatch/rpc.sock") as client:
    print(client.generate("Hello", max_tokens=8).text)
"""

import ssl

from genbatch.clients.retry import Retry
from genbatch.clients.sync_remote_client import SyncRemoteClient
from genbatch.clients.sync_rpc_transport import SyncRPCTransport


class SyncRPCClient(SyncRemoteClient):
    """A client of one service; has the interface of `SyncClient`. Use it inside `with`.

    Args:
        address: the service's, unix://PATH or rpc://HOST:PORT.
        timeout, retry: see SyncRemoteClient.
        token, tls: see RPCClient.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 10.0,
        retry: Retry | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(SyncRPCTransport(address, token=token, tls=tls), timeout=timeout, retry=retry)
