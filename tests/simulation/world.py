"""World: the whole service in one deterministic event loop, and the faults that a seed draws for it.

Real: Batcher, scheduler, context and KV cache, RemoteBatcher, link messages, RPC gateway sessions, wire protocol.
Simulated: the model (HistoryRunner), time (MockClock), threads (SimWorker), processes (a nursery that is cut down),
sockets (pipes with delays). Checked after every event: what was accepted, the blocks, each client's stream.
"""

import random
from functools import partial
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.stepper import EngineFault
from genbatch.actors.engine.link import EngineConnection, EngineSession
from genbatch.actors.engine.remote_batcher import CANCEL_GRACE_S, RemoteBatcher
from genbatch.actors.gateways.accepting import MAX_HALF_MESSAGES, MessageBudget, Peer
from genbatch.actors.gateways.dispatcher import Caller, Dispatcher
from genbatch.actors.gateways.rpc_gateway import SWEEP_S, RPCConnection, check_connection
from genbatch.actors.gateways.session import CallHost
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import PauseOrder, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.messages import Result
from genbatch.proto.service_messages import ModelsRequest
from tests.simulation.faults import Faults
from tests.simulation.history_runner import (
    FIRST_PLAIN,
    STATE,
    VOCAB,
    ChoosingHistoryRunner,
    EngineDies,
    HistoryRunner,
    Windows,
)
from tests.simulation.pipe import End, pair
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_client import SimClient
from tests.simulation.sim_request import SYSTEM_MESSAGES, SimRequest, draw_request
from tests.simulation.sim_worker import SimWorker

# Simulated seconds after which a world that has not come to its end never will.
LIVENESS_S = 3600.0
# The same once its faults and its callers have stopped.
REST_S = 60.0
# Faults stop after so many seconds at most. Everything that is open then must end within FINALS_S seconds.
FAULTS_S, FINALS_S = 20.0, 300.0
# Layer groups of a world, by the seed. A row that reads poison is NaN in all of a model's layers.
GROUPS: tuple[Windows, ...] = ((None,), (None, STATE), (None,), (6, None, STATE))
# A request is paused twice, more often only while there is nobody else to pause; so often it never happened.
MAX_PAUSES = 12


class TracedLink(RemoteBatcher):
    """The link of a world, which hears of each message."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.options, world.kill)
        self._world = world

    def _hear(self, connection: EngineConnection, event: Any) -> None:
        super()._hear(connection, event)
        if event is None:
            self._world.num_deaths += 1
        if getattr(event, "name", None) != "health":
            self._world.trace("link", "closed" if event is None else type(event).__name__)


class World:
    """One seed's service, callers and faults.

    Args:
        seed: draws everything.
        model: for the tokenizer and the limits; it is never evaluated.
        life: of a fleet's replica, which it is: has other faults than the seed's other lives, and the same options.
        faults: decides which of the drawn faults happen.
    """

    gateways_die = False
    drain_rate = 0.1
    deaths_to_lose = 2

    def __init__(
        self,
        seed: int,
        model: Model,
        life: int | None = None,
        options: BatcherOptions | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.rng = random.Random(seed)
        self.model = model
        self.events: list[str] = []
        self.num_deaths = 0
        self.is_draining = False
        self._harm = self.rng.choice((0.0, 0.0, 0.1))
        self._prefixes = [[self.rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(24)] for _ in range(3)]
        # In a crowded world long answers to many requests at once fill slots, queue and pool.
        self._is_crowded = self.rng.random() < 0.3
        self.spread_s = 0.1 if self._is_crowded else self.rng.choice((0.1, 3.0))
        self._max_tokens = 40 if self._is_crowded else 16
        self._num_blocks = 24 if self._is_crowded else self.rng.choice((24, 64, 200))
        self.options = self._draw_options()
        if options is not None:
            self.options = options
        self._kill_rate = self.rng.choice((0.0, 0.0, 0.05, 0.3))
        self._hang_rate = self.rng.choice((0.0, 0.0, 0.01))
        self._shortage_rate = self.rng.choice((0.0, 0.0, 0.0, 0.01))
        self._jump_rate = self.rng.choice((0.0, 0.1))
        self._jumped_s = 0.0
        self._runner_type = self.rng.choice((HistoryRunner, ChoosingHistoryRunner))
        self._windows = GROUPS[seed % len(GROUPS)]
        self._misjudges = random.Random(seed)
        self._was_killed = False  # whether the last death looked like a kill from outside
        self._of_fleet = life is not None
        if life is not None:
            self.rng = random.Random(f"{seed} {life}")
        self.is_calm = False  # no more faults, so that everything can come to its end
        self._batcher: Batcher | None = None
        self._engine_end: End | None = None
        self._life: trio.Nursery | None = None
        self._nursery: trio.Nursery

    def _draw_options(self) -> BatcherOptions:
        rng = self.rng
        kind = rng.choice((BatchingType.INFLIGHT_FUSED_BATCHING,) * 2 + tuple(BatchingType))
        policy = SchedulerPolicy.MAX_UTILIZATION if self._is_crowded else rng.choice(list(SchedulerPolicy))
        pauses = policy is SchedulerPolicy.MAX_UTILIZATION and kind is not BatchingType.V1
        # What is held for good must leave room for the longest request.
        held = rng.choice(((), (), SYSTEM_MESSAGES[:1])) if self._num_blocks > 24 else ()
        return BatcherOptions(
            n_parallel=rng.choice((4, 6)) if self._is_crowded else rng.choice((1, 2, 4)),
            batch_size=rng.choice((0, 0, 2)),
            batch_timeout=rng.choice((0.0, 20.0, None)),
            max_batch_tokens=rng.choice((8, 32)),
            target_inter_token_latency_ms=rng.choice((None, 0.0, 40.0, 100.0)),  # a simulated step takes 25 on average
            max_queue=rng.choice((None, 4, 64)),
            fair_share=rng.random() < 0.8,
            priority_ageing_s=rng.choice((0.0, 0.0, 2.0)),
            default_deadline_s=rng.choice((60.0, 60.0, 3.0, 0.0)),
            scheduler=rng.choice(("fifo", "prefill_first")),
            scheduler_policy=policy,
            batching_type=kind,
            cache_budget=rng.choice((None, None, None, 24)),
            enable_chunked_context=rng.random() < 0.8,
            margin=rng.choice((None, 0.0)) if pauses else None,
            pause_order=rng.choice((None, None, *PauseOrder)) if pauses else None,
            max_pauses=rng.choice((2, 2, 0)),
            async_batching=rng.random() < 0.8,
            prompt_lookup=True,
            # GiB: none, enough, and a block or two.
            cpu_offload_space=rng.choice((0.0, 0.001, 0.001, 3e-7)),
            stall_s=5.0,
            system_prompts=held,
            max_held_prompts=rng.choice((1, 4)),
        )

    @property
    def default_deadline_s(self) -> float:
        return self.options.default_deadline_s

    def draw_request(self, rng: random.Random) -> SimRequest:
        """What a client asks next."""

        def draw(harm: float) -> SimRequest:
            return draw_request(
                rng,
                self.model,
                self._prefixes,
                max_tokens=rng.randint(1, self._max_tokens),
                harm=harm,
                has_priorities=self.options.priority_ageing_s > 0,
            )

        drawn = draw(self._harm)
        return draw(0.0) if drawn.does_harm and not self.faults.happens("harm") else drawn

    def trace(self, who: str, what: str) -> None:
        """Notes an event, and checks what must hold after every one."""
        self.events.append(f"{trio.current_time():.4f} {who} {what}")
        self._link.accepted.check_integrity()
        if self._batcher is not None:
            pauses = max((sequence.num_pauses for sequence in self._batcher.slots.pending), default=0)
            assert pauses <= MAX_PAUSES, "what is paused again and again keeps all others waiting, too"

    def read_result(self, value: Any) -> Result:
        """A final's plain data as the type that it is."""
        return msgspec.convert(value, Result, strict=False)

    def connect(self, name: str) -> End:
        """A client's end of a new connection to the gateway."""
        rng = random.Random(self.rng.random())
        there, here = pair(rng, window=rng.choice((64, 4096)), max_delay_s=rng.choice((0.0, 0.05)))
        self.serve(here, name)
        return there

    def serve(self, end: End, name: str) -> None:
        """Serves a client at the other end of a pipe."""
        self._nursery.start_soon(self._serve, end, name)

    def simulate(self) -> None:
        """The whole life of the world.

        Raises:
            BaseException: what is wrong with it.
        """
        try:
            run_seeded(self._run, self.seed)
        except BaseException as error:
            error.add_note("the last events:\n" + "\n".join(self.events[-25:]))
            raise

    async def _run(self) -> None:
        with trio.fail_after(LIVENESS_S):
            async with trio.open_nursery() as nursery:
                await self.open(nursery)
                if self.rng.random() < self.drain_rate and self.faults.happens("drain"):
                    self._nursery.start_soon(self._drain)
                ended = trio.Event()
                nursery.start_soon(self._run_clients, ended)
                with trio.move_on_after(random.Random(f"{self.seed} calm").uniform(0.0, FAULTS_S)):
                    await ended.wait()
                self.calm()
                with trio.move_on_after(FINALS_S):
                    await ended.wait()
                open_calls = [f"{entry.id}: {entry.phase.value}" for entry in self._link.accepted]
                assert ended.is_set(), f"{FINALS_S:g} s after the last fault, something has not ended: {open_calls}"
                await self.come_to_rest()
                nursery.cancel_scope.cancel()

    async def _run_clients(self, ended: trio.Event) -> None:
        async with trio.open_nursery() as clients:
            for number in range(self.rng.randint(1, 4)):
                client = SimClient(self, f"client{number}", random.Random(self.rng.random()))
                clients.start_soon(client.run, self.rng.randint(1, 8))
        ended.set()

    async def open(self, nursery: trio.Nursery) -> None:
        """Begins to live, and to have faults, in the nursery."""
        self._nursery = nursery
        self._link = TracedLink(self)
        await nursery.start(self._link.run)
        self._dispatcher = Dispatcher(self._link, of_fleet=self._of_fleet)
        self._budget = MessageBudget(MAX_HALF_MESSAGES)
        nursery.start_soon(self._run_engines)
        nursery.start_soon(self._harass)

    def calm(self) -> None:
        """No more faults from now on."""
        self.is_calm = True

    async def come_to_rest(self) -> None:
        """Without faults and callers everything must be given back."""
        self.calm()
        with trio.fail_after(REST_S):  # a hung engine is found, the next one starts, and what is open ends
            while not self._is_idle():  # noqa: ASYNC110 - time is simulated, and there is no one event to wait for
                await trio.sleep(0.2)
        await trio.sleep(1.0)
        self._link.accepted.check_integrity()
        counts = self._link.accepted.counts
        assert counts["accepted"] == counts["finals"], counts
        batcher = self._batcher
        assert batcher.slots.seq_pool == set(range(batcher.options.n_parallel)), "a slot is lost"
        assert not batcher.slots.sequences and not batcher.slots.pending
        batcher.ctx.kv.check_integrity()
        for held in list(batcher.held_prompts):
            batcher.slots.drop_held(held)
        assert batcher.ctx.kv.counts().used == 0, "blocks are lost"

    def _is_idle(self) -> bool:
        if self._life is None or self._batcher is None or self._life.cancel_scope.cancel_called:
            return False
        return not len(self._link.accepted) and not len(self._batcher.requests)

    # The gateway

    async def _serve(self, end: End, name: str) -> None:
        async with trio.open_nursery() as calls:
            connection = RPCConnection(
                end, self._dispatcher, CallHost(calls), peer=Peer(name, name), budget=self._budget
            )
            calls.start_soon(self._sweep, connection)
            await connection.run()
            calls.cancel_scope.cancel()

    async def _sweep(self, connection: RPCConnection) -> None:
        """What the gateway's own sweep does for each of its connections."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            connection.last_heard += now - last - SWEEP_S
            last = now
            check_connection(connection, now)

    # The engine

    async def _run_engines(self) -> None:
        """One life after another, as a supervisor would."""
        while True:
            await trio.sleep(0.1 + self.rng.random())
            try:
                await self._live()
            except* (EngineDies, EngineFault):
                # Now and then a death that a request has caused looks as if it had come from outside.
                self._was_killed = self._misjudges.random() < 0.2
            self.trace("engine", "died")
            self._life = self._batcher = None

    async def _live(self) -> None:
        gateway_end, self._engine_end = pair(random.Random(self.rng.random()), window=2**20, max_delay_s=0.01)
        rng = random.Random(self.rng.random())
        try:
            async with trio.open_nursery() as life:
                batcher = Batcher(
                    partial(self._open_context),
                    self.options,
                    open_worker=lambda name: self._open_worker(life, rng, name),
                )
                # What ends it ends the process: there is no time for last words.
                ref = await start(life, batcher, name="batcher", shutdown_s=0.0)
                models = await ref.call(ModelsRequest(), timeout=None)
                self._link.join(gateway_end, models, was_killed=self._was_killed)  # type: ignore[arg-type]  # a pipe
                self._batcher, self._life = batcher, life
                await EngineSession(ref, self._engine_end).run()
                life.cancel_scope.cancel()
        finally:
            self._engine_end.cut()

    def _open_worker(self, life: trio.Nursery, rng: random.Random, name: str) -> SimWorker:
        def hang() -> bool:
            serves = self._life is life and not self.is_calm  # loading may take as long as it likes
            hangs = serves and name == "genbatch-model" and rng.random() < self._hang_rate
            return hangs and self.faults.happens("hang")

        return SimWorker(life, rng, 0.05, hang)

    def _open_context(self) -> Context:
        def is_short() -> bool:
            is_short = not self.is_calm and self.rng.random() < self._shortage_rate
            return is_short and self.faults.happens("shortage")

        return Context(
            self.model,
            self._runner_type(is_short, self._windows),
            num_blocks=[self._num_blocks] * len(self._windows),
            n_parallel=self.options.n_parallel,
            n_held=self.options.max_held_prompts,
            n_batch=self.options.max_batch_tokens,
            block_size=4,
        )

    # Faults

    def kill(self, reason: str) -> None:
        """As SIGKILL: what it had not sent is never sent, and nothing of it runs again."""
        if self._life is not None:
            self.trace("engine", f"is killed: {reason}")
            assert self._engine_end is not None
            self._engine_end.cut()
            self._life.cancel_scope.cancel()
            self._life = self._batcher = None
            self._was_killed = reason == "drawn"

    async def _drain(self) -> None:
        """An operator's last word: in time, nothing is open any more."""
        await trio.sleep(self.rng.random() * 5)
        timeout_s = self.rng.choice((0.0, 1.0, 30.0))
        self.trace("operator", f"drains, for {timeout_s} s")
        self.is_draining = True
        begun, jumped = trio.current_time(), self._jumped_s
        await self._dispatcher.call("drain", {"timeout_s": timeout_s}, Caller("operator"))
        assert not len(self._link.accepted), "drained, and something is open"
        most = timeout_s + CANCEL_GRACE_S + self._jumped_s - jumped
        assert trio.current_time() - begun <= most + 0.001, "drained too late"

    async def _harass(self) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        while not self.is_calm:
            await trio.sleep(self.rng.random())
            if self.rng.random() < self._kill_rate and not self.is_calm and self.faults.happens("kill"):
                self.kill("drawn")
            if self.rng.random() < self._jump_rate and self.faults.happens("jump"):
                self.trace("clock", "jumps")
                # Less than a client may take to read: a gateway that slept for longer gives up on sends under way.
                seconds = self.rng.choice((0.5, 3.0, 8.0))
                self._jumped_s += seconds
                clock.jump(seconds)
            if self._batcher is not None and not self._batcher._stepping:
                self._batcher.ctx.kv.check_integrity()
