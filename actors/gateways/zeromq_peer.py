"""ZeroMQPeer: what the gateway knows of one client: its calls, and the messages that wait for it to read."""

from collections import deque
from collections.abc import Callable

from genbatch.actors.gateways.rpc_session import RPCSession
from genbatch.proto.errors import Cancelled

# Messages that may wait for a client that does not read, beyond what ZeroMQ and the kernel hold for it.
MAX_OUTBOX = 1024


class ZeroMQPeer:
    """One client of the gateway.

    Args:
        identity: its routing id.
        session: its calls.
        now: when it was heard, seconds on the event loop's clock.
    """

    __slots__ = ("blocked_since", "delimited", "identity", "is_gone", "last_heard", "outbox", "session")

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.session: RPCSession
        self.delimited = False  # its messages have the empty frame of a REQ socket, so ours to it have too
        self.last_heard = now
        self.is_gone = False
        self.blocked_since: float | None = None  # it took nothing of its outbox since then
        self.outbox: deque[tuple[bytes, bool]] = deque()  # message, whether it is a final

    @property
    def is_idle(self) -> bool:
        """Whether it has no call and nothing waits for it."""
        return self.session.num_calls == 0 and not self.outbox

    def frames(self, message: bytes) -> list[bytes]:
        """`message` as this client expects it."""
        return [self.identity, b"", message] if self.delimited else [self.identity, message]

    def post(self, message: bytes, is_final: bool, try_send: Callable[[list[bytes]], bool], now: float) -> None:
        """Sends a message, or keeps it in order until the client reads.

        A client with too many messages waiting loses its calls and the tokens that wait, not the finals. One that
        has too many even of those gets nothing any more.
        """
        if self.is_gone or (not self.outbox and try_send(self.frames(message))):
            return
        if self.blocked_since is None:
            self.blocked_since = now
        self.outbox.append((message, is_final))
        if len(self.outbox) > MAX_OUTBOX:
            self.outbox = deque(entry for entry in self.outbox if entry[1])
            self.session.cancel_all(Cancelled(f"the client leaves more than {MAX_OUTBOX} messages unread"))
        if len(self.outbox) > MAX_OUTBOX:
            self.leave()

    def flush(self, try_send: Callable[[list[bytes]], bool], now: float) -> None:
        """Sends what waits, as far as the client takes it."""
        while self.outbox and try_send(self.frames(self.outbox[0][0])):
            self.blocked_since = now
            if self.outbox:  # empty once the attempt found the client gone
                self.outbox.popleft()
        if not self.outbox:
            self.blocked_since = None

    def leave(self) -> None:
        """The client is gone: its calls are cancelled, nothing more is sent."""
        self.is_gone = True
        self.outbox.clear()
        self.session.cancel_all(Cancelled("the client is gone"))
