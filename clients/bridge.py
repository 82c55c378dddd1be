"""The bridge to trio: use clients that are written for trio from asyncio and from threads.

    asyncio task --TrioThread.run--> trio task of the client, on trio's thread
                 <--- call_soon_threadsafe ---

A `Client` runs a method in the calling task on trio, and on the bridge's thread on asyncio. A BlockingClient is for
programs without an event loop. Cancelling an asyncio task, or leaving a stream's body, cancels the trio task, which
frees the sequence.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import outcome
import sniffio
import trio

from genbatch.clients.interface import OTHER_READER, CallResult, Client, ClientClosed, ClientError, SyncClient
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import GenerateRequest, Token

T = TypeVar("T")
# The most unread tokens of a stream; then the bridge waits for the reader.
WINDOW = 256


def runs_on_asyncio() -> bool:
    """Return whether the caller is a task of asyncio."""
    try:
        return sniffio.current_async_library() == "asyncio"
    except sniffio.AsyncLibraryNotFoundError:
        return False


class ForeignStream(CallResult):
    """The tokens of a stream on trio's thread, for a reader on another thread.

    `feed` runs on trio, and calls `changed` to wake the reader.
    """

    def __init__(self) -> None:
        super().__init__()
        self._room = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    async def feed(self, opening: AbstractAsyncContextManager[Any]) -> None:
        """Read a stream to its end; wait while `WINDOW` tokens are unread."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            async with opening as source:
                async for token in source:
                    self.push(token)
                    while len(self.tokens) >= WINDOW:
                        self._room = trio.Event()
                        if len(self.tokens) >= WINDOW:  # the reader may have made room meanwhile
                            await self._room.wait()
                self.finish(source.result)
        except GenbatchError as error:
            self.fail(error)

    def cut(self, done: "Future[None]") -> None:
        """End the stream after `feed` has ended without the final, for example with the client."""
        if self.final is None:
            fault = None if done.cancelled() else done.exception()
            self.final = outcome.Error(fault or ClientClosed())
            self.changed()

    def take(self) -> Token:
        """Return the next token, and let a waiting `feed` continue."""
        token = self.tokens.popleft()
        if len(self.tokens) == WINDOW // 2 and self.final is None and self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._make_room)
        return token

    def _make_room(self) -> None:
        self._room.set()


class AsyncioStream(ForeignStream):
    """A stream for a task of asyncio."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        while not self.tokens and self.final is None:
            if self._reader is not None and not self._reader.done():
                raise ClientError(OTHER_READER)
            reader = self._reader = self._loop.create_future()
            if self.tokens or self.final is not None:  # they arrived before `changed` could see the reader
                break
            await reader
        self._reader = None
        if self.tokens:
            return self.take()
        self.unwrap()
        raise StopAsyncIteration

    def changed(self) -> None:
        """Wake the reader."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._loop.call_soon_threadsafe(_wake, reader)


def _wake(reader: "asyncio.Future[None]") -> None:
    if not reader.done():
        reader.set_result(None)


class BlockingStream(ForeignStream):
    """A stream for a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Event()

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        while not self.tokens and self.final is None:
            self._news.wait()
            self._news.clear()
        if self.tokens:
            return self.take()
        self.unwrap()
        raise StopIteration

    def changed(self) -> None:
        """Wake the reader."""
        self._news.set()


class ThreadCall(Generic[T]):
    """A call on trio from another thread.

    Args:
        thread: runs trio.
        nursery: runs the call there.
        call: the function to call.
    """

    def __init__(self, thread: "TrioThread", nursery: trio.Nursery, call: Callable[[], Awaitable[T]]) -> None:
        self.future: Future[T] = Future()
        self._thread = thread
        self._nursery = nursery
        self._call = call
        self._scope = trio.CancelScope()
        self._context = copy_context()
        self.future.add_done_callback(self._cancel)

    def start(self) -> None:
        """Start the task; runs on trio."""
        self._context.run(partial(self._nursery.start_soon, self._run, name=self._call))

    async def _run(self) -> None:
        """Run the call, and raise only a cancellation: another error would end the nursery."""
        try:
            with self._scope:
                try:
                    value = await self._call()
                except trio.Cancelled:
                    raise
                except BaseException as error:
                    with suppress(InvalidStateError):  # the caller has cancelled the future
                        self.future.set_exception(error)
                else:
                    with suppress(InvalidStateError):
                        self.future.set_result(value)
        finally:
            self.future.cancel()  # has no effect on a finished future

    def _cancel(self, done: "Future[T]") -> None:
        if done.cancelled():
            self._thread.soon(self._scope.cancel)


class TrioThread:
    """A thread that runs trio, for calls from other threads.

    Unlike a portal of anyio, it does not block the calling thread for a turn of trio.
    """

    def __init__(self) -> None:
        started: Future[tuple[trio.lowlevel.TrioToken, trio.Nursery]] = Future()
        self._stopping = trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve, started), name="genbatch-trio", daemon=True)
        self._thread.start()
        self._token, self._nursery = started.result()

    async def _serve(self, started: "Future[tuple[trio.lowlevel.TrioToken, trio.Nursery]]") -> None:
        async with trio.open_nursery() as nursery:
            started.set_result((trio.lowlevel.current_trio_token(), nursery))
            await self._stopping.wait()
            nursery.cancel_scope.cancel()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. In a fork of the process it does not."""
        return self._thread.is_alive()

    def start(self, call: Callable[..., Awaitable[T]], *args: Any) -> "Future[T]":
        """Start a call on trio; cancelling the future cancels the call.

        Raises:
            ClientClosed: the thread has ended, or this process is a fork.
        """
        if not self.is_alive:
            raise ClientClosed
        job = ThreadCall(self, self._nursery, partial(call, *args))
        try:
            self._token.run_sync_soon(job.start)
        except trio.RunFinishedError as error:
            raise ClientClosed from error
        return job.future

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function on trio, if the thread still runs.

        In a fork it does not, and trio's lock may have been taken at the fork: it would never be free again.
        """
        if self.is_alive:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(call)

    def stop(self) -> None:
        """Cancel the calls, and end the thread."""
        self.soon(self._stopping.set)
        self._thread.join()

    async def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await a call on trio; cancelling the task cancels the call."""
        return await asyncio.wrap_future(self.start(call, *args))

    @asynccontextmanager
    async def stream(self, opening: AbstractAsyncContextManager[Any]) -> AsyncIterator[AsyncioStream]:
        """Open a trio stream for asyncio; leaving the body cancels the stream."""
        stream = AsyncioStream()
        feeding = self.start(stream.feed, opening)
        feeding.add_done_callback(stream.cut)
        try:
            yield stream
        finally:
            feeding.cancel()


@asynccontextmanager
async def hosted(manager: AbstractAsyncContextManager[T]) -> AsyncIterator[tuple[TrioThread, T]]:
    """Enter a context manager of trio from asyncio, on a thread that ends with the body.

    If the manager's own tasks fail, the body is cancelled and their error is raised.
    """
    thread = TrioThread()  # takes a millisecond
    try:
        hosting = Hosting(manager, thread)
        try:
            value = await asyncio.wrap_future(hosting.ready)
        except asyncio.CancelledError:
            hosting.running.cancel()
            raise
        async with _cancelled_with(hosting.running):
            try:
                yield thread, value
            finally:
                hosting.leave()
    finally:
        if thread.is_alive:
            # Joining blocks, so it runs on another thread. In a fork there is neither.
            await _to_the_end(asyncio.to_thread(thread.stop))


@contextmanager
def hosted_plainly(manager: AbstractAsyncContextManager[T]) -> Iterator[tuple[TrioThread, T]]:
    """Enter a context manager of trio without an event loop, on a thread that ends with the body.

    If the manager's own tasks fail, their error is raised after the body.
    """
    thread = TrioThread()
    try:
        hosting = Hosting(manager, thread)
        try:
            value = hosting.ready.result()
        except BaseException:  # such as Ctrl-C
            hosting.running.cancel()
            raise
        try:
            yield thread, value
        finally:
            hosting.leave()
            hosting.running.result()
    finally:
        thread.stop()


class Hosting(Generic[T]):
    """Keeps a context manager of trio open on a thread until `leave`.

    Args:
        manager: the context manager.
        thread: runs it.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T], thread: TrioThread) -> None:
        self.ready: Future[T] = Future()
        self._manager = manager
        self._thread = thread
        self._leaving = trio.Event()
        self.running = thread.start(self._run)
        self.running.add_done_callback(self._ended)

    def leave(self) -> None:
        """Exit the context manager; `running` is done afterwards."""
        if self._thread.is_alive:
            self._thread.soon(self._leaving.set)
        elif not self.running.done():
            self.running.set_result(None)

    async def _run(self) -> None:
        """Enter the context manager, set `ready`, and exit after `leave`."""
        async with self._manager as value:
            self.ready.set_result(value)
            await self._leaving.wait()

    def _ended(self, done: "Future[None]") -> None:
        """Set the error of `ready`, if `run` has ended before it was ready."""
        if not self.ready.done():
            fault = None if done.cancelled() else done.exception()
            self.ready.set_exception(fault or ClientClosed())


@asynccontextmanager
async def _cancelled_with(running: "Future[None]") -> AsyncIterator[None]:
    """Cancel the body if `running` ends first; after the body, wait for the end of `running`."""
    loop, body = asyncio.get_running_loop(), asyncio.current_task()
    assert body is not None
    is_leaving = has_failed = False

    def fail() -> None:
        nonlocal has_failed
        if not is_leaving:
            has_failed = True
            body.cancel()

    running.add_done_callback(lambda _: loop.call_soon_threadsafe(fail))
    try:
        yield
    except asyncio.CancelledError:
        if not has_failed or body.uncancel() > 0:
            raise
    finally:
        is_leaving = True
        await _to_the_end(asyncio.wrap_future(running))


async def _to_the_end(work: Awaitable[T]) -> T:
    """Await work that must be finished; a cancellation meanwhile is raised afterwards."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break  # the result raises it
    if cancelled is not None and not future.cancelled() and future.exception() is None:
        raise cancelled
    return future.result()


class BlockingClient(SyncClient):
    """A `SyncClient` over a trio client on another thread.

    Args:
        thread: the thread of trio.
        client: the client on that thread.
    """

    def __init__(self, thread: TrioThread, client: Client) -> None:
        self._thread = thread
        self._client = client

    @contextmanager
    def open_stream(self, request: GenerateRequest) -> Iterator[BlockingStream]:
        """See `Client.open_stream`."""
        stream = BlockingStream()
        feeding = self._thread.start(stream.feed, self._client._open_stream(request))
        feeding.add_done_callback(stream.cut)
        try:
            yield stream
        finally:
            feeding.cancel()

    def ask(self, request: msgspec.Struct) -> Any:
        """See `Client.ask`."""
        calling = self._thread.start(self._client._ask, request)
        try:
            return calling.result()
        except BaseException:  # such as Ctrl-C
            calling.cancel()
            raise
