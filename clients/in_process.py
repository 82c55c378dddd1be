"""open_batcher: a Batcher in the caller's own program, and the client for it.

    async with open_batcher("smollm2", n_parallel=4) as batcher:
        result = await batcher.generate("The capital of France is", max_tokens=8)
        async with batcher.stream(messages=[{"role": "user", "content": "Hello"}]) as stream:
            async for token in stream:
                print(token.text, end="")

The model is loaded and the supervision tree runs for as long as the body does. Cancelling a call's scope, or leaving
a stream's body, cancels the request and frees its KV.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any, Unpack

import msgspec

from genbatch.actors.batcher.messages import LoadSession, SaveSession
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.clients.interface import (
    GenerateParams,
    MessageLike,
    ServiceCalls,
    Stream,
    TokenStream,
    asked_method,
    build_request,
    build_tokenize,
)
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import GenerateRequest, Result, Token

# The program that runs the Batcher: others' default deadline and shares of the queue are not for it.
CLIENT = ""


class BatcherClient(ServiceCalls):
    """The in-process client; any number of tasks may use it at once. Implements `Client`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._dispatcher = Dispatcher(service.batcher)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        return await self._call(build_request(prompt, messages, params), None)

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AsyncIterator[Stream]:
        """See `Client.stream`."""
        request = build_request(prompt, messages, params)
        stream = TokenStream()

        async def produce() -> None:
            try:
                stream.finish(await self._call(request, stream.push))
            except GenbatchError as error:
                stream.fail(error)

        async with background() as nursery:
            nursery.start_soon(produce)
            yield stream

    async def ask(self, request: msgspec.Struct) -> Any:
        """See `ServiceCalls.ask`."""
        # A struct's constructor checks no types; the dispatcher checks those of a map.
        fields = msgspec.structs.asdict(request)
        return await self._dispatcher.call(asked_method(request).name, fields, client=CLIENT, on_token=None)

    async def save_session(
        self, messages: Sequence[MessageLike], *, tenant: str = "", model: str | None = None
    ) -> bytes:
        """The KV of a conversation's beginning, as far as it is evaluated; empty where nothing of it is at hand.

        Args:
            tenant: in whose name it was generated.
            model: with which adapter.

        Raises:
            InvalidRequest: it is not a conversation.
            Unavailable: the model is in another process.
        """
        request = build_tokenize(None, messages, add_special_tokens=True)
        state: bytes = await self._session(SaveSession(request, tenant, model))
        return state

    async def load_session(self, state: bytes, *, tenant: str = "", model: str | None = None) -> int:
        """Takes over what `save_session` gave: requests that begin with it do not evaluate it again.

        The bytes are trusted to be the model's own: whoever can change them can change what the model answers.

        Returns:
            How many positions it is.

        Raises:
            InvalidRequest: it is damaged, does not fit, or is of another model, precision or block size.
            Unavailable: the model is in another process, or no sequence is free.
        """
        length: int = await self._session(LoadSession(state, tenant, model))
        return length

    async def _session(self, message: SaveSession | LoadSession) -> Any:
        if self.service.engine is None:
            raise Unavailable("sessions are kept only where the model is in this process")
        return await self.service.batcher.call(message, timeout=None)

    async def _call(self, request: GenerateRequest, on_token: Callable[[Token], None] | None) -> Result:
        method = "generate" if on_token is None else "stream"
        result = await self._dispatcher.call(method, request, client=CLIENT, on_token=on_token)
        assert isinstance(result, Result)
        return result


@asynccontextmanager
async def open_batcher(
    model: str = "smollm2",
    *,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> AsyncIterator[BatcherClient]:
    """Loads a model and serves it to this program.

    Args:
        model: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        progress: called as progress(stage, done, total) while loading, on another thread.
        options: the fields of EngineOptions, BatcherOptions and ServiceOptions, by name: bind="ipc://..." serves other
            programs as well, engine="process" keeps the model in a process of its own.

    Raises:
        ModelError: the model cannot be found, read or served.
        OptionError: there is no such option, or its value is out of range.
    """
    engine_options, batcher_options, service_options = split_options(model, options)
    async with open_service(engine_options, batcher_options, service_options, progress=progress) as service:
        yield BatcherClient(service)


# What transformers' continuous batching calls them.
OTHER_NAMES = {"scheduler_type": "scheduler", "page_size": "block_size"}


def split_options(model: str, options: dict[str, Any]) -> tuple[EngineOptions, BatcherOptions, ServiceOptions]:
    """The three kinds of options out of one set of keywords.

    Raises:
        OptionError: there is no such option, or its value is out of range.
    """
    for other, name in OTHER_NAMES.items():
        if other in options:
            if name in options:
                raise OptionError(other, f"is another name of {name}, which is given too")
            options = {name if given == other else given: value for given, value in options.items()}
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
