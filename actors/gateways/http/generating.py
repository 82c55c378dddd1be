"""Generating: the ASGI application behind the endpoints that generate.

A request is cancelled when its client goes away, while it waits or runs, streamed or not.

FillIn joins a prompt and its suffix for fill-in-the-middle models. Such models were trained with marks around the text
before a gap and after it. Each mark is one token of the model, which shows whether a model has these marks.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import trio
from starlette.types import Receive, Scope, Send

from genbatch.actors.batcher.messages import RETRY_AFTER_DRAIN_MS
from genbatch.actors.batcher.open_requests import LEAST_RETRY_MS
from genbatch.actors.gateways.http.anthropic import MessageAnswer
from genbatch.actors.gateways.http.bodies import JSON, Fields, HTTPRequest, decode_json, renamed
from genbatch.actors.gateways.http.openai_answer import OpenAIAnswer
from genbatch.actors.gateways.http.openai_request import read_chat
from genbatch.actors.gateways.http.responses import Conversations, ResponseAnswer, read_response
from genbatch.actors.gateways.http.service_calls import (
    OURSELVES,
    HTTPCaller,
    HTTPCalls,
    OpenCalls,
    TokenNames,
    with_headers,
)
from genbatch.actors.runtime.sleeper import Sleeper
from genbatch.actors.runtime.supervisor import background
from genbatch.proto.errors import DeadlineExceeded, EngineError, GenbatchError, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.messages import Choice, GenerateRequest, Result, Token

logger = logging.getLogger(__name__)

AnswerPart = TypeVar("AnswerPart", Result, Choice)
CountTokens = Callable[[str, str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class GapFormat:
    """A model family's notation of a gap: each of `marks` is followed by the part with its name in `parts`."""

    marks: tuple[str, ...]
    parts: tuple[str, ...]

    def write(self, prefix: str, suffix: str) -> str:
        """Return the prompt with the marks."""
        texts = {"prefix": prefix, "suffix": suffix, "gap": ""}
        return "".join(mark + texts[part] for mark, part in zip(self.marks, self.parts, strict=True))


FORMATS = (
    # Qwen Coder, CodeGemma, Granite from 3.3 on.
    GapFormat(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("prefix", "suffix", "gap")),
    # StarCoder, Granite before.
    GapFormat(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("prefix", "suffix", "gap")),
    # DeepSeek Coder.
    GapFormat(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("prefix", "suffix", "gap")),  # noqa: RUF001
    # Codestral.
    GapFormat(("[SUFFIX]", "[PREFIX]"), ("suffix", "prefix")),
)


class FillIn:
    """Knows the gap marks of each model that a request has asked for.

    Args:
        count_tokens: counts the tokens of a text.
    """

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._known: dict[str, GapFormat | None] = {}  # by the model's id

    async def prompt(self, model: str, prefix: str, suffix: str) -> str:
        """Return the prompt with which `model` fills the gap between `prefix` and `suffix`.

        Raises:
            InvalidRequest: the model was not made for it.
        """
        if model not in self._known:
            self._known[model] = await self._look(model)
        format = self._known[model]
        if format is None:
            raise InvalidRequest("suffix", "this model has no fill-in-the-middle tokens, and can only continue text")
        return format.write(prefix, suffix)

    async def _look(self, model: str) -> GapFormat | None:
        for known in FORMATS:
            if all([await self._count_tokens(model, mark) == 1 for mark in known.marks]):
                return known
        return None


# The most waiting tokens of one stream. A reader that is so far behind is not reading.
MAX_WAITING = 4096


class TokenQueue:
    """The queue of one stream's tokens, and its end.

    Args:
        on_overflow: called when the queue is full; the stream then has lost a token and cannot continue.
    """

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self.results: Sequence[Result] = ()
        self.error: GenbatchError | None = None
        self.has_ended = False
        self._on_overflow = on_overflow
        self._waiting: list[tuple[int, Token]] = []
        self._reader = Sleeper()
        self._heartbeat_at = trio.current_time() + HEARTBEAT_S  # when the stream will have been silent for too long

    def put(self, choice: int, token: Token) -> None:
        """Add the next token of a choice; do not block or raise."""
        if len(self._waiting) >= MAX_WAITING:
            self._on_overflow()
            return
        self._waiting.append((choice, token))
        self._reader.wake()

    def end(self, results: Sequence[Result]) -> None:
        """End the queue after the last token."""
        self.results = results
        self._end()

    def fail(self, error: GenbatchError) -> None:
        """End the queue with an error."""
        self.error = error
        self._end()

    async def take(self) -> list[tuple[int, Token]]:
        """Wait for a token, the end or the time of a heartbeat; return all waiting tokens with their choices."""
        while not (self._waiting or self.has_ended or self.is_silent):
            await self._reader
        taken, self._waiting = self._waiting, []
        return taken

    @property
    def is_silent(self) -> bool:
        """Whether no event was sent for too long, so that a heartbeat is due."""
        return trio.current_time() >= self._heartbeat_at

    def sent(self) -> None:
        """Note that an event was sent."""
        self._heartbeat_at = trio.current_time() + HEARTBEAT_S

    async def beat(self) -> None:
        """Wake the reader whenever a heartbeat is due, until cancelled. A deadline for each token would cost more."""
        while True:
            await trio.sleep_until(self._heartbeat_at)
            self._reader.wake()
            await trio.sleep(HEARTBEAT_S / 4)  # the reader may be sending

    def _end(self) -> None:
        self.has_ended = True
        self._reader.wake()


ReadBody = Callable[[dict[str, Any], Fields], HTTPRequest]
NewFields = Callable[[], Fields]

# With more tokens than this waiting for the socket, those of a choice share an event.
MAX_EVENTS = 16
# Seconds after which a silent stream sends a heartbeat: a prompt may take minutes, and proxies close a connection that
# is silent for longer (nginx after 60 s). Until the first heartbeat an error still has a status of its own.
HEARTBEAT_S = 10.0
_STREAM_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),  # tells proxies not to buffer events
]


class HTTPAnswer(Protocol):
    """Writes an answer in the shapes of one API."""

    id: str

    async def body(self, results: Sequence[Result]) -> Any: ...
    async def events(self, index: int, tokens: Sequence[Token]) -> bytes: ...
    def heartbeat(self) -> bytes: ...
    def ending(self, results: Sequence[Result]) -> bytes: ...
    def failure(self, error: GenbatchError) -> bytes: ...


class Generating:
    """Serves POST requests that generate.

    Args:
        read: makes a request of a body.
        calls: calls the service.
        open_calls: the running calls.
        new_fields: makes a reader of a body's fields.
    """

    stream_type = b"text/event-stream; charset=utf-8"

    def __init__(self, read: ReadBody, calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields = Fields) -> None:
        self._read = read
        self._new_fields = new_fields
        self._calls = calls
        self._open_calls = open_calls
        self._fill_in = FillIn(self._count_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error before the first byte is raised."""
        state = scope["state"]
        caller: HTTPCaller = state["caller"]
        fields = self._new_fields()
        request = self._asked(decode_json(state["body"]), caller, fields)
        card = await self._calls.model(request.model)
        request.requests[:] = [msgspec.structs.replace(each, model=card.id) for each in request.requests]
        for name in () if card.thinks or not card.n_ctx else request.thinking:  # n_ctx is 0 before the first load
            fields.ignore(name)
        answer = self._answer(request, card.id, caller)
        caller = replace(caller, request_id=answer.id)
        if fields.ignored:
            logger.debug("request %s: these fields are ignored: %s", answer.id, ", ".join(fields.ignored))
        # The id under OpenAI's and Anthropic's names, and the ignored fields.
        send = with_headers(send, {"x-request-id": answer.id, "request-id": answer.id, **fields.headers})
        if request.stream:
            await self._stream(request, caller, answer, receive, send)
            return
        response: JSON | None = None
        async with background() as nursery:
            nursery.start_soon(cancel_when_gone, receive, nursery.cancel_scope)
            with self._open_calls.open():
                results = await self._results(request, caller, None)
                response = JSON(await answer.body(results))
        if response is not None:
            await response(scope, receive, send)

    def _asked(self, body: dict[str, Any], caller: HTTPCaller, fields: Fields) -> HTTPRequest:
        return self._read(body, fields)

    async def _count_tokens(self, model: str, text: str) -> int:
        params = {"prompt": text, "add_special_tokens": False, "model": model}
        return len(await self._calls.token_ids(params, OURSELVES))

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        return OpenAIAnswer(request, model, TokenNames() if request.ids_for_text else self._calls.texts(model))

    async def _results(
        self, request: HTTPRequest, caller: HTTPCaller, put: Callable[[int, Token], None] | None
    ) -> Sequence[Result]:
        """Return the results of all prompts; `put` gets their tokens. The first failure ends all of them.

        No more prompts wait or run at a time than the service has slots, so that a list of any length finds room.
        Once a prompt has its result, other clients that fill the queue delay the rest and do not end it.
        """
        arrived_at = trio.current_time()
        # Both ask the model's tokenizer, so they may have to wait until the model is loaded.
        if request.suffix:
            await self._fill_gaps(request)
        if request.echo and request.num_top is not None:
            await self._tokenize(request, caller)
        several = len(request.requests) > 1
        width = 1
        if several:
            card = await self._calls.known_model(request.requests[0].model, caller)
            width = max(1, card.n_parallel // request.n)
        places = trio.Semaphore(width)
        results: dict[int, Result] = {}
        failures: list[GenbatchError] = []

        async def answer_choice(index: int) -> None:
            on_token = None if put is None else partial(_put, put, index * request.n)
            try:
                suffix = f"/{index}" if several else ""
                named = replace(caller, request_id=caller.request_id + suffix)
                async with places:
                    while index not in results:
                        each = request.requests[index]
                        if several:
                            each = _with_time_left(each, trio.current_time() - arrived_at)
                        try:
                            results[index] = _finished(await self._calls.generate(each, named, on_token))
                        except QueueFull as error:
                            if not results:
                                raise
                            await trio.sleep((error.retry_after_ms or LEAST_RETRY_MS) / 1000)
            except GenbatchError as error:
                failures.append(renamed(error, request.names))
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(request.requests)):
                nursery.start_soon(answer_choice, index)
        if failures:
            raise failures[0]
        return [results[index] for index in sorted(results)]

    async def _fill_gaps(self, request: HTTPRequest) -> None:
        """Write prompts with the model's marks around the gap before the suffix."""
        for index, each in enumerate(request.requests):
            prompt = await self._fill_in.prompt(each.model or "", each.prompt or "", request.suffix)
            request.requests[index] = msgspec.structs.replace(each, prompt=prompt)

    async def _tokenize(self, request: HTTPRequest, caller: HTTPCaller) -> None:
        """Tokenize the prompts, since a table of log-probs begins with the first token's text."""
        for index, each in enumerate(request.requests):
            if each.prompt is not None:
                ids = await self._calls.token_ids({"prompt": each.prompt, "model": each.model}, caller)
                if ids:  # an empty prompt is refused like any other
                    request.requests[index] = msgspec.structs.replace(each, prompt=None, token_ids=ids)

    async def _stream(
        self, request: HTTPRequest, caller: HTTPCaller, answer: HTTPAnswer, receive: Receive, send: Send
    ) -> None:
        async with background() as nursery:
            queue = TokenQueue(nursery.cancel_scope.cancel)

            async def produce() -> None:
                try:
                    with self._open_calls.open():
                        queue.end(await self._results(request, caller, queue.put))
                except GenbatchError as error:
                    queue.fail(error)

            # guard: a client that leaves its stream, HTTP
            nursery.start_soon(cancel_when_gone, receive, nursery.cancel_scope)
            nursery.start_soon(produce)
            nursery.start_soon(queue.beat)
            await _write(queue, answer, self.stream_type, send)


class Messages(Generating):
    """Serves Anthropic's /v1/messages."""

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        return MessageAnswer(request, model)


class Responses(Generating):
    """Serves OpenAI's /v1/responses, and remembers conversations that a later request may continue."""

    def __init__(self, calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields = Fields) -> None:
        self._conversations = Conversations()
        super().__init__(read_chat, calls, open_calls, new_fields)

    def _asked(self, body: dict[str, Any], caller: HTTPCaller, fields: Fields) -> HTTPRequest:
        return read_response(body, self._conversations, caller.owner, fields)

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        return ResponseAnswer(request, model, self._conversations, caller.owner)


async def _write(queue: TokenQueue, answer: HTTPAnswer, content_type: bytes, send: Send) -> None:
    """Send the events until the end; an error before the first event is raised, and a later error is the last event."""
    taken = await queue.take()
    if not taken and queue.error is not None:
        raise queue.error
    headers = [(b"content-type", content_type), *_STREAM_HEADERS]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        while taken or not queue.has_ended:
            events = b"".join([await answer.events(choice, tokens) for choice, tokens in _grouped(taken)])
            if not events and queue.is_silent:
                events = answer.heartbeat()
                queue.sent()
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                queue.sent()
            taken = await queue.take()
        if queue.error is not None:
            raise queue.error
        last = answer.ending(queue.results)
    except GenbatchError as error:
        last = answer.failure(error)
    await send({"type": "http.response.body", "body": last})


def _grouped(taken: Sequence[tuple[int, Token]]) -> list[tuple[int, list[Token]]]:
    """Group tokens by event: one token an event, or all waiting tokens of a choice when many wait."""
    if len(taken) <= MAX_EVENTS:
        return [(choice, [token]) for choice, token in taken]
    by_choice: dict[int, list[Token]] = {}
    for choice, token in taken:
        by_choice.setdefault(choice, []).append(token)
    return list(by_choice.items())


def _put(put: Callable[[int, Token], None], first_choice: int, token: Token) -> None:
    put(first_choice + token.choice, token)


def _with_time_left(request: GenerateRequest, waited_s: float) -> GenerateRequest:
    """Return the request with what is left of its deadline after a wait in this gateway.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    if request.deadline_s is None:
        return request
    if request.deadline_s <= waited_s:
        raise DeadlineExceeded("the deadline passed before the first token")
    return msgspec.structs.replace(request, deadline_s=request.deadline_s - waited_s)


def _finished(result: Result) -> Result:
    """Return the result that the client gets.

    An answer that was cut by a drain or by the caller's deadline gets the finish reason "length".

    Raises:
        Unavailable, DeadlineExceeded: the request ended before its first token.
        EngineError: the service failed at the request.
    """
    if result.usage.completion_tokens:
        result = msgspec.structs.replace(_cut(result), several=tuple(map(_cut, result.several)))
    reasons = {choice.finish_reason for choice in result.choices}
    if "cancelled" in reasons:
        raise Unavailable("the service ended the request before it was done", retry_after_ms=RETRY_AFTER_DRAIN_MS)
    if "deadline" in reasons:
        raise DeadlineExceeded("the deadline passed before the first token")
    if "error" in reasons:
        raise EngineError("the service failed at this request")
    return result


def _cut(part: AnswerPart) -> AnswerPart:
    """Return a result or a choice with a finish reason that every API has."""
    is_cut = part.finish_reason in ("cancelled", "deadline")
    return msgspec.structs.replace(part, finish_reason="length") if is_cut else part


async def cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
