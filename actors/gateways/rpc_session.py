"""RPCSession: one client's open calls, each a task of its own that can be cancelled. Knows no sockets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.proto.errors import Cancelled, EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import Token
from genbatch.proto.rpc import CancelRequest, Heartbeat, Refused, Request, ServerConnection

logger = logging.getLogger(__name__)

Send = Callable[[bytes, bool], None]  # a message, and whether it is a final: these are never dropped for others
# Calls that one client may have open; the Batcher's queue has its own, smaller bounds.
MAX_CALLS = 256


@dataclass(slots=True)
class OpenCall:
    """A call between its request and its final."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    reason: GenbatchError | None = None  # why it was cancelled

    def cancel(self, reason: GenbatchError) -> None:
        """Ends it; the first reason stands."""
        if self.reason is None:
            self.reason = reason
            self.scope.cancel()


class RPCSession:
    """The service's side of one client.

    Args:
        dispatcher: runs the methods.
        nursery: where calls run.
        send: called as send(message, is_final), must not block or raise.
        client: its name, for fairness and logs.
    """

    def __init__(self, dispatcher: Dispatcher, nursery: trio.Nursery, send: Send, *, client: str) -> None:
        self.client = client
        self.lease_s: float | None = None  # the client asked to be taken for dead after so many silent seconds
        self._dispatcher = dispatcher
        self._nursery = nursery
        self._send = send
        self._connection = ServerConnection(MAX_CALLS)
        self._calls: dict[int, OpenCall] = {}

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def receive(self, data: bytes, *, may_stream: bool = True) -> None:
        """Acts on one message.

        Args:
            data: the message.
            may_stream: whether the client can receive more than one message for a request.
        """
        match self._connection.receive(data):
            case Request() as request:
                self._start(request, may_stream)
            case CancelRequest(msgid):
                self._calls[msgid].cancel(Cancelled("cancelled by the client"))
            case Heartbeat(lease_s):
                self.lease_s = lease_s
            case Refused(error, reply):
                logger.info("refused a message of client %s: %s", self.client, error)
                self._send(reply, True)

    def heartbeat(self) -> None:
        """Tells the client that its calls are alive."""
        self._send(self._connection.heartbeat(), False)

    def cancel_all(self, reason: GenbatchError) -> None:
        """Ends every open call with `reason`."""
        for call in self._calls.values():
            call.cancel(reason)

    def _start(self, request: Request, may_stream: bool) -> None:
        if self._dispatcher.streams(request.method) and not may_stream:
            error = InvalidRequest(
                "method", f"{request.method} sends many messages, this socket takes one a request: call generate"
            )
            self._send(self._connection.error(request.msgid, error), True)
            return
        self._calls[request.msgid] = OpenCall()
        self._nursery.start_soon(self._serve, request, name=f"{request.method} of {self.client}")

    async def _serve(self, request: Request) -> None:
        """Runs a call and sends its one final."""
        call = self._calls[request.msgid]

        def on_token(token: Token) -> None:
            message = self._connection.token(request.msgid, token) if call.reason is None else None
            if message is not None:
                self._send(message, False)

        final = None
        with call.scope:
            final = await self._run(request, on_token)
        if final is None:
            assert call.reason is not None
            final = self._connection.error(request.msgid, call.reason)
        del self._calls[request.msgid]
        self._send(final, True)

    async def _run(self, request: Request, on_token: Callable[[Token], None]) -> bytes:
        try:
            result = await self._dispatcher.call(request.method, request.params, client=self.client, on_token=on_token)
        except GenbatchError as error:
            return self._connection.error(request.msgid, error)
        try:
            return self._connection.result(request.msgid, result)
        except (TypeError, ValueError, OverflowError):
            logger.exception("the result of %s cannot be sent", request.method)
            return self._connection.error(request.msgid, EngineError("the result cannot be sent"))
