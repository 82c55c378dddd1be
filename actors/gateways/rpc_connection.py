"""RPCConnection: one msgpack-RPC client on a byte stream, from its first byte to its end."""

from collections.abc import Callable

import trio

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.outbox import MAX_WAITING, Outbox
from genbatch.actors.gateways.rpc_hello import MAX_HELLO_BYTES, Authenticate, read_hello
from genbatch.actors.gateways.rpc_session import RPCSession
from genbatch.proto.errors import Cancelled, GenbatchError, Unauthenticated, Unavailable
from genbatch.proto.framing import MAX_FEED_BYTES, MessageSplitter, StreamBroken
from genbatch.proto.limits import MAX_TRANSPORT_BYTES
from genbatch.proto.rpc_server import error_message

# Seconds in which a client must end a message that it has begun, say who it is, and read something.
MESSAGE_S, HELLO_S, STALLED_S = 30.0, 5.0, 10.0
# Seconds in which the last messages may leave.
LINGER_S = 0.5
# Bytes given to the kernel at once.
MAX_SEND_BYTES = 2**16
# Messages acted on before other tasks run.
MESSAGES_PER_TURN = 64


class RPCConnection:
    """Reads and writes one stream.

    Args:
        stream: connected, and through with its TLS handshake where it has one.
        dispatcher: runs the methods.
        nursery: where calls run.
        client: its name, for fairness and logs.
        authenticate: tells whose a token is; None lets everybody in who can reach the address.
        on_sense: called when the client has said who it is, or its first message where nobody asks.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        dispatcher: Dispatcher,
        nursery: trio.Nursery,
        *,
        client: str,
        authenticate: Authenticate | None = None,
        on_sense: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.last_heard = trio.current_time()
        self.session: RPCSession | None = None  # None before the client has said who it is
        self._stream = stream
        self._dispatcher = dispatcher
        self._calls = nursery
        self._authenticate = authenticate
        self._on_sense = on_sense
        self._token = ""
        self._outbox = Outbox()
        self._mail = trio.Event()  # there is something in the outbox
        self._sent = trio.Event()  # there is less in it
        self._is_sending = False
        self._reading = trio.CancelScope()
        self._splitter = MessageSplitter(MAX_TRANSPORT_BYTES if authenticate is None else MAX_HELLO_BYTES)

    async def run(self) -> None:
        """Serves until the client is gone, makes no sense any more, or `stop`; its calls end with it."""
        if self._authenticate is None:
            self.session = self._new_session(None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                is_there = True
                with self._reading:
                    is_there = await self._read()
                if is_there:
                    with trio.move_on_after(LINGER_S):
                        await self._part()
                nursery.cancel_scope.cancel()
        finally:
            self._outbox.clear()
            self.cancel_all(Cancelled("the client is gone"))
            await trio.aclose_forcefully(self._stream)

    def stop(self) -> None:
        """Ends it after a last moment for what is still to be sent."""
        self._reading.cancel()

    def cancel_all(self, reason: GenbatchError) -> None:
        """Ends its calls."""
        if self.session is not None:
            self.session.cancel_all(reason)

    def refuse(self, head: bytes, error: GenbatchError) -> None:
        """Answers a message that was not received whole, or the connection as such.

        Args:
            head: the message's beginning.
        """
        if self.session is not None:
            self.session.refuse(head, error)
        else:
            self._outbox.post(error_message(None, error))
            self._wake()

    async def _part(self) -> None:
        """Lets the last messages arrive: a connection closed with something unread takes them back."""
        await self._wait_until_waiting(0)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            try:
                await self._stream.send_eof()
                while await self._stream.receive_some(MAX_FEED_BYTES):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    def _new_session(self, tenant: str | None) -> RPCSession:
        return RPCSession(self._dispatcher, self._calls, self._outbox, self._wake, client=self.client, tenant=tenant)

    # Reading

    async def _read(self) -> bool:
        """Acts on what comes until nothing can be understood; returns whether the client is still there."""
        while data := await self._receive_some():
            self.last_heard = trio.current_time()
            try:
                for count, message in enumerate(self._splitter.feed(data), 1):
                    if not self._act(message):
                        return True
                    if count % MESSAGES_PER_TURN == 0:
                        await trio.lowlevel.checkpoint()
                    # Reads no more from a client that leaves its answers unread: its requests wait there, not here.
                    await self._wait_until_waiting(MAX_WAITING // 2)
            except StreamBroken as broken:
                self.refuse(broken.head, broken.error)
                return True
        return data is None

    async def _receive_some(self) -> bytes | None:
        """The next bytes; none at the client's end, None when it takes too long over what it has begun."""
        with trio.CancelScope() as scope:
            if self.session is None:
                scope.deadline = self.last_heard + HELLO_S
            elif self._splitter.is_inside_message:
                scope.deadline = trio.current_time() + MESSAGE_S
            try:
                return bytes(await self._stream.receive_some(MAX_FEED_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b""
        if self.session is None:
            self.refuse(b"", Unauthenticated(f"no hello with a token came within {HELLO_S:g} s"))
        else:
            self.refuse(b"", Unavailable(f"the rest of a message did not come within {MESSAGE_S:g} s"))
        return None

    def _act(self, message: bytes) -> bool:
        """Acts on a message; returns whether the connection goes on."""
        if self._authenticate is None:
            assert self.session is not None
            self._on_sense()
            self.session.receive(message)
            return True
        if self.session is None:
            return self._greet(message)
        if self._authenticate(self._token) != self.session.tenant:
            self.session.refuse(message, Unauthenticated("the token is no longer valid"))
            self.cancel_all(Unauthenticated("the token is no longer valid"))
            return False
        self.session.receive(message)
        return True

    def _greet(self, message: bytes) -> bool:
        assert self._authenticate is not None
        msgid, token = read_hello(message)
        tenant = None if token is None else self._authenticate(token)
        if token is None or tenant is None:
            error = Unauthenticated("the first message must be hello with a token that the service knows")
            self._outbox.post(error_message(msgid, error))
            self._wake()
            return False
        self._on_sense()
        self._token = token
        self._splitter.max_bytes = MAX_TRANSPORT_BYTES
        self.session = self._new_session(tenant)
        self.session.receive(message)
        return True

    # Writing

    def _wake(self) -> None:
        self._mail.set()
        if self._is_sending and self._outbox.is_full:
            self._outbox.drop_tokens()
            self.cancel_all(Cancelled(f"the client leaves more than {MAX_WAITING} messages unread"))

    async def _write(self, scope: trio.CancelScope) -> None:
        """Sends what there is, as much as there is at once; ends the connection when nobody takes it."""
        while True:
            await self._mail.wait()
            self._mail = trio.Event()
            while data := self._outbox.take_all(MAX_SEND_BYTES):
                self._is_sending = True
                if not await self._send(data):
                    scope.cancel()
                    return
                self._is_sending = False
                self._sent.set()

    async def _send(self, data: bytes) -> bool:
        """Whether the client took it, in time."""
        with trio.move_on_after(STALLED_S):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            return True
        return False

    async def _wait_until_waiting(self, count: int) -> None:
        """Waits until no more than `count` messages are to be sent; 0: until all of them have been."""
        while self._outbox.num_waiting > count or (count == 0 and self._is_sending):
            self._sent = trio.Event()
            await self._sent.wait()
