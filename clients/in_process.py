"""open_batcher: a Batcher in the caller's own program, and the client for it.

    async with open_batcher("smollm2", n_parallel=4) as batcher:
        result = await batcher.generate("The capital of France is", max_tokens=8)
        async with batcher.stream(messages=[{"role": "user", "content": "Hello"}]) as stream:
            async for token in stream:
                print(token.text, end="")

The model is loaded and the supervision tree runs for as long as the body does. Cancelling a call's scope, or leaving
a stream's body, cancels the request and frees its KV.
"""

import atexit
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from genbatch.actors.batcher.messages import LoadSession, SaveSession
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.dispatcher import Caller, Dispatcher
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.clients.bridge import BlockingClient, TrioThread, hosted, hosted_plainly, runs_on_asyncio
from genbatch.clients.interface import (
    Client,
    MessageLike,
    TokenStream,
    asked_method,
    build_tokenize,
)
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import GenerateRequest, Result, Token

# The in-process client's identity: remote clients' default deadline and queue shares do not apply to it.
CLIENT = ""


class BatcherClient(Client):
    """The in-process client; any number of tasks may use it at once. Implements `Client`, on trio and on asyncio.

    Args:
        service: owns the Batcher.
        thread: the thread that runs trio, for a program on asyncio.
    """

    def __init__(self, service: Service, thread: TrioThread | None = None) -> None:
        self.service = service
        self._thread = thread
        self._dispatcher = Dispatcher(service.batcher)

    @asynccontextmanager
    async def _open_stream(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
        stream = TokenStream()

        async def produce() -> None:
            try:
                stream.finish(await self._call(request, stream.push))
            except GenbatchError as error:
                stream.fail(error)

        async with background() as nursery:
            nursery.start_soon(produce)
            yield stream

    async def _ask(self, request: msgspec.Struct) -> Any:
        if isinstance(request, GenerateRequest):  # `build_request` has checked its types
            return await self._call(request, None)
        # Send a map, because the dispatcher checks the types of a map and a struct's constructor checks none.
        fields = msgspec.structs.asdict(request)
        return await self._dispatcher.call(asked_method(request).name, fields, Caller(CLIENT))

    async def save_session(
        self, messages: Sequence[MessageLike], *, tenant: str = "", model: str | None = None
    ) -> bytes:
        """Return the KV of a conversation's evaluated prefix; empty if no KV of it is cached.

        Args:
            tenant: the tenant of the conversation's requests.
            model: the model or adapter of the conversation's requests.

        Raises:
            InvalidRequest: the messages are no conversation.
            Unavailable: the model is in another process.
        """
        request = build_tokenize(None, messages, add_special_tokens=True)
        state: bytes = await self._session(SaveSession(request.messages or [], tenant, model))
        return state

    async def load_session(self, state: bytes, *, tenant: str = "", model: str | None = None) -> int:
        """Load the bytes of `save_session`, so that requests with this prefix do not evaluate it again.

        The bytes are trusted: a person who can change the bytes can change the model's answers.

        Returns:
            The number of loaded positions.

        Raises:
            InvalidRequest: the data is damaged, does not fit, or is of another model, precision or block size.
            Unavailable: the model is in another process, or no sequence is free.
        """
        length: int = await self._session(LoadSession(state, tenant, model))
        return length

    async def _session(self, message: SaveSession | LoadSession) -> Any:
        if self.service.engine is None:
            raise Unavailable("sessions are kept only where the model is in this process")
        return await self._run(partial(self.service.batcher.call, timeout=None), message)

    async def _call(self, request: GenerateRequest, on_token: Callable[[Token], None] | None) -> Result:
        method = "generate" if on_token is None else "stream"
        result = await self._dispatcher.call(method, request, Caller(CLIENT, on_token))
        assert isinstance(result, Result)
        return result


class BatcherOpening:
    """The context manager of `open_batcher`. Enter it once, with `async with` on trio or asyncio, or with `with`."""

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[BatcherClient]]) -> None:
        self._open_client = open_client
        self._exits: AsyncExitStack | None = None
        self._exit: ExitStack | None = None

    async def __aenter__(self) -> BatcherClient:
        async with AsyncExitStack() as exits:
            if runs_on_asyncio():
                thread, client = await exits.enter_async_context(hosted(self._open_client()))
                client = BatcherClient(client.service, thread)
            else:
                client = await exits.enter_async_context(self._open_client())
            self._exits = exits.pop_all()
        return client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._exits is not None
        return await self._exits.__aexit__(kind, error, traceback)

    def __enter__(self) -> BlockingClient:
        with ExitStack() as exits:
            thread, client = exits.enter_context(hosted_plainly(self._open_client()))
            self._exit = exits.pop_all()
        # A program may end without `__exit__`: its threads would wait for the end of trio, and the program for them.
        atexit.register(self._exit.close)
        return BlockingClient(thread, client)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._exit is not None
        atexit.unregister(self._exit.close)
        return self._exit.__exit__(kind, error, traceback)


def open_batcher(
    model: str = "smollm2",
    *,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> BatcherOpening:
    """Load a model and serve it to this program, inside `async with` on trio or asyncio, or inside a plain `with`.

    On asyncio, and without an event loop, the Batcher runs on a thread of its own.

    Args:
        model: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        progress: called as progress(stage, done, total) while loading, on another thread.
        options: the fields of EngineOptions, BatcherOptions and ServiceOptions, by name: bind="ipc://..." serves other
            programs as well, engine="process" keeps the model in a process of its own.

    Raises:
        ModelError: the model cannot be found, read or served.
        OptionError: there is no such option, or its value is out of range.
    """
    return BatcherOpening(partial(_open_client, model, progress, options))


@asynccontextmanager
async def _open_client(
    model: str, progress: Callable[[str, int, int], None] | None, options: dict[str, Any]
) -> AsyncIterator[BatcherClient]:
    engine_options, batcher_options, service_options = split_options(model, options)
    async with open_service(engine_options, batcher_options, service_options, progress=progress) as service:
        yield BatcherClient(service)


# The option names of transformers' continuous batching.
OTHER_NAMES = {"scheduler_type": "scheduler", "page_size": "block_size"}


def split_options(model: str, options: dict[str, Any]) -> tuple[EngineOptions, BatcherOptions, ServiceOptions]:
    """Split keywords into the three kinds of options.

    Raises:
        OptionError: there is no such option, or its value is out of range.
    """
    for other, name in OTHER_NAMES.items():
        if other in options:
            if name in options:
                raise OptionError(other, f"is another name of {name}, which is given too")
            options = {name if option == other else option: value for option, value in options.items()}
    engine_names = {field.name for field in fields(EngineOptions)} - {"model_path"}
    batcher_names = {field.name for field in fields(BatcherOptions) if field.init}
    service_names = {field.name for field in fields(ServiceOptions)}
    for name in options:
        if name not in engine_names | batcher_names | service_names:
            raise OptionError(name, "there is no such option")
    engine = {name: value for name, value in options.items() if name in engine_names}
    batcher = {name: value for name, value in options.items() if name in batcher_names}
    service = {name: value for name, value in options.items() if name in service_names}
    return EngineOptions(model_path=model, **engine), BatcherOptions(**batcher), ServiceOptions(**service)
