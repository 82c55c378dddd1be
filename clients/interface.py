"""The interface of all clients, in-process and over a network, and the functions that build their requests.

    result = await client.generate("The capital of France is", max_tokens=8)
    async with client.stream(messages=[{"role": "user", "content": "Hello"}]) as stream:
        async for token in stream:
            print(token.text, end="")
    print(stream.result.usage)

Errors of requests are in genbatch.proto.errors. This module has the errors of a client's misuse.
"""

import struct
from base64 import b64decode
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import update_wrapper, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import msgspec
import outcome
import trio

from genbatch.actors.runtime.sleeper import Sleeper
from genbatch.proto.codec import to_generate_request
from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import (
    DetokenizeRequest,
    Effort,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    KeepSessionRequest,
    Message,
    Ranking,
    ResponseFormat,
    Result,
    ResumeSessionRequest,
    ScoreRequest,
    Scores,
    SessionState,
    Token,
    TokenizeRequest,
    Tool,
    ToolChoice,
    ranking_of,
)
from genbatch.proto.methods import Method, method_of
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    LoadAdapterRequest,
    LoadModelRequest,
    ModelCard,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)
from genbatch.proto.validation import check_type


class ClientError(Exception):
    """Root of these errors."""

    def __reduce__(self) -> tuple[object, ...]:
        # pickle itself would call the class with the message alone
        return Exception.__new__, (type(self), *self.args), self.__dict__


OTHER_READER = "another task reads this stream: one task reads a stream, and gives its tokens to others"


class StreamNotEnded(ClientError):
    """A stream's result was read before its last token."""

    def __init__(self) -> None:
        super().__init__("the stream has no result yet: iterate over its tokens first")


class ClientClosed(ClientError):
    """The client was used outside its `with` or `async with` block."""

    def __init__(self) -> None:
        super().__init__("the client is not open: use it inside its with block, and not in a fork of the process")


MessageLike = Message | Mapping[str, object]


class GenerateParams(TypedDict, total=False):
    """The parameters beside the prompt; GenerateRequest documents their meanings and ranges."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    return_prompt_token_ids: bool
    truncate_prompt_tokens: int | None
    echo: bool
    skip_special_tokens: bool
    response_format: ResponseFormat | Mapping[str, object] | None
    grammar: str | None
    regex: str | None
    tools: Sequence[Tool | Mapping[str, object]]
    tool_choice: ToolChoice | Mapping[str, str]
    parallel_tool_calls: bool
    reasoning: bool
    reasoning_effort: Effort | None
    max_thinking_tokens: int | None
    chat_template_kwargs: Mapping[str, object] | None
    continue_final_message: bool
    keep_stop: bool
    n: int
    priority: int
    deadline_s: float | None
    cache_ttl_s: float | None
    tenant: str
    model: str | None


def build_request(
    prompt: str | Sequence[int] | None,
    messages: Sequence[MessageLike] | None,
    params: GenerateParams,
) -> GenerateRequest:
    """Build a request from a client's arguments and check the types; the service checks the ranges.

    Raises:
        InvalidRequest: a parameter is unknown or of the wrong type; `field` is its path.
    """
    fields: dict[str, object] = dict(params)
    if isinstance(prompt, str) or prompt is None:
        fields["prompt"] = prompt
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        fields["token_ids"] = list(prompt)
    else:
        raise InvalidRequest("prompt", f"expected a string or token ids, got {type(prompt).__name__}")
    if messages is not None:
        fields["messages"] = _plain(messages)
    return to_generate_request(fields)


def build_tokenize(
    prompt: str | None, messages: Sequence[MessageLike] | None, add_special_tokens: bool, model: str | None = None
) -> TokenizeRequest:
    """Build the request of `Client.tokenize`, as `build_request` does."""
    fields: dict[str, object] = {"prompt": prompt, "add_special_tokens": add_special_tokens, "model": model}
    if messages is not None:
        fields["messages"] = _plain(messages)
    request: TokenizeRequest = check_type(fields, TokenizeRequest)
    return request


Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class EmbedParams(TypedDict, total=False):
    """The parameters beside the texts; EmbedRequest documents their meanings and ranges."""

    dimensions: int | None
    priority: int
    deadline_s: float | None
    tenant: str
    model: str | None


def build_embed(texts: Texts, params: EmbedParams) -> EmbedRequest:
    """Build the request of `Client.embed`. It asks for vectors as bytes, which are half as long as numbers."""
    plain: object = texts
    if not isinstance(texts, str) and isinstance(texts, Sequence):
        plain = [text if isinstance(text, str | int) else list(text) for text in texts]
    fields = {"input": plain, "encoding_format": "base64", **params}
    request: EmbedRequest = check_type(fields, EmbedRequest)
    return request


def read_embeddings(answer: Embeddings) -> Embeddings:
    """Convert the answer's vectors to lists of numbers."""
    vectors: list[list[float] | str] = []
    for vector in answer.embeddings:
        if isinstance(vector, str):
            content = b64decode(vector)
            vectors.append(list(struct.unpack(f"<{len(content) // 4}f", content)))
        else:
            vectors.append(vector)
    return Embeddings(embeddings=vectors, usage=answer.usage)


class ScoreParams(TypedDict, total=False):
    """The parameters beside query and documents; ScoreRequest documents their meanings and ranges."""

    instruction: str | None
    raw_scores: bool
    truncate: bool
    max_document_tokens: int | None
    priority: int
    deadline_s: float | None
    tenant: str
    model: str | None


def build_score(documents: Sequence[str], query: str | Sequence[str] | None, params: ScoreParams) -> ScoreRequest:
    """Build the request of `Client.score` and `Client.rerank`, as `build_request` does."""
    plain: object = query if query is None or isinstance(query, str) else list(query)
    texts = documents if isinstance(documents, str) else list(documents)
    request: ScoreRequest = check_type({"documents": texts, "query": plain, **params}, ScoreRequest)
    return request


def _plain(messages: Sequence[MessageLike]) -> list[object]:
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidRequest("messages", f"expected a list of messages, got {type(messages).__name__}")
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]


class Stream(Protocol):
    """An iterator over the tokens as they arrive, with the result after the last token."""

    def __aiter__(self) -> AsyncIterator[Token]: ...

    @property
    def result(self) -> Result:
        """Return the result, after the iteration has ended.

        Raises:
            StreamNotEnded: the iteration has not ended.
        """


class SyncStream(Protocol):
    """A Stream for a plain `for`."""

    def __iter__(self) -> Iterator[Token]: ...

    @property
    def result(self) -> Result:
        """See `Stream.result`."""


T = TypeVar("T")
Params = ParamSpec("Params")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request of a method in `proto/methods.py`, and how to read its answer."""

    request: msgspec.Struct
    read: Callable[[Any], T]


class call_of(Generic[Params, T]):
    """Makes a method of a function that returns a `Call`: awaited on a `Client`, blocking on a `SyncClient`.

    So a method of the protocol is written once for all clients ([ADR 77](../ADRs/0077-a-call-is-written-once.md)).
    """

    def __init__(self, build: Callable[Concatenate[Any, Params], Call[T]]) -> None:
        @wraps(build)
        async def awaited(client: "Client", *args: Params.args, **params: Params.kwargs) -> T:
            built = build(client, *args, **params)
            return built.read(await client.ask(built.request))

        @wraps(build)
        def blocking(client: "SyncClient", *args: Params.args, **params: Params.kwargs) -> T:
            built = build(client, *args, **params)
            return built.read(client.ask(built.request))

        self._awaited = awaited
        self._blocking = blocking
        update_wrapper(self, build)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: "Client", owner: object = None) -> Callable[Params, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: "SyncClient", owner: object = None) -> Callable[Params, T]: ...
    @overload
    def __get__(self, client: None, owner: object = None) -> Self: ...

    def __get__(self, client: "Client | SyncClient | None", owner: object = None) -> Any:
        if client is None:
            return self
        return MethodType(self._blocking if isinstance(client, SyncClient) else self._awaited, client)


def _whole(answer: T) -> T:
    return answer


class ClientCalls:
    """The methods with one request and one answer, of `Client` and `SyncClient` alike."""

    @call_of
    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Call[Result]:
        """Generate an answer and return it whole; cancelling the scope cancels the request.

        Args:
            prompt: text or token ids; None with `messages`.
            messages: a conversation, each turn a Message or a dict of role and content.
            params: the other fields of GenerateRequest.

        Raises:
            GenbatchError: the request failed; the class is one of genbatch.proto.errors.
        """
        return Call(build_request(prompt, messages, params), _whole)

    @call_of
    def embed(self, texts: Texts, **params: Unpack[EmbedParams]) -> Call[Embeddings]:
        """Return a vector for each text, as lists of numbers; cancelling the scope cancels the request.

        Args:
            texts: a text, the token ids of one, or a list of either.
            params: the other fields of EmbedRequest.

        Raises:
            GenbatchError: the request failed; InvalidRequest if the model gives no embeddings.
        """
        return Call(build_embed(texts, params), read_embeddings)

    @call_of
    def score(
        self, documents: Sequence[str], query: str | Sequence[str] | None = None, **params: Unpack[ScoreParams]
    ) -> Call[Scores]:
        """Return each document's scores: one number for each of the model's labels (`ModelCard.labels`).

        Args:
            documents: the texts.
            query: one query for all documents, one for each document, or None to score documents alone.
            params: the other fields of ScoreRequest.

        Raises:
            GenbatchError: the request failed; InvalidRequest if the model gives no scores.
        """
        return Call(build_score(documents, query, params), _whole)

    @call_of
    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **params: Unpack[ScoreParams]
    ) -> Call[Ranking]:
        """Sort the documents by their relevance to a query, the most relevant first.

        Args:
            top_n: how many documents to return; None returns all.
            params: the other fields of ScoreRequest.

        Raises:
            GenbatchError: as `score`; also if the model has several labels.
        """
        return Call(build_score(documents, query, params), lambda scores: ranking_of(scores, top_n))

    @call_of
    def stats(self) -> Call[dict[str, Any]]:
        """Return the service's counters. While the engine is down (see `engine`), only the gateway's are there."""
        return Call(StatsRequest(), _whole)

    @call_of
    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
        model: str | None = None,
    ) -> Call[list[int]]:
        """Return the token ids that `generate` would evaluate for a text or a conversation.

        Args:
            add_special_tokens: put the start token before `prompt`, if the model uses one.
            model: a name that `models` lists; None means the first name.
        """
        request = build_tokenize(prompt, messages, add_special_tokens, model)
        return Call(request, lambda answer: answer.token_ids)

    @call_of
    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> Call[str]:
        """Return the text of token ids, without special tokens; parts of a character become U+FFFD."""
        return Call(DetokenizeRequest(token_ids=list(token_ids), model=model), lambda answer: answer.text)

    @call_of
    def keep_session(
        self, name: str, messages: Sequence[MessageLike], *, model: str | None = None, tenant: str = ""
    ) -> Call[SessionState]:
        """Keep the KV of a conversation in the service's `session_dir`, under a name; replaces a session of this name.

        Args:
            name: letters, digits, ".", "_" and "-".
            messages: the conversation, as it was generated; its end is left out if the service has no KV of it.
            model, tenant: those of the conversation's requests.

        Raises:
            InvalidRequest: the name is not valid, or the service keeps no sessions.
            QueueFull: too many sessions are being kept or resumed.
            Unavailable: the disk cannot be written to now.
        """
        plain: Any = build_tokenize(None, messages, add_special_tokens=True).messages
        return Call(KeepSessionRequest(name=name, messages=plain, model=model, tenant=tenant), _whole)

    @call_of
    def resume_session(self, name: str, *, model: str | None = None, tenant: str = "") -> Call[SessionState]:
        """Load a kept session, so that the next request with its conversation does not evaluate it again.

        Args:
            name, model, tenant: those that the session was kept with.

        Raises:
            InvalidRequest: there is no such session, or it is damaged, or of another model, format or block size.
            QueueFull, Unavailable: as `keep_session`; also if there is no room for it now.
        """
        return Call(ResumeSessionRequest(name=name, model=model, tenant=tenant), _whole)

    @call_of
    def models(self) -> Call[tuple[ModelCard, ...]]:
        """Return the served models."""
        return Call(ModelsRequest(), lambda answer: answer.models)

    @call_of
    def health(self) -> Call[Health]:
        """Return the service's health: "ready", "draining", "stuck" or "down"."""
        return Call(HealthRequest(), _whole)

    @call_of
    def load_model(self, model: str | None = None, *, keep_alive: float | None = None) -> Call[tuple[ModelCard, ...]]:
        """Load a model that is served on demand; returns the served models.

        Args:
            model: a name that `models` lists; None means the first name.
            keep_alive: seconds without requests after which the model is unloaded. A negative number keeps it, 0
                unloads it as soon as it has no open request, None leaves the time as it is.
        """
        return Call(LoadModelRequest(model=model, keep_alive=keep_alive), lambda answer: answer.models)

    @call_of
    def load_adapter(self, name: str, path: str) -> Call[tuple[ModelCard, ...]]:
        """Load a LoRA adapter into the service; returns the served models. Only the operator may call this.

        Args:
            name: the adapter's name, for the `model` of requests.
            path: the adapter's absolute directory on the service's machine.
        """
        return Call(LoadAdapterRequest(name=name, path=path), lambda answer: answer.models)

    @call_of
    def unload_adapter(self, name: str, timeout_s: float = 30.0) -> Call[Drained]:
        """Unload a LoRA adapter: refuse new requests for it, and wait until its open requests have ended.

        Args:
            timeout_s: seconds after which open requests are cancelled.
        """
        return Call(UnloadAdapterRequest(name=name, timeout_s=timeout_s), _whole)

    @call_of
    def drain(self, timeout_s: float = 30.0) -> Call[Drained]:
        """Drain the service: refuse new requests, and wait until the open ones have ended. A drain is final.

        Args:
            timeout_s: seconds after which open requests are cancelled.
        """
        return Call(DrainRequest(timeout_s=timeout_s), _whole)


class OtherThread(Protocol):
    """A thread that runs trio, for callers on asyncio; `clients/bridge.py` has it."""

    async def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await a call on the thread."""
        ...

    def stream(self, opening: AbstractAsyncContextManager[Any]) -> AbstractAsyncContextManager[Stream]:
        """Open a stream on the thread."""
        ...


class Client(ClientCalls):
    """The interface of the clients for trio and asyncio. A subclass implements `_ask` and `_open_stream` for trio."""

    _thread: OtherThread | None = None  # runs the calls if the caller is on asyncio

    async def ask(self, request: msgspec.Struct) -> Any:
        """Send the request of a method in `proto/methods.py` and return its answer."""
        return await self._run(self._ask, request)

    def open_stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[Stream]:
        """Generate the answer of a request token by token."""
        opening = self._open_stream(request)
        return opening if self._thread is None else self._thread.stream(opening)

    async def _run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        if self._thread is not None:
            return await self._thread.run(call, *args)
        if not trio.lowlevel.in_trio_task():
            raise ClientError("this client was opened on trio: use it in the tasks of that trio program only")
        return await call(*args)

    async def _ask(self, request: msgspec.Struct) -> Any:
        raise NotImplementedError

    def _open_stream(self, request: GenerateRequest) -> AbstractAsyncContextManager["TokenStream"]:
        raise NotImplementedError

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AbstractAsyncContextManager[Stream]:
        """Generate an answer token by token; leaving the body early cancels the request.

        async with client.stream("Hello", max_tokens=8) as stream:
            async for token in stream:
                print(token.text, end="")
        print(stream.result.finish_reason)
        """
        return self.open_stream(build_request(prompt, messages, params))


class SyncClient(ClientCalls):
    """The interface of the clients without an event loop. A subclass implements `ask` and `open_stream`."""

    def ask(self, request: msgspec.Struct) -> Any:
        """See `Client.ask`."""
        raise NotImplementedError

    def open_stream(self, request: GenerateRequest) -> AbstractContextManager[SyncStream]:
        """See `Client.open_stream`."""
        raise NotImplementedError

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AbstractContextManager[SyncStream]:
        """See `Client.stream`; use it with `with` and `for`."""
        return self.open_stream(build_request(prompt, messages, params))


class CallResult:
    """A call's unread tokens and its result. Subclasses wake the reader in `changed`."""

    __slots__ = ("final", "tokens")

    def __init__(self) -> None:
        self.tokens: deque[Token] = deque()
        self.final: outcome.Outcome[Any] | None = None

    def push(self, token: Token) -> None:
        """Add the next token."""
        self.tokens.append(token)
        self.changed()

    def finish(self, result: object) -> None:
        """Set the result, unless the call has ended already."""
        self._end(outcome.Value(result))

    def fail(self, error: GenbatchError) -> None:
        """Set the error that ended the call, unless the call has ended already."""
        self._end(outcome.Error(error))

    def unwrap(self) -> Any:
        """Return the result.

        Raises:
            GenbatchError: the error that ended the call.
            StreamNotEnded: the call has not ended.
        """
        match self.final:
            case outcome.Value(value):
                return value
            case outcome.Error(error):
                raise error
        raise StreamNotEnded

    @property
    def result(self) -> Result:
        """Return the stream's result.

        Raises:
            GenbatchError: the error that ended the stream.
            StreamNotEnded: the stream has not ended.
        """
        result: Result = self.unwrap()
        return result

    def changed(self) -> None:
        """React to a new token or to the result; called after each."""

    def _end(self, final: outcome.Outcome[Any]) -> None:
        if self.final is None:
            self.final = final
            self.changed()


class TokenStream(CallResult):
    """A stream for one reading task; `push`, `finish` and `fail` are called on the event loop."""

    __slots__ = ("_reader",)

    def __init__(self) -> None:
        super().__init__()
        self._reader = Sleeper()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self.tokens or self.final is not None:
            await trio.lowlevel.checkpoint()
        while not self.tokens and self.final is None:
            try:
                await self._reader  # this is a checkpoint already; another one would double the cost
            except trio.BusyResourceError:
                raise ClientError(OTHER_READER) from None
        if self.tokens:
            return self.tokens.popleft()
        self.unwrap()
        raise StopAsyncIteration

    async def ended(self) -> Any:
        """Wait for the result, skip all tokens before it, and return or raise it."""
        while self.final is None:
            await self._reader
        return self.unwrap()

    def changed(self) -> None:
        """Wake the reader."""
        self._reader.wake()


async def generate_for(
    client: Client, request: GenerateRequest, on_token: Callable[[Token], None] | None = None
) -> Result:
    """Generate the result of an already validated request; calls `on_token` with each token as it arrives."""
    if on_token is None:
        result: Result = await client.ask(request)
        return result
    async with client.open_stream(request) as stream:
        async for token in stream:
            on_token(token)
    return stream.result


async def embed_for(client: Client, request: EmbedRequest | ScoreRequest) -> tuple[list[bytes], int]:
    """Return the vectors of an already validated request, float32 in little endian, and its prompt tokens."""
    if isinstance(request, ScoreRequest):
        scores: Scores = await client.ask(request)
        return [struct.pack(f"<{len(row)}f", *row) for row in scores.scores], scores.usage.prompt_tokens
    params: Any = msgspec.to_builtins(request)
    params.pop("encoding_format", None)
    embedded = await client.embed(params.pop("input"), **params)
    vectors = [struct.pack(f"<{len(vector)}f", *vector) for vector in embedded.embeddings]
    return vectors, embedded.usage.prompt_tokens


def asked_method(request: msgspec.Struct) -> Method:
    """Return the method of a request.

    Raises:
        TypeError: no method has this request type.
    """
    method = method_of(request)
    if method is None:
        raise TypeError(f"no method takes a {type(request).__name__}")
    return method
