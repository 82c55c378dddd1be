"""RPCTransport: messages over a TCP or Unix socket, for trio."""

import ssl
from collections.abc import Sequence

import trio

from genbatch.clients.rpc_address import read_rpc_address
from genbatch.clients.rpc_link import RPCLink
from genbatch.clients.transport import OnLost, OnMessage
from genbatch.proto.errors import GenbatchError, Unauthenticated, Unavailable

# Seconds between attempts to connect, and in which the last cancellations may leave.
RECONNECT_S, LINGER_S = 0.05, 0.5
MAX_RECEIVE_BYTES = 2**16


class _Connection:
    """A stream, and what is to be written to it."""

    def __init__(self, stream: trio.abc.Stream, link: RPCLink) -> None:
        self.stream = stream
        self.link = link
        self.mail = trio.Event()
        self.outgoing = bytearray()

    def post(self, message: bytes) -> None:
        self.outgoing += message
        self.mail.set()

    async def write(self) -> None:
        """Writes until the connection breaks, which reading tells."""
        while True:
            await self.mail.wait()
            self.mail = trio.Event()
            await self.flush()

    async def flush(self) -> None:
        while self.outgoing:
            data, self.outgoing = self.outgoing, bytearray()
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return


class RPCTransport:
    """Implements `Transport`.

    Args:
        address: unix://PATH or rpc://HOST:PORT.
        token, tls: see RPCClient.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._refusal: Unauthenticated | None = None
        self._connection: _Connection | None = None
        self._connecting = trio.Lock()
        self._tasks: trio.Nursery
        self._on_message: OnMessage
        self._on_lost: OnLost

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See `Transport.run`."""
        self._where = read_rpc_address(self.address)
        self._on_message, self._on_lost = on_message, on_lost
        async with trio.open_nursery() as self._tasks:
            task_status.started()
            await trio.sleep_forever()

    async def send(self, messages: Sequence[bytes]) -> None:
        """See `Transport.send`."""
        async with self._connecting:
            if self._connection is None:
                await self._connect()
        if self._refusal is not None:
            raise self._refusal
        for message in messages:
            if self._connection is not None:  # else it was lost meanwhile, which ends the calls
                self._connection.post(message)

    def try_send(self, message: bytes) -> bool:
        """See `Transport.try_send`."""
        if self._connection is None:
            return False
        self._connection.post(message)
        return True

    def no_answer(self, timeout: float) -> str:
        """See `Transport.no_answer`."""
        return f"no service answers at {self.address} within {timeout:g} s"

    async def _connect(self) -> None:
        while True:
            try:
                stream = await self._open_stream()
                break
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RECONNECT_S)
        self._refusal = None
        connection = _Connection(stream, RPCLink(self._token))
        connection.post(connection.link.greeting)
        self._connection = connection
        self._tasks.start_soon(self._serve, connection)

    async def _open_stream(self) -> trio.abc.Stream:
        where = self._where
        if where.path is not None:
            return await trio.open_unix_socket(where.path)
        plain = await trio.open_tcp_stream(where.host, where.port)
        if self._tls is None:
            return plain
        encrypted = trio.SSLStream(plain, self._tls, server_hostname=where.host, https_compatible=True)
        try:
            await encrypted.do_handshake()
        except BaseException as error:
            await trio.aclose_forcefully(encrypted)
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise Unauthenticated(f"the service at {self.address} is not trusted: {error.__cause__}") from None
            raise
        return encrypted

    async def _serve(self, connection: _Connection) -> None:
        """Reads until the connection ends; writes what is left when the client is closed."""
        lost: GenbatchError = Unavailable(f"the connection to {self.address} was lost")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.write)
                try:
                    await self._read(connection)
                except GenbatchError as error:
                    lost = error
                nursery.cancel_scope.cancel()
        except trio.Cancelled:
            with trio.move_on_after(LINGER_S, shield=True):
                await connection.flush()
            raise
        finally:
            if self._connection is connection:
                self._connection = None
            await trio.aclose_forcefully(connection.stream)
        if isinstance(lost, Unauthenticated):
            self._refusal = lost
        self._on_lost(lost)

    async def _read(self, connection: _Connection) -> None:
        while True:
            try:
                data = await connection.stream.receive_some(MAX_RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            for message in connection.link.receive(bytes(data)):
                self._on_message(message)
