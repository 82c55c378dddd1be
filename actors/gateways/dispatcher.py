"""Dispatcher: runs the methods of the service. It uses neither sockets nor bytes, so all gateways share it.

    dispatcher = Dispatcher(batcher)
    result = await dispatcher.call("generate", {"prompt": "Hello"}, Caller("host:localhost"))

Cancelling the task that waits here cancels the request.
"""

import logging
import sys
from array import array
from base64 import b64encode
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.scheduling.request import tenant_account
from genbatch.proto.codec import to_generate_request
from genbatch.proto.errors import (
    EngineError,
    Forbidden,
    GenbatchError,
    InvalidRequest,
    QueueFull,
    Unavailable,
    UnknownMethod,
)
from genbatch.proto.messages import (
    DrawnTokens,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    ScoreRequest,
    Scores,
    SessionRequest,
    Token,
    Usage,
)
from genbatch.proto.methods import METHODS, Lane, Method
from genbatch.proto.rpc import STREAM_OPTIONS, WIRE_VERSION
from genbatch.proto.service_messages import Health, HealthRequest, Hello, HelloRequest
from genbatch.proto.validation import check_type

logger = logging.getLogger(__name__)

OnToken = Callable[[Token], None]
Claimed = TypeVar("Claimed", GenerateRequest, EmbedRequest, ScoreRequest, SessionRequest)
# A restarted Batcher keeps the model in memory, so it is back within about this time.
RETRY_AFTER_RESTART_MS = 500
# The mailbox is emptied between two steps.
RETRY_AFTER_FULL_MS = 100
# The most text calls of one client at a time, the most bytes of one client's texts, and of all clients' texts.
MAX_TEXT_CALLS = 32
MAX_TEXT_BYTES = 2 * 2**20
MAX_TEXTS_BYTES = 16 * 2**20
# Bytes of one client's texts that are sent to the Batcher before the first of them is answered.
TEXT_TURN_BYTES = 32 * 2**10
RETRY_AFTER_TEXT_MS = 1000
# The most bytes of a gateway's memory for open requests: of one client, and of all clients. A stalled engine frees none
# of them. Other limits bound the number of calls, and the size of each call.
MAX_REQUEST_BYTES = 64 * 2**20
MAX_REQUESTS_BYTES = 256 * 2**20
# The most open calls of one client, and of a fleet's gateway, which bounds its own clients.
MAX_CALLS, MAX_GATEWAY_CALLS = 256, 65536


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a method, and the callback for its tokens.

    Args:
        client: the account of its connection (accepting.py), for fairness and logs.
        on_token: takes a streaming method's tokens on the event loop; it must not block.
        tenant: the tenant of its key or token; None at a gateway without keys and tokens.
        request_id: the request's name in logs and spans; "" if the gateway has none.
        drawn: the tokens that the caller has of a lost stream of this request.
    """

    client: str
    on_token: OnToken | None = None
    tenant: str | None = None
    request_id: str = ""
    drawn: tuple[DrawnTokens, ...] = ()

    @property
    def payer(self) -> str:
        """The account that its requests are charged to."""
        # guard: share of the key
        return self.client if self.tenant is None else tenant_account(self.tenant)


class TextBudget:
    """Bounds the text in open calls.

    A client above its share gets a retry hint, and its text is not kept. In-process callers, with the client name "",
    are not bounded.

    Args:
        max_bytes: the limit of one client.
        max_total_bytes: the limit of all clients together.
        max_calls: the most calls of one client; None if another part bounds them.
        work: a participle for the work on the texts, such as "read", for the refusal.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int, max_calls: int | None, work: str) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._max_calls = sys.maxsize if max_calls is None else max_calls
        self._work = work
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def taken(self, payer: str, size: int) -> Iterator[None]:
        """Reserve room for a call until it has ended or its caller has left.

        Raises:
            QueueFull: there is not enough room.
        """
        calls, mine, total = self._calls[payer], self._bytes[payer], self._bytes.total()
        # A client's only call always gets room: the size of a message is bounded elsewhere.
        if payer and calls and (calls >= self._max_calls or mine + size > self._max_bytes):
            reason = f"{calls} texts of {mine} bytes are being {self._work} for this client"
            raise QueueFull(reason, retry_after_ms=RETRY_AFTER_TEXT_MS)
        if payer and total + size > self._max_total_bytes:
            raise QueueFull(f"texts of {total} bytes are being {self._work}", retry_after_ms=RETRY_AFTER_TEXT_MS)
        self._bytes[payer] += size
        self._calls[payer] += 1
        try:
            yield
        finally:
            self._bytes[payer] -= size
            self._calls[payer] -= 1
            if not self._calls[payer]:
                del self._bytes[payer], self._calls[payer]


class TextTurns:
    """Sends each client's texts a few at a time, so that clients take turns at the tokenizer.

    A long text waits until the client's previous text is answered; short texts go together. In-process callers, with
    the client name "", do not wait.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # of sent texts, by client
        self._waiting: dict[str, deque[tuple[int, trio.Event]]] = {}

    @asynccontextmanager
    async def turn(self, payer: str, size: int) -> AsyncIterator[None]:
        """Wait for the client's turn, and keep it for as long as the body runs."""
        if payer and (payer in self._waiting or not self._has_room(payer, size)):
            await self._wait(payer, size)
        else:
            self._bytes[payer] += size
        try:
            yield
        finally:
            self._give_back(payer, size)

    async def _wait(self, payer: str, size: int) -> None:
        waiter = size, trio.Event()
        self._waiting.setdefault(payer, deque()).append(waiter)
        try:
            await waiter[1].wait()
        except trio.Cancelled:
            if waiter[1].is_set():
                self._give_back(payer, size)
            else:
                self._waiting[payer].remove(waiter)
                self._call_next(payer)
            raise

    def _has_room(self, payer: str, size: int) -> bool:
        return not self._bytes[payer] or self._bytes[payer] + size <= TEXT_TURN_BYTES

    def _give_back(self, payer: str, size: int) -> None:
        self._bytes[payer] -= size
        self._call_next(payer)

    def _call_next(self, payer: str) -> None:
        waiting = self._waiting.get(payer)
        while waiting and self._has_room(payer, waiting[0][0]):
            size, called = waiting.popleft()
            self._bytes[payer] += size
            called.set()
        if not waiting:
            self._waiting.pop(payer, None)
        if not self._bytes[payer]:
            del self._bytes[payer]


class Callee(Protocol):
    """The target of a gateway's calls: a Batcher's ref, or its replacement."""

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Call as ActorRef.call does."""
        ...


class Dispatcher:
    """Runs the methods of `proto/methods.py`.

    Args:
        batcher: a registry's ref to the Batcher, so that the Batcher may be restarted, or a fleet.
        of_fleet: whether the callers are gateways of a fleet. They name the payer and the tenant of a request, bound
            their own clients, and may drain.
    """

    def __init__(self, batcher: Callee, *, of_fleet: bool = False) -> None:
        self._batcher = batcher
        self._of_fleet = of_fleet
        self.max_calls = MAX_GATEWAY_CALLS if of_fleet else MAX_CALLS
        # The tokenizer has one thread, and prompts wait for it in the Batcher's queue.
        self._texts = TextBudget(MAX_TEXT_BYTES, MAX_TEXTS_BYTES, MAX_TEXT_CALLS, "read")
        self._turns = TextTurns()
        self._requests = TextBudget(MAX_REQUEST_BYTES, MAX_REQUESTS_BYTES, None, "answered")

    @staticmethod
    def streams(name: str) -> bool:
        """Return whether the method sends tokens before its result."""
        return name in METHODS and METHODS[name].streams

    async def call(
        self,
        method: str,
        params: dict[Any, Any] | msgspec.Struct,
        caller: Caller,
    ) -> object:
        """Run a method and return its result: a type of proto, or plain data.

        Args:
            method: its name.
            params: the unchecked parameters from the wire, or the method's request from a caller in this program.

        Raises:
            GenbatchError: every failure has this type.
        """
        try:
            row = METHODS[method]
        except KeyError:
            known = ", ".join(METHODS)
            raise UnknownMethod(f"no method {method[:64]!r}; there are {known}") from None
        if self._of_fleet:
            caller = replace(caller, tenant=None)  # a key names the gateway, not its clients
        # guard: drain is the operator's
        if row.is_operators and caller.tenant is not None:
            raise Forbidden(f"{method} is for the operator, at an address of this machine without keys or tokens")
        try:
            return await self._answer(row, params, caller)
        except GenbatchError:
            raise
        except MailboxFull as error:
            raise QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS) from error
        except ActorDown as error:
            raise Unavailable("the batcher is not running", retry_after_ms=RETRY_AFTER_RESTART_MS) from error
        except CallTimeout as error:
            raise Unavailable("the batcher does not answer", retry_after_ms=RETRY_AFTER_RESTART_MS) from error
        except Exception as error:
            # Keep the error's text from clients, since it may reveal internals.
            logger.exception("method %s of client %s failed", method, caller.client)
            raise EngineError("the service failed at this call") from error

    async def _answer(self, method: Method, params: dict[Any, Any] | msgspec.Struct, caller: Caller) -> object:
        """Return the answer to an allowed call."""
        # A gateway in this program passes a request made of checked values.
        request = params if isinstance(params, method.request) else _typed(params, method)
        if method.validate is not None:
            method.validate(request)
        match request:
            case HelloRequest():
                return Hello(
                    methods=tuple(METHODS),
                    tenant=caller.tenant,
                    version=WIRE_VERSION,
                    stream_options=STREAM_OPTIONS,
                )
            case GenerateRequest():
                return await self._generate(request, caller, streams=method.streams)
            case EmbedRequest():
                return await self._embed(request, caller)
            case ScoreRequest():
                answer = await self._read(_claimed(request, caller), caller)
                usage = Usage(prompt_tokens=answer.prompt_tokens, completion_tokens=0)
                return Scores(scores=[_numbers(vector) for vector in answer.vectors], usage=usage)
            case HealthRequest():
                return await self._health(request)
        if isinstance(request, SessionRequest):
            request = _claimed(request, caller)
        if method.lane is Lane.TEXT:
            payer, size = self._text_payer(caller), held_bytes(request)
            with self._texts.taken(payer, size):
                async with self._turns.turn(payer, size):
                    return await self._batcher.call(request, timeout=method.timeout_s)
        return await self._ask(request, method)

    async def _ask(self, request: msgspec.Struct, method: Method) -> object:
        return await self._batcher.call(request, timeout=method.timeout_s, control=method.lane is Lane.CONTROL)

    async def _generate(self, request: GenerateRequest, caller: Caller, *, streams: bool) -> object:
        request = _claimed(request, caller)
        payer = caller.payer
        if request.payer is not None:
            # guard: payer that a caller claims
            if not self._of_fleet:
                raise InvalidRequest("payer", "may be set only by the gateways of a fleet")
            payer = request.payer.name
        on_token = caller.on_token if streams else None
        message = Generate(request, on_token, payer, request_id=caller.request_id, drawn=caller.drawn)
        with self._requests.taken(self._text_payer(caller), held_bytes(request) + held_bytes(caller.drawn)):
            return await self._batcher.call(message, timeout=None)

    async def _embed(self, request: EmbedRequest, caller: Caller) -> object:
        request = _claimed(request, caller)
        answer = await self._read(request, caller)
        usage = Usage(prompt_tokens=answer.prompt_tokens, completion_tokens=0)
        if request.encoding_format == "base64":
            return Embeddings(embeddings=[b64encode(vector).decode() for vector in answer.vectors], usage=usage)
        return Embeddings(embeddings=[_numbers(vector) for vector in answer.vectors], usage=usage)

    async def _read(self, request: EmbedRequest | ScoreRequest, caller: Caller) -> Embedded:
        payer = tenant_account(request.tenant) if self._of_fleet and request.tenant else caller.payer
        message = Embed(request, payer, request_id=caller.request_id)
        with self._requests.taken(self._text_payer(caller), held_bytes(request)):
            answer: Embedded = await self._batcher.call(message, timeout=None)
        return answer

    def _text_payer(self, caller: Caller) -> str:
        return "" if self._of_fleet else caller.payer

    async def _health(self, request: HealthRequest) -> object:
        try:
            return await self._ask(request, METHODS["health"])
        except (ActorDown, CallTimeout):  # every health check gets an answer
            return Health(status="down", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)


def _typed(params: object, method: Method) -> msgspec.Struct:
    """Convert a map of parameters to the method's request; raise InvalidRequest with the path of the first fault."""
    if method.request is GenerateRequest:
        return to_generate_request(params)
    request: msgspec.Struct = check_type(params, method.request)
    return request


def _numbers(vector: bytes) -> list[float]:
    """Return the elements of a vector of float32 in little endian."""
    elements = array("f", vector)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()


def _claimed(request: Claimed, caller: Caller) -> Claimed:
    """Return the request with the tenant of the caller's key or token, in place of the request's own tenant.

    Raises:
        InvalidRequest: the request names another tenant, so its sender would not get what it expects.
    """
    if caller.tenant is None or request.tenant == caller.tenant:
        return request
    # guard: no other tenant's name
    if request.tenant:
        raise InvalidRequest("tenant", "is not the name of the key or token")
    # guard: tenant of the key
    return msgspec.structs.replace(request, tenant=caller.tenant)


# The bytes of an integer or a float, and of a short map that was converted to a struct.
NUMBER_BYTES, MAP_BYTES = 32, 320


def held_bytes(value: object) -> int:
    """Return the most memory of a gateway that a message, or a part of it, takes from its decoding to its answer.

    A text is in memory once, and unless it is ASCII once more in UTF-8: CPython keeps the encoded text. Lists and maps
    are in memory as plain data and as their type, with the same elements.
    """
    if isinstance(value, str):
        return sys.getsizeof(value) + (0 if value.isascii() else len(value.encode(errors="surrogatepass")))
    if isinstance(value, msgspec.Struct):
        fields = sum(held_bytes(getattr(value, name)) for name in value.__struct_fields__)
        return MAP_BYTES + sys.getsizeof(value) + fields
    if isinstance(value, list | tuple):
        # A list may have hundreds of thousands of numbers.
        of_numbers = set(map(type, value)) <= {int, float}
        elements = NUMBER_BYTES * len(value) if of_numbers else sum(map(held_bytes, value))
        return 2 * sys.getsizeof(value) + elements
    if isinstance(value, dict):
        return 2 * sys.getsizeof(value) + sum(map(held_bytes, value)) + sum(map(held_bytes, value.values()))
    return NUMBER_BYTES if isinstance(value, float) or type(value) is int else 0
