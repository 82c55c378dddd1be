"""SyncRPCTransport: messages over a TCP or Unix socket, without an event loop."""

import selectors
import socket
import ssl
import time

from genbatch.clients.rpc_address import read_rpc_address
from genbatch.clients.rpc_link import RPCLink
from genbatch.proto.errors import GenbatchError, Unauthenticated, Unavailable

# Seconds between attempts to connect, and in which the last cancellations may leave.
RECONNECT_S, LINGER_S = 0.05, 0.5
MAX_BYTES = 2**16

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SyncRPCTransport:
    """Implements `SyncTransport`.

    Args:
        address: unix://PATH or rpc://HOST:PORT.
        token, tls: see RPCClient.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._socket: socket.socket | None = None
        self._link: RPCLink
        self._outgoing = bytearray()
        self._incoming: list[bytes] = []
        self._lost: GenbatchError | None = None  # told once its last messages have been taken

    def open(self) -> None:
        """See `SyncTransport.open`."""
        self._where = read_rpc_address(self.address)

    def close(self) -> None:
        """See `SyncTransport.close`."""
        end = time.monotonic() + LINGER_S
        while self._socket is not None and self._outgoing and time.monotonic() < end:
            self._exchange(LINGER_S)
        self._disconnect()

    def forget_losses(self) -> None:
        """See `SyncTransport.forget_losses`."""
        self._exchange(0)
        self._lost = None
        self._incoming.clear()

    def connect(self, timeout: float) -> None:
        """See `SyncTransport.connect`."""
        end = time.monotonic() + timeout
        self._exchange(0)  # notices an end that came while nobody waited
        if self._lost is not None:  # other calls are to be told
            lost, self._lost = self._lost, None
            raise lost
        while self._socket is None:
            try:
                self._socket = self._connect(max(0.001, end - time.monotonic()))
            except ssl.SSLCertVerificationError as error:
                raise Unauthenticated(f"the service at {self.address} is not trusted: {error}") from None
            except OSError as error:
                if time.monotonic() + RECONNECT_S > end:
                    raise Unavailable(f"no service answers at {self.address} within {timeout:g} s") from error
                time.sleep(RECONNECT_S)
            else:
                self._link = RPCLink(self._token)
                self._outgoing = bytearray(self._link.greeting)

    def send(self, message: bytes) -> None:
        """See `SyncTransport.send`; what does not leave at once does while somebody receives."""
        if self._socket is not None:
            self._outgoing += message
            self._exchange(0)

    def receive(self, timeout: float) -> list[bytes]:
        """See `SyncTransport.receive`."""
        if not self._incoming and self._lost is None:
            self._exchange(timeout)
        messages, self._incoming = self._incoming, []
        if not messages and self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        return messages

    def _connect(self, timeout: float) -> socket.socket:
        where = self._where
        if where.path is not None:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(timeout)
            try:
                made.connect(where.path)
            except OSError:
                made.close()
                raise
        else:
            made = socket.create_connection((where.host, where.port), timeout)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                made = self._tls.wrap_socket(made, server_hostname=where.host)
        made.setblocking(False)
        return made

    def _exchange(self, timeout: float) -> None:
        """Sends and receives what is possible, waiting up to `timeout` seconds for something to be."""
        if self._socket is None:
            return
        try:
            if not self._has_pending():
                with selectors.DefaultSelector() as selector:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
                    selector.register(self._socket, events)
                    selector.select(timeout)
            self._write(self._socket)
            self._read(self._socket)
        except OSError:
            self._lose(Unavailable(f"the connection to {self.address} was lost"))
        except GenbatchError as error:
            self._lose(error)

    def _has_pending(self) -> bool:
        """Whether TLS has read more than it gave; the operating system does not tell of that."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _write(self, connection: socket.socket) -> None:
        while self._outgoing:
            try:
                sent = connection.send(memoryview(self._outgoing)[:MAX_BYTES].tobytes())
            except _NOT_NOW:
                return
            del self._outgoing[:sent]

    def _read(self, connection: socket.socket) -> None:
        while True:
            try:
                data = connection.recv(MAX_BYTES)
            except _NOT_NOW:
                return
            if not data:
                raise ConnectionResetError
            self._incoming += self._link.receive(data)

    def _lose(self, error: GenbatchError) -> None:
        self._lost = error
        self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outgoing.clear()
