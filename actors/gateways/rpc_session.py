"""RPCSession: one client's open calls, each a task of its own that can be cancelled. Knows no sockets."""

import logging
from collections.abc import Callable

import trio

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.open_call import OpenCall
from genbatch.actors.gateways.outbox import Outbox
from genbatch.proto.errors import Cancelled, EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import Token
from genbatch.proto.rpc import PLAIN_STREAM, CancelRequest, CreditGranted, Heartbeat, Refused, Request
from genbatch.proto.rpc_server import ServerConnection

logger = logging.getLogger(__name__)

# Calls that one client may have open; the Batcher's queue has its own, smaller bounds.
MAX_CALLS = 256


class RPCSession:
    """The service's side of one client.

    Args:
        dispatcher: runs the methods.
        nursery: where calls run.
        outbox: takes what is to be sent to the client.
        wake: called when there is something in it, must not block or raise.
        client: its name, for fairness and logs.
        tenant: whose key or token it has shown; None where none is asked for.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        nursery: trio.Nursery,
        outbox: Outbox,
        wake: Callable[[], None],
        *,
        client: str,
        tenant: str | None = None,
    ) -> None:
        self.client = client
        self.tenant = tenant
        self.lease_s: float | None = None  # the client asked to be taken for dead after so many silent seconds
        self._dispatcher = dispatcher
        self._nursery = nursery
        self._outbox = outbox
        self._wake = wake
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
            case CreditGranted(msgid, count):
                self._calls[msgid].grant(count)
                self._wake()
            case Heartbeat(lease_s):
                self.lease_s = lease_s
            case Refused(error, reply):
                logger.info("refused a message of client %s: %s", self.client, error)
                self._post(reply)

    def refuse(self, data: bytes, error: GenbatchError) -> None:
        """Answers a message that could not be received whole.

        Args:
            data: its beginning.
        """
        logger.info("refused a message of client %s: %s", self.client, error)
        self._post(self._connection.refusal(data, error))

    def heartbeat(self) -> None:
        """Tells the client that its calls are alive."""
        self._post(self._connection.heartbeat())

    def cancel_all(self, reason: GenbatchError) -> None:
        """Ends every open call with `reason`."""
        for call in self._calls.values():
            call.cancel(reason)

    def check_stalled(self, now: float) -> None:
        """Ends the calls whose client has stopped reading their tokens."""
        for call in self._calls.values():
            call.check_stalled(now)

    def _start(self, request: Request, may_stream: bool) -> None:
        streams = self._dispatcher.streams(request.method)
        error = None
        if streams and not may_stream:
            reason = f"{request.method} sends many messages, this socket takes one a request: call generate"
            error = InvalidRequest("method", reason)
        elif request.options != PLAIN_STREAM and not streams:
            error = InvalidRequest("options", f"{request.method} sends no tokens")
        if error is not None:
            self._post(self._connection.error(request.msgid, error))
            return
        self._calls[request.msgid] = OpenCall(request.options, self._outbox)
        self._nursery.start_soon(self._serve, request, name=f"{request.method} of {self.client}")

    async def _serve(self, request: Request) -> None:
        """Runs a call and sends its one final."""
        call = self._calls[request.msgid]

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
        del self._calls[request.msgid]
        self._post(final)

    async def _run(self, request: Request, on_token: Callable[[Token], None], call: OpenCall) -> bytes:
        try:
            result = await self._dispatcher.call(
                request.method,
                request.params,
                client=self.client,
                on_token=on_token,
                tenant=self.tenant,
                request_id=f"{self.client}/{request.msgid}",
            )
        except GenbatchError as error:
            await call.caught_up()
            return self._connection.error(request.msgid, error)
        await call.caught_up()
        try:
            return self._connection.result(request.msgid, result)
        except (TypeError, ValueError, OverflowError):
            logger.exception("the result of %s cannot be sent", request.method)
            return self._connection.error(request.msgid, EngineError("the result cannot be sent"))

    def _post(self, message: bytes) -> None:
        self._outbox.post(message)
        self._wake()
