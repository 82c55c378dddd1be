"""ZeroMQPeer: what the gateway knows of one client: its calls, and the messages that wait for it to read."""

from collections.abc import Callable

from genbatch.actors.gateways.outbox import MAX_WAITING, Outbox
from genbatch.actors.gateways.rpc_session import RPCSession
from genbatch.proto.errors import Cancelled


class ZeroMQPeer:
    """One client of the gateway.

    Args:
        identity: its routing id, which it chooses itself.
        key: the CURVE key that it has shown, in Z85; "" where none is asked for.
        connection: file descriptor of its connection.
        session: its calls.
        now: when it was heard, seconds on the event loop's clock.
    """

    __slots__ = (
        "blocked_since",
        "connection",
        "delimited",
        "identity",
        "is_gone",
        "key",
        "last_heard",
        "outbox",
        "session",
    )

    def __init__(self, identity: bytes, key: str, connection: int, now: float) -> None:
        self.identity = identity
        self.key = key
        self.connection = connection
        self.session: RPCSession
        self.delimited = False  # its messages have the empty frame of a REQ socket, so ours to it have too
        self.last_heard = now
        self.is_gone = False
        self.blocked_since: float | None = None  # it took nothing of its outbox since then
        self.outbox = Outbox()

    @property
    def is_idle(self) -> bool:
        """Whether it has no call and nothing waits for it."""
        return self.session.num_calls == 0 and not self.outbox

    def frames(self, message: bytes) -> list[bytes]:
        """`message` as this client expects it."""
        return [self.identity, b"", message] if self.delimited else [self.identity, message]

    def flush(self, try_send: Callable[[list[bytes]], bool], now: float) -> bool:
        """Sends what waits, as far as the client takes it; returns whether that is all.

        A client with too much waiting loses its calls and the tokens that wait, not the finals. One that has too
        many even of those gets nothing any more.
        """
        while (message := self.outbox.head()) is not None:
            if not try_send(self.frames(message)):
                if self.blocked_since is None:
                    self.blocked_since = now
                self._bound()
                return not self.outbox
            self.blocked_since = None
            if self.outbox:  # empty once the attempt found the client gone
                self.outbox.pop()
        return True

    def _bound(self) -> None:
        if self.outbox.is_full:
            self.outbox.drop_tokens()
            self.session.cancel_all(Cancelled(f"the client leaves more than {MAX_WAITING} messages unread"))
        if self.outbox.is_full:
            self.leave()

    def leave(self) -> None:
        """The client is gone: its calls are cancelled, nothing more is sent."""
        self.is_gone = True
        self.outbox.clear()
        self.session.cancel_all(Cancelled("the client is gone"))
