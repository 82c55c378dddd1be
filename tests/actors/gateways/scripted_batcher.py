"""ScriptedBatcher: in the Batcher's place, without a model; tests tell it when which token comes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from genbatch.actors.batching.batcher_messages import Generate, GetStats
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.genserver import (
    NOREPLY,
    ActorRef,
    Down,
    From,
    GenServer,
    Monitor,
    reply,
    reply_error,
    start,
)
from genbatch.proto.errors import EngineError, GenbatchError
from genbatch.proto.messages import RequestLimits, Result, Token, Usage, validate_request


@dataclass(eq=False)
class Held:
    """A request that waits for the test."""

    message: Generate
    from_: From[Any]
    tokens: list[Token] = field(default_factory=list)

    def emit(self, text: str) -> None:
        """Lets the next token come."""
        token = Token(text=text, token_id=100 + len(self.tokens), index=len(self.tokens))
        self.tokens.append(token)
        if self.message.on_token is not None:
            self.message.on_token(token)

    def finish(self) -> None:
        """Replies with the tokens so far."""
        reply(self.from_, self.result())

    def result(self) -> Result:
        return Result(
            text="".join(token.text for token in self.tokens),
            token_ids=[token.token_id for token in self.tokens],
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=len(self.tokens), cached_tokens=1),
        )


class ScriptedBatcher(GenServer):
    """Answers a prompt word by word at once; one that starts with "hold" waits for the test, "fault" fails."""

    def __init__(self) -> None:
        self.requests: list[Generate] = []
        self.held: dict[str, Held] = {}  # by prompt
        self.freed: list[str] = []  # prompts whose caller went away
        self._monitors: dict[Monitor, str] = {}
        self._changed = trio.Event()

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if isinstance(request, GetStats):
            return {"steps": 7, "finished": {"stop": 2}, "ttft_p50": None}
        assert isinstance(request, Generate)
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
        if prompt == "fault":
            reply_error(from_, EngineError("the step failed", retry_after_ms=5))
            return NOREPLY
        if prompt == "bug":
            reply_error(from_, ZeroDivisionError("a secret"))
            return NOREPLY
        for word in prompt.split():
            held.emit(word)
        return held.result()

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
    gateway: ZeroMQGateway
    address: str
    gateway_scope: trio.CancelScope


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Served]:
    """Runs both for as long as the body runs; half a minute at most, so that no test hangs."""
    batcher = ScriptedBatcher()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, batcher)
            gateway = ZeroMQGateway(Dispatcher(ref), f"ipc://{directory / 'socket'}")
            gateway_scope = trio.CancelScope()

            async def run(task_status: trio.TaskStatus[str]) -> None:
                with gateway_scope:
                    await gateway.run(task_status=task_status)

            address = await nursery.start(run)
            yield Served(batcher, ref, gateway, address, gateway_scope)
            nursery.cancel_scope.cancel()
