"""SyncZeroMQClient: the service over ZeroMQ, without an event loop or threads.

with SyncZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
    print(client.generate("Hello", max_tokens=8).text)
"""

from genbatch.clients.retry import Retry
from genbatch.clients.sync_remote_client import SyncRemoteClient
from genbatch.clients.sync_zeromq_transport import SyncZeroMQTransport


class SyncZeroMQClient(SyncRemoteClient):
    """A client of one service; has the interface of `SyncClient`. Use it inside `with`.

    Args:
        address: the service's, ipc://PATH or tcp://HOST:PORT.
        timeout, retry: see SyncRemoteClient.
        client_key: file with this client's keys, for a service that asks for them.
        server_key: the service's public key, or its file; None where the client's file has it too.

    Raises:
        KeyFileError: a file of keys is missing, faulty, or exposed to others.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 10.0,
        retry: Retry | None = None,
        client_key: str | None = None,
        server_key: str | None = None,
    ) -> None:
        transport = SyncZeroMQTransport(address, client_key=client_key, server_key=server_key)
        super().__init__(transport, timeout=timeout, retry=retry)
