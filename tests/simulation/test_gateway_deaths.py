"""A gateway that dies at every point of its requests' lives: the real clients' callers get what no death gives them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.engine.link import EngineSession
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.actors.gateways.accepting import MAX_HALF_MESSAGES, MessageBudget, Peer
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCConnection
from genbatch.actors.gateways.session import CallHost
from genbatch.actors.runtime.actor import start
from genbatch.clients.remote import RemoteClient, Retry
from genbatch.clients.transports import ConnectionLost, RPCTransport
from genbatch.nif.context import Context
from genbatch.proto.errors import Unavailable
from genbatch.proto.messages import Result, Token
from genbatch.proto.rpc import StreamOptions
from genbatch.proto.service_messages import Hello, ModelsRequest
from tests.simulation.history_runner import HistoryRunner
from tests.simulation.pipe import End, pair
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_worker import SimWorker
from tests.simulation.test_engine_deaths import DRAWS, LIVENESS_S, OPTIONS, SAME, STEP_S, prompt

RESTART_S = 0.5


@dataclass
class Asked:
    """A request, and what its caller gets."""

    params: dict[str, Any]
    streams: bool = True
    tokens: list[Token] = field(default_factory=list)
    result: Result | None = None

    def got(self) -> Any:
        """All of it; each choice's tokens in their order, and not what a cache knew."""
        assert self.result is not None
        tokens = sorted(self.tokens, key=lambda token: (token.choice, token.index))
        usage = msgspec.structs.replace(self.result.usage, cached_tokens=0)
        return tokens, msgspec.structs.replace(self.result, usage=usage)


def asked() -> list[Asked]:
    """One of each kind; the pool is small enough for pauses."""
    return [
        Asked({"prompt": prompt(40), **SAME}),
        Asked({"prompt": prompt(41), **DRAWS, "n": 3, "logprobs": 2}),
        Asked({"prompt": prompt(42), **DRAWS, "repetition_penalty": 1.5, "frequency_penalty": 1.0}),
        Asked({"prompt": prompt(43), **DRAWS, "prompt_logprobs": 0}),
        Asked({"prompt": prompt(44), **DRAWS, "min_tokens": 6, "stop": ["e", "a"], "echo": True}),
        Asked({"prompt": prompt(45), **DRAWS, "n": 2}, streams=False),
    ]


class PipeTransport(RPCTransport):
    """A client's transport over the simulation's pipes; waits while there is no gateway."""

    def __init__(self, service: "DyingGateways") -> None:
        super().__init__("unix:///the/gateway")
        self._service = service

    async def _open_stream(self) -> Any:
        return await self._service.connect()


class DyingGateways:
    """An engine that lives, and gateways in front of it, of which the scripted ones die.

    Args:
        dies_at: seconds after which the gateway that is there dies, in order.
    """

    def __init__(self, nursery: trio.Nursery, model: Any, dies_at: Sequence[float]) -> None:
        self._nursery = nursery
        self._model = model
        self._dies_at = dies_at
        self._rng = random.Random(0)
        self._is_up = trio.Event()
        self._life: trio.CancelScope | None = None
        self._ends: list[End] = []
        self.num_connections = 0

    async def start(self) -> None:
        self.batcher = Batcher(
            lambda: Context(
                self._model, HistoryRunner(), num_blocks=[24], n_parallel=3, n_held=1, n_batch=16, block_size=4
            ),
            OPTIONS,
            open_worker=lambda _: SimWorker(self._nursery, random.Random(self._rng.random()), STEP_S),
        )
        self._engine = await start(self._nursery, self.batcher, name="batcher")
        self._nursery.start_soon(self._run_gateways)
        self._nursery.start_soon(self._kill)

    async def connect(self) -> End:
        """A client's end of a connection to the gateway, once there is one."""
        await self._is_up.wait()
        self.num_connections += 1
        there, here = pair(random.Random(self._rng.random()), window=2**20, max_delay_s=0.01)
        self._ends.append(here)
        self._gateway.start_soon(self._serve, here)
        return there

    async def _kill(self) -> None:
        begun = trio.current_time()
        for moment in self._dies_at:
            await trio.sleep_until(begun + moment)
            if self._life is not None:
                self._life.cancel()

    async def _run_gateways(self) -> None:
        while True:
            ours, theirs = pair(random.Random(self._rng.random()), window=2**20, max_delay_s=0.01)
            self._ends = [ours]
            async with trio.open_nursery() as self._gateway:
                self._life = self._gateway.cancel_scope
                await self._live(ours, theirs)
            self._is_up, self._life = trio.Event(), None
            await trio.sleep(RESTART_S)

    async def _live(self, ours: End, theirs: End) -> None:
        """As after SIGKILL, nothing that was not sent before is sent at the end."""
        try:
            link = RemoteBatcher(OPTIONS, lambda reason: pytest.fail(reason))
            await self._gateway.start(link.run)
            self._dispatcher, self._budget = Dispatcher(link), MessageBudget(MAX_HALF_MESSAGES)
            self._nursery.start_soon(EngineSession(self._engine, theirs).run)
            models = await self._engine.call(ModelsRequest(), timeout=None)
            link.join(ours, models)  # type: ignore[arg-type]  # a pipe in the place of a socket
            self._is_up.set()
            await trio.sleep_forever()
        finally:
            for end in self._ends:
                end.cut()

    async def _serve(self, end: End) -> None:
        async with trio.open_nursery() as calls:
            peer = Peer("client", "client")
            await RPCConnection(end, self._dispatcher, CallHost(calls), peer=peer, budget=self._budget).run()
            calls.cancel_scope.cancel()


async def ask(client: RemoteClient, one: Asked) -> None:
    if not one.streams:
        one.result = await client.generate(**one.params)
        return
    async with client.stream(**one.params) as stream:
        async for token in stream:
            one.tokens.append(token)
    one.result = stream.result


def run(model: Any, dies_at: Sequence[float] = (), retry: Retry | None = None) -> tuple[list[Any], float, int]:
    """What all callers get, when the last of it came, and how many connections it took."""
    wanted = asked()
    ended_at, num_connections = 0.0, 0

    async def main() -> None:
        nonlocal ended_at, num_connections
        with trio.fail_after(LIVENESS_S):
            async with trio.open_nursery() as nursery:
                service = DyingGateways(nursery, model, dies_at)
                await service.start()
                begun = trio.current_time()
                remote = RemoteClient(PipeTransport(service), timeout=60.0, retry=retry)
                async with remote as client, trio.open_nursery() as asking:
                    for one in wanted:
                        asking.start_soon(ask, client, one)
                ended_at = trio.current_time() - begun
                num_connections = service.num_connections
                await trio.sleep(1.0)  # the engine hears of requests whose gateway is gone
                assert not len(service.batcher.requests), "the engine works for nobody"
                nursery.cancel_scope.cancel()

    run_seeded(main, 0)
    return [one.got() for one in wanted], ended_at, num_connections


@pytest.fixture
def model(tiny_model: Callable[[str], Any]) -> Any:
    return tiny_model("llama")


def test_a_gateways_death_at_any_moment_changes_nothing_of_any_answer(model: Any) -> None:
    expected, took_s, _ = run(model)
    for moment in range(1, 25):
        got, _, num_connections = run(model, [took_s * moment / 25])
        assert got == expected, moment
        assert num_connections == 2, "no death met a request"


def test_a_second_gateways_death_changes_nothing_either(model: Any) -> None:
    expected, took_s, _ = run(model)
    for part in range(1, 9):
        first = took_s / 3
        got, _, num_connections = run(model, [first, first + RESTART_S + took_s * part / 12])
        assert got == expected, part
        assert num_connections == 3


def test_a_client_may_ask_to_be_told_of_a_lost_gateway(model: Any) -> None:
    _, took_s, _ = run(model)
    with pytest.raises(BaseExceptionGroup) as lost:
        run(model, [took_s / 2], Retry(max_attempts=1))
    assert lost.group_contains(ConnectionLost)


def test_a_service_that_cannot_continue_streams_ends_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, took_s, _ = run(model)
    monkeypatch.setattr("genbatch.actors.gateways.dispatcher.STREAM_OPTIONS", ("credit", "coalesce"))
    with pytest.raises(BaseExceptionGroup) as lost:
        run(model, [took_s * 0.8])
    assert lost.group_contains(Unavailable, match="release cannot continue streams")
    assert "drawn" in StreamOptions.__struct_fields__ and "drawn" not in Hello(methods=()).stream_options
