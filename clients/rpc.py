"""RPCClient: the service over msgpack-RPC on a TCP or Unix socket, for trio.

    async with RPCClient("unix:///run/user/1000/genbatch/rpc.sock") as client:
        print((await client.generate("Hello", max_tokens=8)).text)

Any number of tasks may use one client at once.
"""

import ssl

from genbatch.clients.remote_client import RemoteClient
from genbatch.clients.retry import Retry
from genbatch.clients.rpc_transport import RPCTransport


class RPCClient(RemoteClient):
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, unix://PATH or rpc://HOST:PORT.
        timeout, retry: see RemoteClient.
        token: what the service knows this client by, where it asks for one.
        tls: how to trust a service that encrypts TCP, such as `tls.client_context()`; None: it does not.
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
        super().__init__(RPCTransport(address, token=token, tls=tls), timeout=timeout, retry=retry)
