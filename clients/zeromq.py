"""ZeroMQClient: the service over ZeroMQ, for trio.

    async with ZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
        print((await client.generate("Hello", max_tokens=8)).text)

Any number of tasks may use one client at once.
"""

from genbatch.clients.remote_client import RemoteClient
from genbatch.clients.retry import Retry
from genbatch.clients.zeromq_transport import ZeroMQTransport


class ZeroMQClient(RemoteClient):
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, ipc://PATH or tcp://HOST:PORT.
        timeout, retry: see RemoteClient.
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
        transport = ZeroMQTransport(address, client_key=client_key, server_key=server_key)
        super().__init__(transport, timeout=timeout, retry=retry)
