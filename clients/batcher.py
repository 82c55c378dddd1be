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

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.runtime.background import background
from genbatch.actors.service import Service, open_service
from genbatch.clients.interface import Stream
from genbatch.clients.request import GenerateParams, MessageLike, build_request
from genbatch.clients.token_stream import TokenStream
from genbatch.nif.engine import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import GenerateRequest, Result, Token

CLIENT = "in-process"


class BatcherClient:
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

    async def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        stats = await self._dispatcher.call("stats", {}, client=CLIENT, on_token=None)
        assert isinstance(stats, dict)
        return stats

    async def _call(self, request: GenerateRequest, on_token: Callable[[Token], None] | None) -> Result:
        method = "generate" if on_token is None else "stream"
        params = msgspec.structs.asdict(request)
        result = await self._dispatcher.call(method, params, client=CLIENT, on_token=on_token)
        assert isinstance(result, Result)
        return result


@asynccontextmanager
async def open_batcher(
    model: str = "smollm2",
    *,
    bind: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> AsyncIterator[BatcherClient]:
    """Loads a model and serves it to this program.

    Args:
        model: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        bind: a ZeroMQ address to serve other programs at as well.
        progress: called as progress(stage, done, total) while loading, on another thread.
        options: the fields of EngineOptions and BatcherOptions, by name.

    Raises:
        ModelError: the model cannot be found, read or served.
        OptionError: there is no such option, or its value is out of range.
    """
    engine_options, batcher_options = split_options(model, options)
    async with open_service(engine_options, batcher_options, bind=bind, progress=progress) as service:
        yield BatcherClient(service)


def split_options(model: str, options: dict[str, Any]) -> tuple[EngineOptions, BatcherOptions]:
    """The two layers' options out of one set of keywords.

    Raises:
        OptionError: there is no such option, or its value is out of range.
    """
    engine_names = {field.name for field in fields(EngineOptions)} - {"model_path"}
    batcher_names = {field.name for field in fields(BatcherOptions) if field.init}
    for name in options:
        if name not in engine_names | batcher_names:
            raise OptionError(name, "there is no such option")
    engine = {name: value for name, value in options.items() if name in engine_names}
    batcher = {name: value for name, value in options.items() if name in batcher_names}
    return EngineOptions(model_path=model, **engine), BatcherOptions(**batcher)
