"""A bench for the link: both ends over a real socketpair, and a scripted Batcher behind the engine's end."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import Join
from genbatch.actors.engine.link import EngineSession, FrameStream
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.actors.runtime.actor import NOREPLY, ActorRef, Down, From, GenServer, Monitor, reply, reply_error, start
from genbatch.actors.service.processes import Joint
from genbatch.proto.errors import (
    EngineError,
    GenbatchError,
    InvalidRequest,
    Unavailable,
)
from genbatch.proto.messages import (
    DetokenizeRequest,
    GenerateRequest,
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
    StatsRequest,
)

CARD = ModelCard(
    id="m", n_ctx=64, n_parallel=2, vocab_size=9, dtype="float32", quantize="none", runner="torch", device="cpu"
)
HEALTH = Health(status="ready", steps=3, requests_running=1, requests_waiting=0, stalled_s=0.0)
OPTIONS = BatcherOptions(n_parallel=2, max_queue=2, stall_s=5.0)


@dataclass(eq=False)
class Work:
    """A request that a scripted Batcher holds."""

    message: Generate
    from_: From[Any]
    indices: dict[int, int]
    given: list[Token] = field(default_factory=list)

    def emit(self, text: str, choice: int = 0) -> None:
        index = self.indices.get(choice, 0)
        self.indices[choice] = index + 1
        token = Token(
            text=text, token_id=index, index=index, choice=choice, logprob=-0.5 - index, top={index: -0.5, 9: -1.5}
        )
        self.given.append(token)
        if self.message.on_token is not None:
            self.message.on_token(token)

    def finish(self, text: str = "all") -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        reply(self.from_, Result(text=text, token_ids=[1], finish_reason="stop", usage=usage))


class Scripted(GenServer):
    """A Batcher that answers with the test's tokens."""

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}  # by prompt
        self.texts: list[tuple[Embed, From[Any]]] = []
        self.left: list[str] = []  # prompts whose caller went away
        self.health: Health | None = Health(
            status="ready", steps=3, requests_running=1, requests_waiting=0, stalled_s=0.0
        )
        self.drained: float | None = None
        self.num_stats = 0
        self.holds_stats: trio.Event | None = None
        self._monitors: dict[Monitor, str] = {}

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        match request:
            case Generate():
                prompt = request.request.prompt or ""
                if prompt == "refused":
                    reply_error(from_, EngineError("no", retry_after_ms=7))
                else:
                    self.work[prompt] = Work(request, from_, {})
                    self._monitors[self.monitor(from_)] = prompt
                return NOREPLY
            case Embed():
                self.texts.append((request, from_))
                return NOREPLY
            case HealthRequest():
                return NOREPLY if self.health is None else self.health
            case StatsRequest():
                self.num_stats += 1
                asked = self.num_stats
                if self.holds_stats is not None:
                    await self.holds_stats.wait()
                return {"steps": 3, "finished": {"stop": 1}, "asked": asked}
            case TokenizeRequest(prompt="hold"):
                return NOREPLY
            case TokenizeRequest(prompt="refused"):
                reply_error(from_, InvalidRequest("prompt", "the model's own reason"))
                return NOREPLY
            case TokenizeRequest():
                return TokenIds(token_ids=[1, 2])
            case DetokenizeRequest():
                return Text(text="12")
            case DrainRequest(timeout_s=timeout_s):
                self.drained = timeout_s
                return Drained(num_cancelled=0)

    async def handle_cast(self, message: Any) -> None:
        raise ZeroDivisionError

    async def terminate(self, reason: Any) -> None:
        for work in self.work.values():
            if work.from_.alive:
                reply_error(work.from_, Unavailable("the batcher has stopped"))

    async def handle_info(self, message: Any) -> None:
        assert isinstance(message, Down)
        self.left.append(self._monitors.pop(message.monitor))


async def until(condition: Callable[[], Any]) -> None:
    """Lets the tasks and the sockets work; the clock stands still meanwhile."""
    for _ in range(100_000):
        if condition():
            return
        await trio.lowlevel.checkpoint()
    raise AssertionError("it did not happen")


async def settle() -> None:
    """As long as anything can be under way on this machine."""
    for _ in range(200):
        await trio.lowlevel.checkpoint()


class Bench:
    """A link in front of engines that come and go."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.joint = Joint()
        self.link = RemoteBatcher(OPTIONS, self._on_hung)
        self.hung: list[str] = []
        self.engine = Scripted()
        self.ends: dict[str, Any] = {}  # of requests, by prompt
        self.tokens: dict[str, list[Token]] = {}
        self.side: EngineSide

    async def open(self) -> None:
        self.running = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[None]) -> None:
            with self.running:
                await self.link.run(task_status=task_status)

        await self.nursery.start(run)
        await self.joint.gateway_is_ready(self.link)

    async def engine_comes(self) -> None:
        self.engine = Scripted()
        self.side = EngineSide(await self.nursery.start(self._run_engine), self.nursery)
        await self.joint.engine_is_ready(self.side, Models(models=(CARD,)))
        await until(lambda: self.link.accepted.is_up and self.link._watch._health is not None)

    async def _run_engine(self, task_status: trio.TaskStatus[ActorRef]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(await start(nursery, self.engine))
        except* ZeroDivisionError:
            pass  # the process would end

    async def engine_dies(self) -> None:
        """As the kernel would have it: the socket closes, nobody says a word."""
        self.joint.engine_is_gone(self.side)
        self.side.scope.cancel()
        await until(lambda: not self.link.accepted.is_up)

    def ask(self, prompt: str, *, streams: bool = False, **params: Any) -> trio.CancelScope:
        """Calls in a task of its own."""
        scope, seen = trio.CancelScope(), self.tokens.setdefault(prompt, [])

        async def call() -> None:
            message = Generate(
                GenerateRequest(prompt=prompt, **params), seen.append if streams else None, "c", request_id="r1"
            )
            with scope:
                try:
                    self.ends[prompt] = await self.link.call(message, timeout=None)
                except GenbatchError as error:
                    self.ends[prompt] = error

        self.nursery.start_soon(call)
        return scope

    async def working(self, *prompts: str) -> list[Work]:
        await until(lambda: all(prompt in self.engine.work for prompt in prompts))
        return [self.engine.work[prompt] for prompt in prompts]

    async def end_of(self, prompt: str) -> Any:
        await until(lambda: prompt in self.ends)
        return self.ends[prompt]

    def _on_hung(self, reason: str) -> None:
        self.hung.append(reason)


class EngineSide:
    """An engine's process, but for the process."""

    def __init__(self, batcher: ActorRef, nursery: trio.Nursery) -> None:
        self.scope = trio.CancelScope()
        self.joins = 0
        self._batcher = batcher
        self._nursery = nursery

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        self.joins += 1
        self._nursery.start_soon(self._serve, FrameStream(hand_over))

    async def _serve(self, stream: FrameStream) -> None:
        self.stream = stream
        with self.scope:
            await EngineSession(self._batcher, stream).run()
