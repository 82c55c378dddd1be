"""open_fleet: a gateway over a fleet of replicas, which it finds, watches, grows and shrinks.

    async with open_fleet(replicas, FleetOptions(rule=ScaleRule(max_replicas=4)), service) as gateway:
        print(gateway.addresses)

Twice a second: which replicas are there (Ray says), how is each (it says itself, over ZeroMQ), how many should there be
(a rule says). No state is kept anywhere but in Ray's list of names, so any number of gateways do this at once: two that
want the same replica get the same one, and one that drains a replica shows it by its health.
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
from genbatch.proto.messages import DrainRequest, HealthRequest, Models, ModelsRequest, StatsRequest

logger = logging.getLogger(__name__)

# Seconds between two looks at the fleet.
LOOK_S = 0.5
# Seconds in which a replica tells how it is; a model loads for longer, and is asked again.
ASK_S = 2.0
# Seconds after which another version's replica that is still not ready never will be.
START_S = 600.0
# Seconds that a replica has to end its requests in when it is let go.
DRAIN_S = 30.0
# Seconds in which the finals of a drained replica reach the other gateways, before it is ended.
LAST_FINALS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How a gateway keeps its fleet.

    Args:
        router: see `build_router`.
        rule: how many replicas there should be.
        limits: of this gateway.
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
        name: another one for each gateway of the fleet; None draws one.
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
        self._asked: set[str] = set()  # to describe themselves
        self._ending: set[str] = set()
        self._enough_since: float | None = None
        self._ready: list[str] = []  # replicas of our version that were, at the last look
        self._seen_at: dict[
            str, float
        ] = {}  # other versions' replicas that are not ready, and since when they are seen
        self._fault: RayUnavailable | None = None
        self._nursery: trio.Nursery

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect."""
        return self._listeners.addresses

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """What is served, and the stats; with no replica yet, no model."""
        try:
            models = await self.fleet.call(ModelsRequest())
        except Unavailable:
            models = Models(models=())
        return models, await self.fleet.call(StatsRequest())

    async def drain(self, timeout_s: float) -> None:
        """This gateway takes nothing new, ends what is open within `timeout_s` seconds, and returns."""
        await self.fleet.call(DrainRequest(timeout_s=timeout_s))
        await trio.sleep(LAST_WORDS_S)

    async def retire(self, timeout_s: float) -> None:
        """This gateway serves the clients that are connected until they have gone, for `timeout_s` seconds at most."""
        await retire(self._listeners, self.fleet, timeout_s)

    @asynccontextmanager
    async def run(self) -> AsyncIterator["FleetGateway"]:
        """Keeps the fleet and listens, once as many replicas as it must have are ready."""
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
        """Waits until the replica is ready, and stays with it for as long as it lives."""
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
                    return  # it was not as ready as it said, or is gone
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
        """Returns when this life of the replica is over."""
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
            return  # the gateways of the later version see to the fleet
        ours = [name for name in names if self._replicas.is_ours(name) and name not in self._ending]
        wanted = wanted_replicas(self._options.rule, self._load(len(ours)))
        taken = {int(name.rsplit(" ", 1)[1]) for name in names if self._replicas.is_ours(name)}
        free = (index for index in range(len(taken) + wanted + 1) if index not in taken)
        for _ in range(wanted - len(ours)):
            await self._replicas.create(next(free))
        # One that starts is some gateway's wish, and what that one needs is seen of it only once it is ready.
        ready = [name for name in ours if name in self._known]
        if len(ours) <= wanted or ready != self._ready or not ready:
            self._ready, self._enough_since = ready, None
        elif self._enough_since is None:
            self._enough_since = trio.current_time()
        elif trio.current_time() - self._enough_since >= self._options.rule.idle_s:
            self._enough_since = None
            self._let_go(ready[-1])
        # Another version's replicas serve until ours can, and then go one by one.
        others = [name for name in names if not self._replicas.is_ours(name) and self._may_go(name)]
        if len(ready) >= max(1, wanted) and others and not self._ending:
            self._let_go(others[0])

    def _may_go(self, name: str) -> bool:
        """Whether it can be drained, or has had the time to become ready and is not."""
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
            pass  # it is gone, which is what was wanted
        await self._replicas.end(name)
        self._part(name)
        self._ending.discard(name)


@asynccontextmanager
async def open_fleet(
    replicas: RayReplicas, options: FleetOptions, service: ServiceOptions, sockets: ListeningSockets | None = None
) -> AsyncIterator[FleetGateway]:
    """Runs a gateway over a fleet for as long as the body runs.

    Raises:
        AddressError, KeyFileError, RouterError: before anything is started.
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
