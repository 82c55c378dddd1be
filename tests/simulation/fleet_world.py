"""FleetWorld: gateways over replicas on several nodes, in one deterministic event loop, and the faults a seed draws.

Real: FleetGateway and its rule for how many replicas there are, Fleet, routers, ReplicaConnection, and in each replica
all that a World has. Simulated: Ray (`SimReplicas`), nodes that die with their replicas, ways between a gateway and a
node that are lost and found again, gateways that die under their clients, and versions of the model that follow one
another. Every client checks what it gets; at the end nothing is open anywhere, and no block or slot is lost.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.fleet.fleet import FleetLimits
from genbatch.actors.fleet.routing import ScaleRule
from genbatch.actors.gateways.accepting import MAX_HALF_MESSAGES, MessageBudget, Peer
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import SWEEP_S, RPCConnection, check_connection
from genbatch.actors.gateways.session import CallHost
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.fleet.gateway import FleetGateway, FleetOptions
from genbatch.clients.fleet.replicas import Described, ReplicaConnection
from genbatch.clients.transports import RPCTransport
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.messages import GenerateRequest, Result
from tests.simulation.faults import Faults
from tests.simulation.history_runner import FIRST_PLAIN, VOCAB, expected
from tests.simulation.pipe import End, pair
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_client import SimClient
from tests.simulation.sim_request import SimRequest
from tests.simulation.world import FAULTS_S, FINALS_S, LIVENESS_S, World

NUM_NODES = 2


class PipeTransport(RPCTransport):
    """A client's transport over a pipe that `dial` makes; OSError where nobody is reached."""

    def __init__(self, address: str, dial: Callable[[], End]) -> None:
        super().__init__(f"rpc://{address}:1")
        self._dial = dial

    async def _open_stream(self) -> Any:
        await trio.lowlevel.checkpoint()
        return self._dial()


@dataclass(eq=False)
class Life:
    """One life of a replica: its processes, on a node, and the connections to it by gateway."""

    number: int
    node: int
    world: World
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ways: list[tuple[str, End]] = field(default_factory=list)
    is_ready: bool = False


@dataclass(eq=False)
class SimReplica:
    """What Ray keeps up: one life after another."""

    life: Life | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class SimReplicas:
    """What Ray knows, as one gateway sees it; implements Replicas."""

    def __init__(self, world: "FleetWorld", gateway: str, version: int) -> None:
        self._world, self._gateway, self._version = world, gateway, version

    async def settle(self) -> None:
        await trio.lowlevel.checkpoint()

    async def names(self) -> list[str]:
        await trio.sleep(0.001)
        return sorted(self._world.replicas, key=lambda name: tuple(map(int, name.split(" "))))

    async def create(self, index: int) -> str:
        await trio.sleep(0.001)
        name = f"{self._version} {index}"
        self._world.create(name)
        return name

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        await trio.sleep(0.001)
        with trio.move_on_after(timeout_s):
            while (replica := self._world.replicas.get(name)) is not None:
                if replica.life is not None and replica.life.is_ready:
                    return Described(f"{replica.life.number}", name, (), None)
                await trio.sleep(0.1)
        return None

    def connect(self, described: Described) -> ReplicaConnection:
        def dial() -> End:
            return self._world.dial(self._gateway, described.address, described.life)

        return ReplicaConnection(PipeTransport(f"life{described.life}", dial))

    async def end(self, name: str) -> None:
        await trio.sleep(0.001)
        replica = self._world.replicas.pop(name, None)
        if replica is not None:
            self._world.trace(name, "is ended")
            self._world.kill(replica)
            replica.scope.cancel()

    def is_ours(self, name: str) -> bool:
        return name.startswith(f"{self._version} ")

    def is_superseded(self, names: list[str]) -> bool:
        return any(int(name.split(" ")[0]) > self._version for name in names)


@dataclass(eq=False)
class SimGateway:
    """A gateway process, one life after another."""

    name: str
    version: int = 0
    gateway: FleetGateway | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    clients: list[End] = field(default_factory=list)
    calls: trio.Nursery | None = None
    budget: MessageBudget = field(default_factory=lambda: MessageBudget(MAX_HALF_MESSAGES))


class FleetWorld:
    """One seed's fleet, callers and faults; see World.

    Args:
        seed: draws everything.
        model: as of a World.
        rule, num_gateways, router, options: what is not to be drawn; with a rule there are no faults.
    """

    gateways_die = True
    deaths_to_lose = 2
    is_draining = False

    def __init__(
        self,
        seed: int,
        model: Model,
        rule: ScaleRule | None = None,
        num_gateways: int = 1,
        *,
        router: str | None = None,
        options: BatcherOptions | None = None,
    ) -> None:
        self.seed, self.model = seed, model
        self.faults = Faults()
        self.rng = random.Random(f"fleet {seed}")
        self.events: list[str] = []
        self.replicas: dict[str, SimReplica] = {}
        self.replayed = 0  # requests that were sent to another replica
        self._pattern = World(seed, model, life=0)  # draws requests as its replicas can serve them
        self.spread_s = self._pattern.spread_s
        self._rule = ScaleRule(
            min_replicas=self.rng.choice((0, 1, 1, 2)),
            max_replicas=self.rng.choice((2, 3)),
            tokens_per_replica=self.rng.choice((16, 4096)),
            idle_s=self.rng.choice((0.5, 5.0)),
        )
        self._router = self.rng.choice(("prefix", "least_tokens", "round_robin"))
        self.default_deadline_s = self._pattern.default_deadline_s
        self._gateways = [SimGateway(f"gateway{number}") for number in range(self.rng.choice((1, 2, 2)))]
        self._death_rate = self.rng.choice((0.0, 0.02, 0.1))
        self._partition_rate = self.rng.choice((0.0, 0.05, 0.2))
        self._gateway_death_rate = self.rng.choice((0.0, 0.0, 0.05))
        self._roll_rate = self.rng.choice((0.0, 0.05))
        self._parted: set[tuple[str, int]] = set()  # gateway and node
        self._num_lives = 0
        self._num_lost = 0  # lives, ways and gateways
        self.is_calm = rule is not None
        if rule is not None:
            self._rule = rule
            self._gateways = [SimGateway(f"gateway{number}") for number in range(num_gateways)]
        self._router = router or self._router
        self._options = options
        self._nursery: trio.Nursery

    @property
    def num_deaths(self) -> int:
        lives = [replica.life for replica in self.replicas.values() if replica.life is not None]
        return self._num_lost + sum(life.world.num_deaths for life in lives)

    def trace(self, who: str, what: str) -> None:
        self.events.append(f"{trio.current_time():.4f} {who} {what}")
        for one in self._gateways:
            if one.gateway is not None:
                one.gateway.fleet.check_integrity()

    def read_result(self, value: Any) -> Result:
        return msgspec.convert(value, Result, strict=False)

    def draw_request(self, rng: random.Random) -> SimRequest:
        return self._pattern.draw_request(rng)

    def simulate(self, story: Callable[["FleetWorld"], Awaitable[None]] | None = None) -> None:
        """The whole life of the world.

        Args:
            story: what happens in it; None: clients come and ask.

        Raises:
            BaseException: what is wrong with it.
        """
        try:
            run_seeded(partial(self._run, story), self.seed)
        except BaseException as error:
            error.add_note("the last events:\n" + "\n".join(self.events[-25:]))
            raise

    async def _run(self, story: Callable[["FleetWorld"], Awaitable[None]] | None) -> None:
        with trio.fail_after(LIVENESS_S):
            async with trio.open_nursery() as self._nursery:
                for one in self._gateways:
                    self._nursery.start_soon(self._keep_gateway, one)
                await trio.sleep(0.1)
                self._nursery.start_soon(self._harass)
                await (self._until_clients_end if story is None else partial(story, self))()
                self._calm()
                await self._come_to_rest()
                self._nursery.cancel_scope.cancel()

    async def _until_clients_end(self) -> None:
        """Has faults for a while; then everything that is open must end."""
        ended = trio.Event()
        self._nursery.start_soon(self._run_clients, ended)
        with trio.move_on_after(random.Random(f"fleet {self.seed} calm").uniform(0.0, FAULTS_S)):
            await ended.wait()
        self._calm()
        with trio.move_on_after(FINALS_S):
            await ended.wait()
        assert ended.is_set(), f"{FINALS_S:g} s after the last fault, something has not ended"

    async def _run_clients(self, ended: trio.Event) -> None:
        async with trio.open_nursery() as clients:
            for number in range(self.rng.randint(1, 4)):
                client = SimClient(self, f"client{number}", random.Random(self.rng.random()))
                clients.start_soon(client.run, self.rng.randint(1, 8))
        ended.set()

    async def ask(self, number: int, max_tokens: int = 8, client: str = "caller") -> None:
        """Has a plain request answered by way of the gateway with this number, and checks the answer."""
        one = self._gateways[number].gateway
        assert one is not None
        prompt = [self.rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(12)]
        request = GenerateRequest(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True)
        result = await one.fleet.call(Generate(request, client=client))
        assert result.token_ids == expected(prompt, max_tokens), result

    def start_version(self, number: int, version: int) -> None:
        """Starts a gateway again, with another version of the model."""
        self._gateways[number].version = version
        self._kill_gateway(self._gateways[number])

    def _calm(self) -> None:
        """No more faults from now on."""
        self.is_calm = True
        for gateway, node in list(self._parted):
            self._heal(gateway, node)
        lives = [replica.life for replica in self.replicas.values() if replica.life is not None]
        for life in lives:
            life.world.calm()

    async def _come_to_rest(self) -> None:
        # What was let go is gone, and what is wanted is there.
        await trio.sleep(60.0)
        for one in self._gateways:
            assert one.gateway is not None
            fleet = one.gateway.fleet
            fleet.check_integrity()
            assert fleet.counts["accepted"] == fleet.counts["finals"], fleet.counts
            assert not fleet.num_waiting
            self.replayed += fleet.counts["replayed"]
        names = list(self.replicas)
        assert self._rule.min_replicas <= len(names) <= self._rule.max_replicas, names
        for name in names:
            life = self.replicas[name].life
            assert life is not None and life.is_ready, f"{name} does not come back"
            await life.world.come_to_rest()

    # Gateways and their clients

    async def _keep_gateway(self, one: SimGateway) -> None:
        while True:
            with trio.CancelScope() as one.scope:
                options = FleetOptions(
                    router=self._router, rule=self._rule, limits=FleetLimits(default_deadline_s=self.default_deadline_s)
                )
                replicas = SimReplicas(self, one.name, one.version)
                one.gateway = FleetGateway(replicas, options, ServiceOptions(), one.name)
                async with trio.open_nursery() as one.calls, one.gateway.run():
                    await trio.sleep_forever()
            one.gateway = one.calls = None
            one.clients.clear()
            await trio.sleep(self.rng.random() * 3)

    def connect(self, name: str) -> End:
        """A client's end of a new connection to one of the gateways that are there."""
        rng = random.Random(self.rng.random())
        there, here = pair(rng, window=rng.choice((64, 4096)), max_delay_s=rng.choice((0.0, 0.05)))
        one = self.rng.choice([one for one in self._gateways if one.calls is not None])
        assert one.calls is not None
        one.clients.append(here)
        one.calls.start_soon(self._serve, one, here, name)
        return there

    async def _serve(self, one: SimGateway, end: End, name: str) -> None:
        assert one.gateway is not None
        dispatcher = Dispatcher(one.gateway.fleet)
        async with trio.open_nursery() as calls:
            connection = RPCConnection(end, dispatcher, CallHost(calls), peer=Peer(name, name), budget=one.budget)
            calls.start_soon(self._sweep, connection)
            await connection.run()
            calls.cancel_scope.cancel()

    async def _sweep(self, connection: RPCConnection) -> None:
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            connection.last_heard += now - last - SWEEP_S  # the clock jumped
            last = now
            check_connection(connection, now)

    # Replicas

    def create(self, name: str) -> None:
        """Begins to keep up a replica, unless there is one of this name."""
        if name not in self.replicas:
            replica = self.replicas[name] = SimReplica()
            self.trace(name, "is wanted")
            self._nursery.start_soon(self._keep_replica, name, replica)

    async def _keep_replica(self, name: str, replica: SimReplica) -> None:
        with replica.scope:
            while True:
                await trio.sleep(0.1 + self.rng.random() * 2)
                self._num_lives += 1
                world = World(self.seed, self.model, life=self._num_lives, options=self._options)
                world.events = self.events
                life = replica.life = Life(self._num_lives, self.rng.randrange(NUM_NODES), world)
                self.trace(name, f"starts on node {life.node}, life {life.number}")
                with life.scope:
                    async with trio.open_nursery() as nursery:
                        await world.open(nursery)
                        if self.is_calm:
                            world.calm()
                        life.is_ready = True
                        await trio.sleep_forever()
                self._num_lost += world.num_deaths
                replica.life = None

    def ready(self) -> list[SimReplica]:
        """Those that are up."""
        return [one for one in self.replicas.values() if one.life is not None and one.life.is_ready]

    def dial(self, gateway: str, name: str, number: str) -> End:
        """A gateway's end of a new connection to a life of a replica.

        Raises:
            OSError: it is gone, or there is no way.
        """
        replica = self.replicas.get(name)
        life = None if replica is None else replica.life
        if life is None or f"{life.number}" != number or not life.is_ready or (gateway, life.node) in self._parted:
            raise OSError("nobody is reached")
        rng = random.Random(self.rng.random())
        there, here = pair(rng, window=2**16, max_delay_s=rng.choice((0.0, 0.05)))
        life.world.serve(here, gateway)
        life.ways.append((gateway, there))
        return there

    def kill(self, replica: SimReplica) -> None:
        """As a node's death: what was not sent is never sent."""
        life = replica.life
        if life is not None:
            for _, end in life.ways:
                end.cut()
            life.is_ready = False
            life.scope.cancel()

    # Faults

    async def _harass(self) -> None:
        while not self.is_calm:
            await trio.sleep(self.rng.random())
            if self.is_calm:
                return
            if self.rng.random() < self._death_rate:
                self._kill_node(self.rng.randrange(NUM_NODES))
            if self.rng.random() < self._partition_rate:
                self._nursery.start_soon(self._part, self.rng.choice(self._gateways), self.rng.randrange(NUM_NODES))
            up = [one for one in self._gateways if one.calls is not None]
            if len(up) > 1 and self.rng.random() < self._gateway_death_rate:
                self._kill_gateway(self.rng.choice(up))
            up = [one for one in self._gateways if one.calls is not None]
            if len(up) > 1 and self.rng.random() < self._roll_rate:
                one = self.rng.choice(up)
                version = max(other.version for other in self._gateways) + 1
                self.trace(one.name, f"is started again with version {version}")
                self.start_version(self._gateways.index(one), version)

    def _kill_node(self, node: int) -> None:
        self.trace(f"node {node}", "dies")
        for replica in self.replicas.values():
            if replica.life is not None and replica.life.node == node:
                self._num_lost += 1
                self.kill(replica)

    def _kill_gateway(self, one: SimGateway) -> None:
        self.trace(one.name, "dies")
        self._num_lost += 1
        for end in one.clients:
            end.cut()
        for replica in self.replicas.values():
            if replica.life is not None:
                for gateway, end in replica.life.ways:
                    if gateway == one.name:
                        end.cut()
        one.calls = None
        one.scope.cancel()

    async def _part(self, one: SimGateway, node: int) -> None:
        if (one.name, node) in self._parted:
            return
        self.trace(one.name, f"is parted from node {node}")
        self._num_lost += 1
        self._parted.add((one.name, node))
        for replica in self.replicas.values():
            if replica.life is not None and replica.life.node == node:
                for gateway, end in replica.life.ways:
                    if gateway == one.name:
                        end.part()
        await trio.sleep(self.rng.random() * 10)
        self._heal(one.name, node)

    def _heal(self, gateway: str, node: int) -> None:
        if (gateway, node) not in self._parted:
            return
        self._parted.remove((gateway, node))
        for replica in self.replicas.values():
            if replica.life is not None and replica.life.node == node:
                for its, end in replica.life.ways:
                    if its == gateway:
                        end.reset()
