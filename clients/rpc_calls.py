"""RPCCalls: a client's open calls over one connection: bytes in, tokens and finals to whoever waits. No sockets."""

from collections.abc import Callable, Container

from genbatch.clients.call_result import CallResult
from genbatch.proto.errors import FrameTooLarge, GenbatchError, MalformedMessage
from genbatch.proto.rpc import PLAIN_STREAM, Answered, Failed, StreamOptions, TokenReceived, TokensReceived
from genbatch.proto.rpc_client import ClientConnection


class RPCCalls:
    """Which call's result goes where."""

    def __init__(self) -> None:
        self._connection = ClientConnection()
        self._results: dict[int, CallResult] = {}
        self._readers: dict[int, Callable[[object], object]] = {}

    def __len__(self) -> int:
        return len(self._results)

    def open(
        self,
        method: str,
        params: object,
        result: CallResult,
        read: Callable[[object], object],
        options: StreamOptions = PLAIN_STREAM,
    ) -> tuple[int, bytes]:
        """Opens a call; returns its msgid and the message to send.

        Args:
            result: where tokens and the final go.
            read: makes the result of the plain data that arrives, or raises MalformedMessage.
            options: how a stream's tokens are to come.

        Raises:
            FrameTooLarge: the service would not take it.
        """
        msgid, message = self._connection.request(method, params, options)
        self._results[msgid] = result
        self._readers[msgid] = read
        return msgid, message

    def close(self, msgid: int) -> bytes | None:
        """Forgets a call; returns the message that cancels it, if it had not ended."""
        if msgid not in self._results:
            return None
        self._take(msgid)
        return self._connection.cancel(msgid)

    def credit(self, msgid: int, count: int) -> bytes:
        """The message that lets the service send `count` more tokens of a stream."""
        return self._connection.credit(msgid, count)

    def heartbeat(self, lease_s: float) -> bytes:
        """The message that keeps the open calls for another `lease_s` seconds."""
        return self._connection.heartbeat(lease_s)

    def receive(self, message: bytes) -> None:
        """Hands a message's content to its call; a message that breaks the protocol ends every call."""
        try:
            self._act(self._connection.receive(message))
        except (FrameTooLarge, MalformedMessage) as fault:
            self.fail_all(fault)

    def fail_all(self, error: GenbatchError, *, spared: Container[int] = ()) -> list[bytes]:
        """Ends every open call but those `spared` with `error`; returns the messages that cancel them."""
        cancels = []
        for msgid in [msgid for msgid in self._results if msgid not in spared]:
            self._results[msgid].fail(error)
            cancel = self.close(msgid)
            if cancel is not None:
                cancels.append(cancel)
        return cancels

    def _act(self, event: object) -> None:
        match event:
            case TokenReceived(msgid, token) if msgid in self._results:
                self._results[msgid].push(token)
            case TokensReceived(tokens):
                for received in tokens:
                    if received.msgid in self._results:
                        self._results[received.msgid].push(received.token)
            case Answered(msgid, value) if msgid in self._results:
                result, read = self._take(msgid)
                try:
                    result.finish(read(value))
                except MalformedMessage as fault:
                    result.fail(fault)
            case Failed(None, error):
                self.fail_all(error)
            case Failed(int(msgid), error) if msgid in self._results:
                self._take(msgid)[0].fail(error)

    def _take(self, msgid: int) -> tuple[CallResult, Callable[[object], object]]:
        return self._results.pop(msgid), self._readers.pop(msgid)
