"""Outbox: what waits to be sent to one client, in order; knows no sockets."""

from collections import deque

from genbatch.proto.rpc import TokenArray
from genbatch.proto.rpc_server import token_message, tokens_message

# Tokens and other messages that may wait for a client that does not read, beyond what its socket holds for it.
MAX_WAITING = 1024
# A message of more tokens would only be late.
MAX_TOKENS_A_MESSAGE = 256


class Outbox:
    """Messages, and tokens not yet made into messages: those of a client that coalesces share one as long as they wait.

    How many tokens a message has is so decided by how far sending is behind, and by nothing else.
    """

    __slots__ = ("_entries", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens and other messages
        self._entries: deque[bytes | list[TokenArray]] = deque()  # tokens that do not share are lists of one

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether more is waiting than may wait for a client that takes nothing."""
        return self.num_waiting > MAX_WAITING

    def post(self, message: bytes) -> None:
        """Appends a message that is not a token."""
        self._entries.append(message)
        self.num_waiting += 1

    def post_token(self, token: TokenArray, *, coalesce: bool) -> None:
        """Appends a token, to the message in front of it where that is allowed."""
        self.num_waiting += 1
        if coalesce and self._entries:
            last = self._entries[-1]
            if type(last) is list and len(last) < MAX_TOKENS_A_MESSAGE:
                last.append(token)
                return
        self._entries.append([token])

    def head(self) -> bytes | None:
        """The next message to send; None if nothing waits."""
        if not self._entries:
            return None
        entry = self._entries[0]
        if isinstance(entry, bytes):
            return entry
        return token_message(entry[0]) if len(entry) == 1 else tokens_message(entry)

    def pop(self) -> None:
        """The head was sent."""
        entry = self._entries.popleft()
        self.num_waiting -= len(entry) if type(entry) is list else 1

    def take_all(self, max_bytes: int) -> bytes:
        """The next messages one after another, about `max_bytes` of them; they count as sent."""
        taken = bytearray()
        while len(taken) < max_bytes and (message := self.head()) is not None:
            taken += message
            self.pop()
        return bytes(taken)

    def drop_tokens(self) -> None:
        """Forgets the tokens; their calls are being cancelled, and finals are never dropped for others."""
        self._entries = deque(entry for entry in self._entries if type(entry) is not list)
        self.num_waiting = len(self._entries)

    def clear(self) -> None:
        """Forgets everything: nobody is left to read it."""
        self._entries.clear()
        self.num_waiting = 0
