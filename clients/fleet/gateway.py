"""open_fleet: a gateway over a fleet of replicas, which it finds, watches, grows and shrinks.

    async with open_fleet(replicas, FleetOptions(rule=ScaleRule(max_replicas=4)), service) as gateway:
        print(gateway.addresses)

Twice a second the gateway lists the replicas (from Ray), asks each for its health (over ZeroMQ), and computes the
wanted number of replicas (by a rule). The only shared state is Ray's list of names, so any number of gateways can run
at once. Two gateways that create the same replica get the same one. A draining replica shows that by its health.
"""

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from genbatch.actors.fleet.fleet import Fleet, FleetLimits, ReplicaPhase
from genbatch.actors.fleet.routing import FleetLoad, ScaleRule, build_router, wanted_replicas
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import Registry, Supervisor, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.gateway_process import LAST_WORDS_S, Listeners, check_listeners, retire
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.fleet.ray_replicas import RayReplicas
from genbatch.clients.fleet.replicas import Described, RayUnavailable, ReplicaConnection, Replicas
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.service_messages import DrainRequest, HealthRequest, Models, ModelsRequest, StatsRequest

logger = logging.getLogger(__name__)

# Seconds between two checks of the fleet.
LOOK_S = 0.5
# The timeout for a replica's description. Loading a model takes longer, so the gateway asks again.
ASK_S = 2.0
# Seconds after which another version's replica that is not ready counts as failed.
START_S = 600.0
# The timeout for draining a replica.
DRAIN_S = 30.0
# Seconds between a replica's drain and its end, so that its last results reach the other gateways.
LAST_FINALS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a gateway's fleet.

    Args:
        router: see `build_router`.
        rule: computes the number of replicas.
        limits: the limits of this gateway.
    """

    router: str = "prefix"
    rule: ScaleRule = field(default_factory=ScaleRule)
    limits: FleetLimits = field(default_factory=FleetLimits)


@dataclass(slots=True)
class _Known:
    """A replica that has joined."""

    described: Described
    connection: ReplicaConnection
    scope: trio.CancelScope


class FleetGateway:
    """See the module's docstring.

    Args:
        name: this gateway's name, unique in the fleet; None draws a name.
        sockets: see Listeners.
    """

    def __init__(
        self,
        replicas: Replicas,
        options: FleetOptions,
        service: ServiceOptions,
        name: str | None = None,
        sockets: ListeningSockets | None = None,
    ) -> None:
        self.fleet = Fleet(build_router(options.router), options.limits, name=name or uuid.uuid4().hex[:8])
        self.telemetry = Telemetry()
        self._replicas, self._options = replicas, options
        self._listeners = Listeners(self.fleet, service, self.telemetry, sockets=sockets)
        self._known: dict[str, _Known] = {}  # by the actor's name
        self._asked: set[str] = set()  # replicas whose description is awaited
        self._ending: set[str] = set()
        self._enough_since: float | None = None
        self._ready: list[str] = []  # replicas of our version that were ready at the last check
        self._seen_at: dict[str, float] = {}  # when other versions' replicas that are not ready were found
        self._fault: RayUnavailable | None = None
        self._nursery: trio.Nursery

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses for clients."""
        return self._listeners.addresses

    @property
    def take_over_refusal(self) -> str:
        """Return why no other gateway can take this one's place; "" if one can."""
        return self._replicas.take_over_refusal

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """Return the served models and the stats; there is no model before the first replica."""
        try:
            models = await self.fleet.call(ModelsRequest())
        except Unavailable:
            models = Models(models=())
        return models, await self.fleet.call(StatsRequest())

    async def drain(self, timeout_s: float) -> None:
        """Drain this gateway: refuse new requests, and wait up to `timeout_s` seconds for the open ones."""
        await self.fleet.call(DrainRequest(timeout_s=timeout_s))
        await trio.sleep(LAST_WORDS_S)

    async def retire(self, timeout_s: float) -> None:
        """Serve only the connected clients until they disconnect, for at most `timeout_s` seconds."""
        await retire(self._listeners, self.fleet, timeout_s)

    @asynccontextmanager
    async def run(self) -> AsyncIterator["FleetGateway"]:
        """Run the fleet, and listen for clients once the minimum number of replicas is ready."""
        supervisor = Supervisor([self._listeners.child()], name="fleet", registry=Registry(), telemetry=self.telemetry)
        async with background() as self._nursery:
            self._nursery.start_soon(self._keep)
            while len(self.fleet.replicas) < self._options.rule.min_replicas:
                if self._fault is not None:
                    raise self._fault
                await trio.sleep(LOOK_S / 5)
            try:
                await self._nursery.start(supervisor.run)
            except StartFailed as error:
                raise (error.__cause__ or error) from None
            yield self

    # Keeping the fleet

    async def _keep(self) -> None:
        await self._replicas.settle()
        while True:
            names = await self._replicas.names()
            for name in names:
                if name not in self._known and name not in self._asked:
                    self._asked.add(name)
                    self._nursery.start_soon(self._meet, name)
            for name in self._known.keys() - set(names):
                self._part(name)
            await self._scale(names)
            await trio.sleep(LOOK_S)

    async def _meet(self, name: str) -> None:
        """Wait until the replica is ready, and watch it until its end."""
        try:
            described = await self._replicas.describe(name, ASK_S)
        except RayUnavailable as fault:
            logger.error("%s", fault)
            self._fault = fault
            await self._replicas.end(name)
            described = None
        try:
            if described is not None:
                await self._attend(name, described)
        finally:
            self._asked.discard(name)

    async def _attend(self, name: str, described: Described) -> None:
        with trio.CancelScope() as scope:
            async with self._replicas.connect(described) as connection:
                life = f"{name} {described.life}"
                try:
                    card, *adapters = (await connection.ask(ModelsRequest())).models
                except GenbatchError:
                    return  # the replica is not ready after all, or is gone
                self._known[name] = _Known(described, connection, scope)
                self.fleet.join(life, connection, card, tuple(adapters))
                logger.info("replica %s joins", name)
                try:
                    await self._watch(name, life, described, connection)
                finally:
                    self.fleet.leave(life)
                    self._known.pop(name, None)
                    logger.info("replica %s leaves", name)

    async def _watch(self, name: str, life: str, described: Described, connection: ReplicaConnection) -> None:
        """Report the replica's health until the replica restarts."""
        while True:
            try:
                self.fleet.report(life, await connection.ask(HealthRequest()))
            except GenbatchError:
                now = await self._replicas.describe(name, ASK_S)
                if now is not None and now.life != described.life:
                    return
            await trio.sleep(LOOK_S)

    def _part(self, name: str) -> None:
        known = self._known.get(name)
        if known is not None:
            known.scope.cancel()

    # Scaling

    async def _scale(self, names: list[str]) -> None:
        if self._replicas.is_superseded(names):
            return  # the later version's gateways scale the fleet
        ours = [name for name in names if self._replicas.is_ours(name) and name not in self._ending]
        target = wanted_replicas(self._options.rule, self._load(len(ours)))
        taken = {int(name.rsplit(" ", 1)[1]) for name in names if self._replicas.is_ours(name)}
        free = (index for index in range(len(taken) + target + 1) if index not in taken)
        for _ in range(target - len(ours)):
            await self._replicas.create(next(free))
        # Do not shrink while the set of ready replicas changes: another gateway may need a replica that is starting.
        ready = [name for name in ours if name in self._known]
        if len(ours) <= target or ready != self._ready or not ready:
            self._ready, self._enough_since = ready, None
        elif self._enough_since is None:
            self._enough_since = trio.current_time()
        elif trio.current_time() - self._enough_since >= self._options.rule.idle_s:
            self._enough_since = None
            self._let_go(ready[-1])
        # Another version's replicas serve until ours are ready; then they are drained one by one.
        others = [name for name in names if not self._replicas.is_ours(name) and self._may_go(name)]
        if len(ready) >= max(1, target) and others and not self._ending:
            self._let_go(others[0])

    def _may_go(self, name: str) -> bool:
        """Return whether the replica can be drained, or has not become ready within START_S."""
        if name in self._known:
            return True
        seen_at = self._seen_at.setdefault(name, trio.current_time())
        return trio.current_time() - seen_at > START_S

    def _load(self, num_ours: int) -> FleetLoad:
        open_replicas = [replica for replica in self.fleet.replicas if replica.phase is not ReplicaPhase.DRAINING]
        return FleetLoad(
            replicas=num_ours,
            slots=min((replica.card.n_parallel for replica in open_replicas), default=1),
            open=sum(replica.view.num_open for replica in open_replicas),
            tokens_waiting=sum(replica.view.tokens_waiting for replica in open_replicas),
            without_replica=self.fleet.num_waiting,
        )

    def _let_go(self, name: str) -> None:
        if name not in self._ending:
            self._ending.add(name)
            self._nursery.start_soon(self._drain_and_end, name)

    async def _drain_and_end(self, name: str) -> None:
        known = self._known.get(name)
        try:
            if known is not None:
                life = f"{name} {known.described.life}"
                await self.fleet.drain(life, DRAIN_S)
                await self.fleet.emptied(life, DRAIN_S)
                await trio.sleep(LAST_FINALS_S)
        except (GenbatchError, KeyError):
            pass  # the replica is gone already
        await self._replicas.end(name)
        self._part(name)
        self._ending.discard(name)


@asynccontextmanager
async def open_fleet(
    replicas: RayReplicas, options: FleetOptions, service: ServiceOptions, sockets: ListeningSockets | None = None
) -> AsyncIterator[FleetGateway]:
    """Run a gateway over a fleet while the body runs.

    Raises:
        AddressError, KeyFileError, RouterError: an option is wrong; nothing was started.
        RayUnavailable: a replica cannot be started.
    """
    check_listeners(service)
    gateway = FleetGateway(replicas, options, service, sockets=sockets)
    try:
        async with gateway.run():
            yield gateway
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(replicas.close)
