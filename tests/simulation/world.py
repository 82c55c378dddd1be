"""World: the whole service in one deterministic event loop, and the faults that a seed draws for it.

Real: Batcher, scheduler, context and KV cache, EngineLink, ledger, link messages, RPC gateway sessions, wire protocol.
Simulated: the model (HistoryRunner), time (MockClock), threads (SimWorker), processes (a nursery that is cut down),
sockets (pipes with delays). Checked after every event: the ledger, the blocks, each client's stream.
"""

import random
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from genbatch.actors.batching.batcher import Batcher
from genbatch.actors.batching.batcher_messages import GetModels
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.engine.engine_link import EngineLink, LinkFrame, LinkUp
from genbatch.actors.engine.engine_session import EngineSession
from genbatch.actors.engine.link_connection import LinkConnection
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_connection import RPCConnection
from genbatch.actors.gateways.rpc_gateway import SWEEP_S, check_connection
from genbatch.actors.runtime.errors import ActorDown
from genbatch.actors.runtime.genserver import start
from genbatch.actors.scheduling.batching_type import BatchingType
from genbatch.actors.scheduling.capacity import SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.models.model import Model
from genbatch.proto.messages import Result
from tests.simulation.history_runner import FIRST_PLAIN, VOCAB, EngineDies, HistoryRunner
from tests.simulation.pipe import End, pair
from tests.simulation.sim_client import SimClient
from tests.simulation.sim_worker import SimWorker

# Simulated seconds after which a world that has not come to its end never will.
LIVENESS_S = 3600.0


class World:
    """One seed's service, callers and faults.

    Args:
        seed: draws everything.
        model: for the tokenizer and the limits; it is never evaluated.
    """

    def __init__(self, seed: int, model: Model) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.events: list[str] = []
        self.num_deaths = 0
        self.harm = self.rng.choice((0.0, 0.0, 0.1))
        self.prefixes = [[self.rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(24)] for _ in range(3)]
        self._model = model
        self._options = self._draw_options()
        self._num_blocks = self.rng.choice((24, 64, 200))
        self._kill_rate = self.rng.choice((0.0, 0.0, 0.05, 0.3))
        self._hang_rate = self.rng.choice((0.0, 0.0, 0.002))
        self._jump_rate = self.rng.choice((0.0, 0.1))
        self._is_calm = False  # no more faults, so that everything can come to its end
        self._batcher: Batcher | None = None
        self._engine_end: End | None = None
        self._life: trio.Nursery | None = None
        self._nursery: trio.Nursery

    def _draw_options(self) -> BatcherOptions:
        rng = self.rng
        return BatcherOptions(
            n_parallel=rng.choice((1, 2, 4)),
            batch_timeout=rng.choice((0.0, 20.0)),
            max_batch_tokens=rng.choice((8, 32)),
            max_queue=rng.choice((None, 4, 64)),
            scheduler=rng.choice(("fifo", "prefill_first")),
            scheduler_policy=rng.choice(list(SchedulerPolicy)),
            batching_type=rng.choice((BatchingType.INFLIGHT_FUSED_BATCHING, BatchingType.INFLIGHT_BATCHING)),
            cpu_offload_space=rng.choice((0.0, 0.001)),
            stall_s=5.0,
        )

    def trace(self, who: str, what: str) -> None:
        """Notes an event, and checks what must hold after every one."""
        self.events.append(f"{trio.current_time():.4f} {who} {what}")
        self._link.ledger.check_integrity()

    def read_result(self, value: Any) -> Result:
        """A final's plain data as the type that it is."""
        return msgspec.convert(value, Result, strict=False)

    def connect(self, name: str) -> End:
        """A client's end of a new connection to the gateway."""
        rng = random.Random(self.rng.random())
        there, here = pair(rng, window=rng.choice((64, 4096)), max_delay_s=rng.choice((0.0, 0.05)))
        self._nursery.start_soon(self._serve, here, name)
        return there

    async def run(self) -> None:
        """The whole life of the world; raises what is wrong with it."""
        with trio.fail_after(LIVENESS_S):
            async with trio.open_nursery() as self._nursery:
                self._link = EngineLink(self._options, self._kill)
                self._ref = await start(self._nursery, self._link, name="link")
                self._dispatcher = Dispatcher(self._ref)
                self._nursery.start_soon(self._run_engines)
                self._nursery.start_soon(self._harass)
                async with trio.open_nursery() as clients:
                    for number in range(self.rng.randint(1, 4)):
                        client = SimClient(self, f"client{number}", random.Random(self.rng.random()))
                        clients.start_soon(client.run, self.rng.randint(1, 8))
                await self._come_to_rest()
                self._nursery.cancel_scope.cancel()

    async def _come_to_rest(self) -> None:
        """Without faults and callers everything must be given back."""
        self._is_calm = True
        while not self._is_idle():  # noqa: ASYNC110 - time is simulated, and there is no one event to wait for
            await trio.sleep(0.5)
        await trio.sleep(5.0)
        self._link.ledger.check_integrity()
        counts = self._link.ledger.counts
        assert counts["accepted"] == counts["finals"], counts
        batcher = self._batcher
        assert batcher.slots.seq_pool == set(range(batcher.options.n_parallel)), "a slot is lost"
        assert not batcher.slots.sequences and not batcher.slots.pending
        batcher.ctx.kv.check_integrity()
        for held in list(batcher.held):
            batcher.slots.drop_held(held)
        assert batcher.ctx.kv.counts().used == 0, "blocks are lost"

    def _is_idle(self) -> bool:
        if self._life is None or self._batcher is None or self._life.cancel_scope.cancel_called:
            return False
        return not len(self._link.ledger) and not len(self._batcher.requests)

    # The gateway

    async def _serve(self, end: End, name: str) -> None:
        async with trio.open_nursery() as calls:
            connection = RPCConnection(end, self._dispatcher, calls, client=name)
            calls.start_soon(self._sweep, connection)
            await connection.run()
            calls.cancel_scope.cancel()

    async def _sweep(self, connection: RPCConnection) -> None:
        """What the gateway's own sweep does for each of its connections."""
        while True:
            await trio.sleep(SWEEP_S)
            check_connection(connection, trio.current_time())

    # The engine

    async def _run_engines(self) -> None:
        """One life after another, as a supervisor would."""
        while True:
            await trio.sleep(0.1 + self.rng.random())
            try:
                await self._live()
            except* EngineDies:
                pass
            self.trace("engine", "died")
            self._life = self._batcher = None

    async def _live(self) -> None:
        gateway_end, self._engine_end = pair(random.Random(self.rng.random()), window=2**20, max_delay_s=0.01)
        rng = random.Random(self.rng.random())
        try:
            async with trio.open_nursery() as life:
                batcher = Batcher(
                    partial(self._open_context),
                    self._options,
                    open_worker=lambda name: self._open_worker(life, rng, name),
                )
                ref = await start(life, batcher, name="batcher")
                models = await ref.call(GetModels(), timeout=None)
                connection = LinkConnection(gateway_end, self._hear)
                self._nursery.start_soon(connection.run)
                self._ref.info(LinkUp(connection, models), control=True)
                self._batcher, self._life = batcher, life
                await EngineSession(ref, self._engine_end).run()
                life.cancel_scope.cancel()
        finally:
            self._engine_end.cut()

    def _open_worker(self, life: trio.Nursery, rng: random.Random, name: str) -> SimWorker:
        def hang() -> bool:
            serves = self._life is life and not self._is_calm  # loading may take as long as it likes
            return serves and name == "genbatch-model" and rng.random() < self._hang_rate

        return SimWorker(life, rng, 0.05, hang)

    def _open_context(self) -> Context:
        return Context(
            self._model,
            HistoryRunner(),
            num_blocks=[self._num_blocks],
            n_parallel=self._options.n_parallel,
            n_held=self._options.max_held_prompts,
            n_batch=self._options.max_batch_tokens,
            block_size=4,
        )

    def _hear(self, connection: LinkConnection, messages: Any) -> None:
        if messages is None:
            self.num_deaths += 1
        with suppress(ActorDown):  # the world is ending
            self._ref.info(LinkFrame(connection, messages), control=True)
        kinds = [type(one).__name__ for one in messages or ()]
        if kinds != ["Beat"]:
            self.trace("link", ", ".join(kinds) or "closed")

    # Faults

    def _kill(self, reason: str) -> None:
        """As SIGKILL: what it had not sent is never sent, and nothing of it runs again."""
        if self._life is not None:
            self.trace("engine", f"is killed: {reason}")
            assert self._engine_end is not None
            self._engine_end.cut()
            self._life.cancel_scope.cancel()
            self._life = self._batcher = None

    async def _harass(self) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        while not self._is_calm:
            await trio.sleep(self.rng.random())
            if self.rng.random() < self._kill_rate and not self._is_calm:
                self._kill("drawn")
            if self.rng.random() < self._jump_rate:
                self.trace("clock", "jumps")
                # Less than a client may take to read: a gateway that slept for longer gives up on sends under way.
                clock.jump(self.rng.choice((0.5, 3.0, 8.0)))
            if self._batcher is not None and not self._batcher._stepping:
                self._batcher.ctx.kv.check_integrity()


def simulate(seed: int, model: Model) -> list[str]:
    """Runs a seed's world; returns its events.

    Raises:
        BaseException: what is wrong with it.
    """
    # trio shuffles the tasks of a turn; by its own random numbers, which a seed makes the same ones each time.
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio._core._run._r.seed(seed)
    world = World(seed, model)
    try:
        trio.run(world.run, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note("the last events:\n" + "\n".join(world.events[-25:]))
        raise
    return world.events
