"""ScriptedBatcher: in the Batcher's place, without a model; tests tell it when which token comes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import NOREPLY, ActorRef, Down, From, GenServer, Monitor, reply, reply_error, start
from genbatch.proto.errors import EngineError, GenbatchError, QueueFull
from genbatch.proto.messages import (
    DetokenizeRequest,
    FinishReason,
    Result,
    Text,
    Token,
    TokenIds,
    TokenizeRequest,
    Usage,
)
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
)
from genbatch.proto.validation import RequestLimits, validate_request

# Seconds that a test may take on a machine that is busy with others; less than `make mutations` waits for one.
PATIENCE_S = 100.0

CARD = ModelCard(
    id="scripted",
    n_ctx=64,
    n_parallel=2,
    vocab_size=320,
    dtype="float32",
    quantize="none",
    runner="script",
    device="cpu",
)


@dataclass(eq=False)
class Held:
    """A request that waits for the test."""

    message: Generate
    from_: From[Any]
    tokens: list[Token] = field(default_factory=list)

    def emit(self, text: str) -> None:
        """Lets the next token come."""
        index = len(self.tokens) + sum(len(one.token_ids) for one in self.message.drawn)
        token = Token(text=text, token_id=100 + index, index=index)
        self.tokens.append(token)
        if self.message.on_token is not None:
            self.message.on_token(token)

    def finish(self, reason: FinishReason = "stop") -> None:
        """Replies with the tokens so far."""
        reply(self.from_, msgspec.structs.replace(self.result(), finish_reason=reason))

    def fail(self, error: GenbatchError) -> None:
        """Replies with an error."""
        reply_error(self.from_, error)

    def result(self) -> Result:
        return Result(
            text="".join(token.text for token in self.tokens),
            token_ids=[token.token_id for token in self.tokens],
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=len(self.tokens), cached_tokens=1),
        )


class ScriptedBatcher(GenServer):
    """Answers a prompt word by word at once.

    One that starts with "hold" waits for the test; "fault" fails; "busy N ..." is refused N times first.
    """

    def __init__(self) -> None:
        self.requests: list[Generate] = []
        self.held: dict[str, Held] = {}  # by prompt
        self.freed: list[str] = []  # prompts whose caller went away
        self._monitors: dict[Monitor, str] = {}
        self.num_refused = 0  # of the "busy" prompt that is asked now
        self._changed = trio.Event()

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if not isinstance(request, Generate):
            return self._answer(request)
        self.requests.append(request)
        try:
            validate_request(request.request, RequestLimits())
        except GenbatchError as error:
            reply_error(from_, error)
            return NOREPLY
        prompt = request.request.prompt or ""
        held = Held(request, from_)
        if prompt.startswith("hold"):
            self.held[prompt] = held
            self._monitors[self.monitor(from_)] = prompt
            self._wake()
            return NOREPLY
        if prompt.startswith("busy"):
            _, times, *words = prompt.split()
            self.num_refused += 1
            if self.num_refused <= int(times):
                reply_error(from_, QueueFull("full", retry_after_ms=1))
                return NOREPLY
            self.num_refused = 0
            prompt = " ".join(words)
        if prompt == "fault":
            reply_error(from_, EngineError("the step failed", retry_after_ms=5))
            return NOREPLY
        if prompt == "bug":
            reply_error(from_, ZeroDivisionError("a secret"))
            return NOREPLY
        for word in prompt.split():
            held.emit(word)
        return held.result()

    def _answer(self, request: Any) -> Any:
        """A token id is a character's code."""
        match request:
            case StatsRequest():
                return {"steps": 7, "finished": {"stop": 2}, "ttft_p50": None}
            case ModelsRequest():
                return Models(models=(CARD,))
            case HealthRequest():
                return Health(status="ready", steps=7, requests_running=1, requests_waiting=2, stalled_s=0.5)
            case TokenizeRequest():
                return TokenIds(token_ids=[int(request.add_special_tokens), *map(ord, request.prompt or "")])
            case DetokenizeRequest():
                return Text(text="".join(map(chr, request.token_ids)))
            case DrainRequest(timeout_s=timeout_s):
                return Drained(num_cancelled=int(timeout_s))

    async def handle_info(self, message: Any) -> None:
        assert isinstance(message, Down)
        prompt = self._monitors.pop(message.monitor)
        del self.held[prompt]
        self.freed.append(prompt)
        self._wake()

    async def arrival(self, prompt: str) -> Held:
        """Waits until a request with this prompt is held."""
        while prompt not in self.held:
            await self._changed.wait()
        return self.held[prompt]

    async def release(self, prompt: str) -> None:
        """Waits until the request's caller is gone."""
        while prompt not in self.freed:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@dataclass(frozen=True)
class Served:
    """A gateway in front of a scripted Batcher."""

    batcher: ScriptedBatcher
    ref: ActorRef
    gateway: ZeroMQGateway | RPCGateway
    address: str
    gateway_scope: trio.CancelScope
    gateway_ended: trio.Event


def gateway_at(address: str, batcher: ActorRef) -> ZeroMQGateway | RPCGateway:
    """The gateway that speaks what the address says."""
    kind = ZeroMQGateway if address.startswith("ipc://") else RPCGateway
    return kind(Dispatcher(batcher), address)


@asynccontextmanager
async def served(directory: Path, transport: str = "ipc") -> AsyncIterator[Served]:
    """Runs both for as long as the body runs; so long at most that only what hangs is ended.

    Args:
        transport: "ipc" (ZeroMQ), "unix" (msgpack-RPC) or "tcp" (msgpack-RPC).
    """
    at = "tcp://127.0.0.1:0" if transport == "tcp" else f"{transport}://{directory / 'socket'}"
    batcher = ScriptedBatcher()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, batcher)
            gateway = gateway_at(at, ref)
            gateway_scope, gateway_ended = trio.CancelScope(), trio.Event()

            async def run(task_status: trio.TaskStatus[str]) -> None:
                with gateway_scope:
                    await gateway.run(task_status=task_status)
                gateway_ended.set()

            address = await nursery.start(run)
            yield Served(batcher, ref, gateway, address, gateway_scope, gateway_ended)
            nursery.cancel_scope.cancel()
