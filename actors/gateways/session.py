"""RPCSession: one client's calls over msgpack-RPC messages, for every transport; it uses no sockets.

    message --> RPCSession --> OpenCall --> Dispatcher --> Batcher
                                   |
    client  <--   Outbox   <-- tokens for which there is credit

An OpenCall is a call between its request and its final, with the tokens that wait for its client's credit. The Outbox
holds the unsent messages of the client, in order.
"""

import logging
from collections import deque
from collections.abc import Callable

import trio

from genbatch.actors.gateways.accepting import Peer
from genbatch.actors.gateways.dispatcher import Caller, Dispatcher
from genbatch.proto.errors import Cancelled, EngineError, GenbatchError, InvalidRequest, Unavailable
from genbatch.proto.messages import Token
from genbatch.proto.rpc import (
    MAX_CREDIT,
    PLAIN_STREAM,
    CallReceived,
    CancelRequest,
    CreditGranted,
    Heartbeat,
    Refused,
    ServerConnection,
    StreamOptions,
    TokenArray,
    error_message,
    goaway_message,
    token_message,
    tokens_message,
)

# The most tokens and other messages that wait for a client that does not read, in addition to its socket's buffer.
MAX_WAITING = 1024
# The most tokens of one message; a larger message would only delay them.
MAX_TOKENS_A_MESSAGE = 256
# The retry hint of calls that continue at another service, which listens already.
HAND_OVER_MS = 1


class Outbox:
    """The unsent messages of a client, and its tokens that are not in a message yet.

    If the client coalesces, waiting tokens share a message. So the delay of sending decides how many tokens a message
    has.
    """

    __slots__ = ("_entries", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens and other messages
        self._entries: deque[bytes | list[TokenArray]] = deque()  # messages, and the tokens of later messages

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def is_full(self) -> bool:
        """True if more messages wait than a client may leave unread."""
        # guard: bound of the outbox
        return self.num_waiting > MAX_WAITING

    def post(self, message: bytes) -> None:
        """Append a message that is not a token."""
        self._entries.append(message)
        self.num_waiting += 1

    def post_token(self, token: TokenArray, *, coalesce: bool) -> None:
        """Append a token. With `coalesce`, it may share the last entry's message."""
        self.num_waiting += 1
        if coalesce and self._entries:
            last = self._entries[-1]
            if type(last) is list and len(last) < MAX_TOKENS_A_MESSAGE:
                last.append(token)
                return
        self._entries.append([token])

    def head(self) -> bytes | None:
        """Return the next message to send; None for none."""
        if not self._entries:
            return None
        entry = self._entries[0]
        if isinstance(entry, bytes):
            return entry
        return token_message(entry[0]) if len(entry) == 1 else tokens_message(entry)

    def pop(self) -> None:
        """Remove the head after it was sent."""
        entry = self._entries.popleft()
        self.num_waiting -= len(entry) if type(entry) is list else 1

    def take_all(self, max_bytes: int) -> bytes:
        """Return the next messages as bytes, about `max_bytes` of them; they count as sent."""
        taken = bytearray()
        while len(taken) < max_bytes and (message := self.head()) is not None:
            taken += message
            self.pop()
        return bytes(taken)

    def drop_tokens(self) -> None:
        """Drop the tokens of calls that are being cancelled; finals are never dropped."""
        self._entries = deque(entry for entry in self._entries if type(entry) is not list)
        self.num_waiting = len(self._entries)

    def clear(self) -> None:
        """Drop all messages, since the client is gone."""
        self._entries.clear()
        self.num_waiting = 0


# The most tokens of one stream that wait for credit, and the most seconds of that wait.
MAX_HELD = 4096
STALLED_S = 10.0


# Milliseconds after which a client may repeat calls that were ended because it was silent. By then, slots are free.
LEASE_RETRY_MS = 100


def lease_over(lease_s: float) -> Unavailable:
    """Return the error of the calls of a client with a lease that was silent for too long.

    A client that was stopped for a while sends its requests again, and continues its streams after their last token.
    """
    return Unavailable(f"no message came from the client for {lease_s:g} s", retry_after_ms=LEASE_RETRY_MS)


class OpenCall:
    """One call of a session.

    Args:
        options: the stream options of its tokens.
        outbox: takes the tokens with credit.
    """

    __slots__ = ("_caught_up", "_coalesce", "_credit", "_outbox", "_stalled_since", "_waiting", "reason", "scope")

    def __init__(self, options: StreamOptions, outbox: Outbox) -> None:
        self.scope = trio.CancelScope()
        self.reason: GenbatchError | None = None  # why it was cancelled
        self._outbox = outbox
        self._coalesce = options.coalesce
        self._credit = options.credit  # None: no limit
        self._waiting: deque[TokenArray] = deque()
        self._stalled_since: float | None = None  # the start of the wait for credit
        self._caught_up = trio.Event()
        self._caught_up.set()

    def cancel(self, reason: GenbatchError) -> None:
        """Cancel the call; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._waiting.clear()
            self.scope.cancel()

    def deliver(self, token: TokenArray) -> bool:
        """Send the next token, or keep it until there is credit; return whether it was sent."""
        if self._credit is not None:
            # guard: credit of a stream
            if not self._credit:
                self._hold(token)
                return False
            self._credit -= 1
        self._outbox.post_token(token, coalesce=self._coalesce)
        return True

    def grant(self, count: int) -> None:
        """Add credit for `count` tokens; a call without credit in its options ignores it."""
        if self._credit is None:
            return
        self._credit = min(self._credit + count, MAX_CREDIT)
        while self._waiting and self._credit:
            self._credit -= 1
            self._outbox.post_token(self._waiting.popleft(), coalesce=self._coalesce)
        self._stalled_since = trio.current_time() if self._waiting else None
        if not self._waiting:
            self._caught_up.set()

    async def caught_up(self) -> None:
        """Wait until no token waits for credit."""
        await self._caught_up.wait()

    def check_stalled(self, now: float) -> None:
        """Cancel the call if its client has granted no credit for too long while tokens wait."""
        # guard: stalled stream
        if self._stalled_since is not None and now - self._stalled_since > STALLED_S:
            self.cancel(Cancelled(f"the client granted no credit for {STALLED_S:g} s"))

    def _hold(self, token: TokenArray) -> None:
        if not self._waiting:
            self._stalled_since = trio.current_time()
            self._caught_up = trio.Event()
        self._waiting.append(token)
        # guard: tokens that wait for credit
        if len(self._waiting) > MAX_HELD:
            self.cancel(Cancelled(f"more than {MAX_HELD} tokens of this call wait for credit"))


logger = logging.getLogger(__name__)


class CallHost:
    """Hosts the calls of a gateway's clients, until the gateway stops.

    Args:
        nursery: the gateway's nursery; it may be closed once `closing` is set.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.closing: GenbatchError | None = None  # the error of all later calls
        self.is_retiring = False  # clients must reconnect, to another service
        self._ends = trio.Lock()

    async def turn_to_end(self) -> None:
        """Let one client end per turn of the event loop, so that tokens are sent while many clients hang up."""
        async with self._ends:
            await trio.lowlevel.checkpoint()


class RPCSession:
    """The service's side of one client.

    Args:
        dispatcher: runs the methods.
        host: hosts the calls' tasks.
        outbox: takes the messages to the client.
        wake: called when the outbox has a message; must not block or raise.
        peer: its name and its account.
        tenant: the tenant of its key or token; None at a gateway without keys and tokens.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        host: CallHost,
        outbox: Outbox,
        wake: Callable[[], None],
        *,
        peer: Peer,
        tenant: str | None = None,
    ) -> None:
        self.client = peer.name
        self._account = peer.account
        self.tenant = tenant
        self.lease_s: float | None = None  # after this silence the client counts as gone
        self._dispatcher = dispatcher
        self._host = host
        self._outbox = outbox
        self._wake = wake
        self._connection = ServerConnection(dispatcher.max_calls)
        self._calls: dict[int, OpenCall] = {}
        self._has_been_refused = False
        self._has_gone_away = False

    @property
    def num_calls(self) -> int:
        """The number of open calls."""
        return len(self._calls)

    def receive(self, data: bytes, *, may_stream: bool = True) -> bool:
        """Handle one message; return False if it is of another protocol.

        Args:
            data: the message.
            may_stream: whether the client can receive more than one message for a request.
        """
        if self._host.is_retiring and may_stream:
            self.go_away()
        match self._connection.receive(data):
            case CallReceived() as request:
                self._start(request, may_stream)
            case CancelRequest(msgid):
                self._calls[msgid].cancel(Cancelled("cancelled by the client"))
            case CreditGranted(msgid, count):
                self._calls[msgid].grant(count)
                self._wake()
            case Heartbeat(lease_s):
                self.lease_s = lease_s
            case Refused(error, reply, is_foreign):
                self._log_refusal(error)
                self._post(reply)
                # guard: another protocol is the connection's end
                return not is_foreign
        return True

    def refuse(self, data: bytes, error: GenbatchError) -> None:
        """Answer a message that could not be received whole.

        Args:
            data: its beginning.
        """
        self._log_refusal(error)
        self._post(self._connection.refusal(data, error))

    def go_away(self) -> None:
        """Ask the client, once, to open another connection for new requests; this connection still takes them."""
        if not self._has_gone_away:
            self._has_gone_away = True
            self._post(goaway_message())

    def hand_over(self) -> None:
        """End the open calls with an error that has the client continue them at the service that has taken over."""
        self.cancel_all(Unavailable("another service has taken over", retry_after_ms=HAND_OVER_MS))

    def heartbeat(self) -> None:
        """Confirm to the client that its calls are still open."""
        self._post(self._connection.heartbeat())

    def cancel_all(self, reason: GenbatchError) -> None:
        """Cancel every open call with `reason`."""
        for call in self._calls.values():
            call.cancel(reason)

    def check_stalled(self, now: float) -> None:
        """Cancel the calls of a client that has stopped reading their tokens."""
        for call in self._calls.values():
            call.check_stalled(now)

    def _start(self, request: CallReceived, may_stream: bool) -> None:
        streams = self._dispatcher.streams(request.method)
        error: GenbatchError | None = None
        if self._host.closing is not None:
            error = self._host.closing
        elif streams and not may_stream:
            reason = f"{request.method} sends many messages, this socket takes one a request: call generate"
            error = InvalidRequest("method", reason)
        elif request.options != PLAIN_STREAM and not streams:
            error = InvalidRequest("options", f"{request.method} sends no tokens")
        if error is not None:
            self._post(self._connection.error(request.msgid, error))
            return
        self._calls[request.msgid] = OpenCall(request.options, self._outbox)
        self._host.nursery.start_soon(self._serve, request, name=f"{request.method} of {self.client}")

    async def _serve(self, request: CallReceived) -> None:
        """Run a call and send its one final; a bug of ours ends this call only."""
        try:
            final = await self._final(request, self._calls[request.msgid])
        except Exception:
            logger.exception("%s of client %s failed", request.method, self.client)
            final = error_message(request.msgid, EngineError("the service failed at this call"))
            self._connection.calls.drop(request.msgid)
        del self._calls[request.msgid]
        self._post(final)

    async def _final(self, request: CallReceived, call: OpenCall) -> bytes:

        def on_token(token: Token) -> None:
            array = self._connection.token(request.msgid, token) if call.reason is None else None
            if array is not None and call.deliver(array):
                self._wake()

        final = None
        with call.scope:
            final = await self._run(request, on_token, call)
        if final is None:
            assert call.reason is not None
            final = self._connection.error(request.msgid, call.reason)
        return final

    async def _run(self, request: CallReceived, on_token: Callable[[Token], None], call: OpenCall) -> bytes:
        request_id = f"{self.client}/{request.msgid}"
        caller = Caller(self._account, on_token, self.tenant, request_id, request.options.drawn)
        try:
            result = await self._dispatcher.call(request.method, request.params, caller)
        except GenbatchError as error:
            await call.caught_up()
            return self._connection.error(request.msgid, error)
        await call.caught_up()
        try:
            return self._connection.result(request.msgid, result)
        except (TypeError, ValueError, OverflowError):
            logger.exception("the result of %s cannot be sent", request.method)
            return self._connection.error(request.msgid, EngineError("the result cannot be sent"))

    def _log_refusal(self, error: GenbatchError) -> None:
        """Log the first refused message of a client; log the others at debug level only."""
        level = logging.DEBUG if self._has_been_refused else logging.INFO
        self._has_been_refused = True
        logger.log(level, "refused a message of client %s: %s", self.client, error)

    def _post(self, message: bytes) -> None:
        self._outbox.post(message)
        self._wake()
