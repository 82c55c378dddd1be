"""SyncRemoteClient: a service at an address, without an event loop or threads, whatever carries the messages."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from genbatch.clients.deadline import Deadline
from genbatch.clients.errors import ClientClosed
from genbatch.clients.request import GenerateParams, MessageLike, build_request
from genbatch.clients.retry import Retry
from genbatch.clients.rpc_calls import RPCCalls
from genbatch.clients.service_calls import Params, SyncServiceCalls
from genbatch.clients.sync_stream import SyncTokenStream
from genbatch.clients.transport import SyncTransport
from genbatch.proto.codec import to_answer
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import Result
from genbatch.proto.rpc import PLAIN_STREAM, StreamOptions

# Seconds. Heartbeats leave only while a method waits, so the lease covers what a program does between two tokens.
HEARTBEAT_S, LEASE_S = 1.0, 60.0
# Tokens of a stream that the service may be ahead of its reader.
WINDOW = 1024


class SyncRemoteClient(SyncServiceCalls):
    """Has the interface of `SyncClient`. Use it inside `with`.

    One thread uses a client; several streams may be open at once and be read in turns.

    Args:
        transport: carries the messages.
        timeout: seconds of silence, not of work, after which the service counts as gone.
        retry: what is done about requests that are refused for now.
    """

    def __init__(self, transport: SyncTransport, *, timeout: float, retry: Retry | None) -> None:
        self.address = transport.address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._transport = transport
        self._calls = RPCCalls()
        self._is_open = False
        self._last_beat = 0.0

    def __enter__(self) -> Self:
        self._transport.open()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fail_all(Unavailable("the client was closed"))
        self._is_open = False
        self._transport.close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        deadline = Deadline(build_request(prompt, messages, params), time.monotonic)
        result: Result = self._ask_again("generate", deadline.remaining_request, Result)
        return result

    @contextmanager
    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Iterator[SyncTokenStream]:
        """See `Client.stream`."""
        deadline = Deadline(build_request(prompt, messages, params), time.monotonic)
        with self._call(
            "stream", deadline.remaining_request, Result, StreamOptions(credit=WINDOW, coalesce=True)
        ) as call:
            yield call

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Receives messages until `is_true()`; a stream's `for` waits here."""
        if is_true():
            return
        if not self._is_open:
            raise ClientClosed
        last_heard = time.monotonic()
        while not is_true():
            self._beat()
            try:
                messages = self._transport.receive(HEARTBEAT_S)
            except GenbatchError as lost:
                self._fail_all(lost)
                continue
            for message in messages:
                self._calls.receive(message)
                last_heard = time.monotonic()
            if time.monotonic() - last_heard > self.timeout:
                self._fail_all(Unavailable(f"the service at {self.address} was silent for {self.timeout:g} s"))

    def _ask(self, method: str, params: Params, wanted: Any) -> Any:
        return self._ask_again(method, lambda: params, wanted)

    def _ask_again(self, method: str, params: Callable[[], Params], wanted: Any) -> Any:
        """The answer, after as many tries as it takes or are made."""
        for attempt in self.retry.attempts():
            with attempt, self._call(method, params, wanted) as call:
                return call.ended()
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _call(
        self, method: str, params: Callable[[], Params], wanted: Any, options: StreamOptions = PLAIN_STREAM
    ) -> Iterator[SyncTokenStream]:
        """An open call; one that has not ended when the body does is cancelled."""
        msgid = 0

        def open_call() -> None:
            nonlocal msgid
            read = partial(to_answer, wanted=wanted)
            msgid, request = self._calls.open(method, params(), call, read, options)
            try:
                self._connect()
            except BaseException:
                self._calls.close(msgid)
                raise
            self._transport.send(request)

        def grant(count: int) -> None:
            if self._is_open:
                self._transport.send(self._calls.credit(msgid, count))

        if not self._is_open:
            raise ClientClosed
        call = SyncTokenStream(self.wait_for, open_call, grant, window=WINDOW, retry=self.retry)
        open_call()
        try:
            yield call
        finally:
            cancel = self._calls.close(msgid)
            if cancel is not None and self._is_open:
                self._transport.send(cancel)

    def _connect(self) -> None:
        """Waits until messages can be sent. The service must know of the lease before it works for us."""
        if len(self._calls) == 1:  # the one being opened
            self._transport.forget_losses()
        try:
            self._transport.connect(self.timeout)
        except GenbatchError as error:
            self._fail_all(error)
            raise
        self._last_beat = 0.0
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._transport.send(self._calls.heartbeat(LEASE_S))

    def _fail_all(self, error: GenbatchError) -> None:
        for cancel in self._calls.fail_all(error):
            if self._is_open:
                self._transport.send(cancel)
