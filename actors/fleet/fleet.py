"""Fleet: answers the calls of a Batcher with the Batchers of several replicas.

    fleet = Fleet(build_router("prefix"), FleetLimits())
    fleet.join("r1", connection, card)           # called by the code that finds replicas
    result = await fleet.call(Generate(request)) # as with a Batcher
    fleet.leave("r1")                            # the replica has gone; await fleet.drain("r2", 30.0) loses nothing

    Generate --> router --> replica's connection --> tokens, final
        ^                        |
        |                        | the replica is gone
        +--- prompt and tokens --+

A request runs in its caller's task, so it is cancelled when the caller leaves. It has one final: the replica's, or one
from here. Within a replica, the replica's own ledger handles an engine's death, and its answer is final. The fleet
handles the loss of a whole replica, its node or the network. A request is then sent to another replica with the tokens
that were shown, within its deadline. If a second replica is lost before a new token, or if MAX_LOSSES are lost, the
request ends with engine_lost, since it may be the cause.

Each replica orders its requests by the tokens that the clients had of all replicas (see fairness). Requests wait here
while there is no replica, or while an earlier line is not served yet; clients take turns.
"""

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import trio

from genbatch.actors.batcher.messages import (
    DRAINING,
    RETRY_AFTER_DRAIN_MS,
    Embed,
    Embedded,
    Generate,
)
from genbatch.actors.fleet.fairness import Accounts, Line, Waiter, account_in_fleet, weighted
from genbatch.actors.fleet.routing import ReplicaView, Roster, Router, RouteRequest, content_blocks
from genbatch.actors.scheduling.request import charged_account
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    EngineLost,
    GenbatchError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from genbatch.proto.messages import (
    DrawnTokens,
    EmbedRequest,
    GenerateRequest,
    KeepSessionRequest,
    Payer,
    Result,
    ResumeSessionRequest,
    ScoreRequest,
    ShownTokens,
    Token,
    replayable,
)
from genbatch.proto.methods import Lane, lane_of
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    LoadAdapterRequest,
    LoadModelRequest,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)
from genbatch.proto.validation import RequestLimits, validate_request, validate_texts

# The retry hint while there is no replica: about a small model's load time.
RETRY_MS = 2000
# The waiting sequences per slot before a replica refuses; see BatcherOptions.max_queue.
QUEUE_PER_SLOT = 4
# Approximate; used to estimate tokens by length.
CHARS_PER_TOKEN = 4
# The most tries of one request without a new token: it is replayed once. And the most lost replicas of one request.
MAX_TRIES, MAX_LOSSES = 2, 4


class Connection(Protocol):
    """The way to one replica.

    Each method raises:
        Unavailable: the replica is gone, or refuses requests; it is unknown whether it got the request.
        GenbatchError: the replica's error.
    """

    async def generate(
        self,
        request: GenerateRequest,
        on_token: Callable[[Token], None] | None,
        drawn: tuple[DrawnTokens, ...] = (),
    ) -> Result:
        """Generate after the `drawn` tokens; call `on_token` with each new token."""
        ...

    async def embed(self, request: EmbedRequest | ScoreRequest) -> Embedded:
        """Embed or score, as the Batcher does."""
        ...

    async def ask(self, request: msgspec.Struct) -> Any:
        """Send the request of any other method in `proto/methods.py` and return its answer."""
        ...


class ReplicaPhase(enum.Enum):
    """The state of a replica."""

    OPEN = "open"
    SUSPECT = "suspect"  # a call was lost; it gets no requests until its next report
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """The bounds of a gateway.

    Args:
        max_waiting: requests that may wait while there is no replica.
        default_deadline_s: seconds that a client's request without a deadline of its own may wait for a replica; 0: no
            bound.
        limits: caps on one request.
    """

    max_waiting: int = 256
    default_deadline_s: float = 60.0
    limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, as this gateway knows it."""

    name: str
    connection: Connection
    card: ModelCard
    phase: ReplicaPhase = ReplicaPhase.OPEN
    num_own: int = 0  # this gateway's requests there
    own_tokens: int = 0  # prompt tokens of those without a token yet
    others: int = 0  # other gateways' requests, by its last report
    health: Health | None = None
    view: ReplicaView = field(init=False)

    def __post_init__(self) -> None:
        self.view = ReplicaView(self.name)
        self.update()

    def update(self) -> None:
        """Update the view from the known counts."""
        self.view.tokens_waiting = self.own_tokens
        self.view.num_open = self.num_own + self.others
        self.view.room = self.card.n_parallel * (1 + QUEUE_PER_SLOT) - self.view.num_open
        self.view.takes_requests = self.phase is ReplicaPhase.OPEN


class Fleet:
    """See the module's docstring.

    Args:
        name: the gateway's name, which prefixes its clients' accounts; tenants have one name at all gateways.
    """

    def __init__(self, router: Router, limits: FleetLimits, name: str = "") -> None:
        self.router, self.limits, self.name = router, limits, name
        self.counts: Counter[str] = Counter(accepted=0, finals=0, replayed=0, lost=0, joined=0, left=0)
        self.accounts = Accounts()
        self._line = Line(limits.max_waiting, RETRY_MS)
        self._replicas: dict[str, Replica] = {}
        self._roster = Roster()
        self._models: Models | None = None
        self._ended = trio.Event()  # set at the end of a request
        self._number = 0
        self._open: set[trio.CancelScope] = set()
        self._is_draining = False

    # Replicas

    @property
    def num_waiting(self) -> int:
        """The number of requests without a replica."""
        return len(self._line)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas that have joined."""
        return tuple(self._replicas.values())

    def join(self, name: str, connection: Connection, card: ModelCard, adapters: tuple[ModelCard, ...] = ()) -> None:
        """Add a replica with its model and the model's adapters; the name must be new."""
        assert name not in self._replicas, name
        self._replicas[name] = Replica(name, connection, card)
        self._models = Models(models=(card, *adapters))
        self.counts["joined"] += 1
        self._renew()

    def leave(self, name: str) -> None:
        """Remove a replica that has gone; its connection ends the requests there."""
        if self._replicas.pop(name, None) is not None:
            self.counts["left"] += 1
            self.accounts.forget_replica(name)
            self._renew()

    def report(self, name: str, health: Health) -> None:
        """Take a replica's report of its health."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.health = health
        replica.others = max(0, health.requests_running + health.requests_waiting - replica.num_own)
        if replica.phase is not ReplicaPhase.DRAINING:
            self._move(replica, ReplicaPhase.OPEN if health.status == "ready" else ReplicaPhase.SUSPECT)
        replica.update()
        self._call_line()

    async def drain(self, name: str, timeout_s: float) -> Drained:
        """Send no new requests to a replica, and return when its requests have ended."""
        replica = self._replicas[name]
        self._move(replica, ReplicaPhase.DRAINING)
        drained: Drained = await replica.connection.ask(DrainRequest(timeout_s=timeout_s))
        return drained

    async def emptied(self, name: str, timeout_s: float) -> None:
        """Wait for the finals of this gateway's requests at a drained replica, which are still on their way."""
        with trio.move_on_after(timeout_s):
            while name in self._replicas and self._replicas[name].num_own:
                await self._ended.wait()

    def _move(self, replica: Replica, phase: ReplicaPhase) -> None:
        if replica.phase is not phase:
            replica.phase = phase
            self._renew()

    def _renew(self) -> None:
        for replica in self._replicas.values():
            replica.update()
        self._roster = Roster(replica.view for replica in self._replicas.values())
        self._call_line()

    def _call_line(self) -> None:
        if len(self._line):
            self._line.call(sum(max(0, view.room) for view in self._roster))

    # Calls of a Batcher

    async def call(self, request: object, *, timeout: float | None = None, control: bool = False) -> Any:
        """Answer a call as a Batcher's ref does.

        Raises:
            GenbatchError: as with the Batcher.
        """
        match request:
            case Generate():
                return await self._accept(request)
            case Embed():
                return await self._accept_embed(request)
            case ModelsRequest() | LoadModelRequest():  # the replicas have their model loaded
                return await self._known_models()
            case HealthRequest():
                return self._health()
            case StatsRequest():
                return await self._stats()
            case KeepSessionRequest() | ResumeSessionRequest():
                raise InvalidRequest(None, "a fleet keeps no sessions, as each replica would have its own")
            case msgspec.Struct() if lane_of(request) is Lane.TEXT:
                return await (await self._any()).connection.ask(request)
            case DrainRequest(timeout_s=timeout_s):
                return await self._drain_all(timeout_s)
            case LoadAdapterRequest() | UnloadAdapterRequest():
                raise InvalidRequest(
                    None, "every replica of a fleet loads the adapters that --lora names, and no others"
                )
            case _:
                raise TypeError(f"a fleet has no call {type(request).__name__}")

    # Requests

    async def _accept(self, message: Generate) -> Result:
        self._check_draining()
        if message.keep is not None or message.beam_width > 1:
            raise InvalidRequest(None, "only an engine in the caller's process returns logits or searches beams")
        request = message.request
        validate_request(request, self.limits.limits, drawn=message.drawn, is_typed=bool(message.client))
        seen = content_blocks(request, request.tenant)
        with self._opened() as scope, scope:
            return await self._generate(message, request, seen)
        raise Cancelled("the service has stopped")

    async def _accept_embed(self, message: Embed) -> Embedded:
        self._check_draining()
        request = message.request
        validate_texts(request, self.limits.limits)
        with self._opened() as scope, scope:
            return await self._embed(message, request)
        raise Cancelled("the service has stopped")

    def _check_draining(self) -> None:
        if self._is_draining:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)

    @contextmanager
    def _opened(self) -> Iterator[trio.CancelScope]:
        """Count a request from its acceptance to its final; yield the scope in which it runs."""
        self.counts["accepted"] += 1
        scope = trio.CancelScope()
        self._open.add(scope)
        try:
            yield scope
        finally:
            self._open.discard(scope)
            self._call_line()
            self.counts["finals"] += 1
            self._ended.set()
            self._ended = trio.Event()

    async def _embed(self, message: Embed, request: EmbedRequest | ScoreRequest) -> Embedded:
        """Embed at a replica, and at another one if the first is lost."""
        account = charged_account(message.client, request.tenant)
        expires_at = math.inf if request.deadline_s is None else trio.current_time() + request.deadline_s
        size = sum(len(text) // CHARS_PER_TOKEN if isinstance(text, str) else len(text) for text in request.texts)
        seen = RouteRequest(0, prompt_tokens=max(1, size))
        for num_try in range(1, MAX_TRIES + 1):
            replica = await self._place(seen, account, 0, self._give_up_at(message, expires_at))
            if request.deadline_s is not None:
                left_s = max(0.001, expires_at - trio.current_time())
                request = msgspec.structs.replace(request, deadline_s=left_s)
            try:
                with _taking(replica, seen):
                    self._call_line()
                    return await replica.connection.embed(request)
            except Unavailable as error:
                if replica.phase is ReplicaPhase.OPEN:
                    self._move(replica, ReplicaPhase.SUSPECT)
                if num_try == MAX_TRIES:
                    self.counts["lost"] += 1
                    raise EngineLost("two replicas were lost that had this request", 0) from error
                self.counts["replayed"] += 1
        raise AssertionError("the last try returns or raises")

    async def _generate(self, message: Generate, request: GenerateRequest, seen: RouteRequest) -> Result:
        now = trio.current_time()
        expires_at = math.inf if request.deadline_s is None else now + request.deadline_s
        account = charged_account(message.client, request.tenant)
        payer = account_in_fleet(self.name, account)
        if message.on_token is not None:  # a whole answer that was lost was not shown
            request = replayable(request)
        shown = ShownTokens(request, message.drawn)
        num_tries = num_losses = 0  # tries since the last new token
        while True:
            replica = await self._place(seen, account, request.priority, self._give_up_at(message, expires_at))
            if request.deadline_s is not None:
                left_s = expires_at - trio.current_time()
                request = msgspec.structs.replace(request, deadline_s=max(0.001, left_s))
            owed = self.accounts.tell(account, replica.name)
            request = msgspec.structs.replace(request, payer=Payer(name=payer, served=owed))
            num_shown = len(shown)
            try:
                with _taking(replica, seen) as begun:
                    self._call_line()

                    def on_token(token: Token, begun: Callable[[], None] = begun) -> None:
                        shown.add(token)
                        begun()
                        assert message.on_token is not None
                        try:
                            message.on_token(token)
                        except Exception as error:  # a fault of the caller's function ends its request only
                            raise EngineError(f"on_token raised {error!r}") from error

                    show = None if message.on_token is None else on_token
                    result = await replica.connection.generate(request, show, shown.drawn())
                usage = result.usage
                self.accounts.book(account, replica.name, weighted(usage.prompt_tokens, usage.completion_tokens))
                return result
            except GenbatchError as error:
                if not isinstance(error, EngineError):  # the replica may have refused it, with nothing booked
                    self.accounts.take_back(account, replica.name, owed)
                if not isinstance(error, Unavailable):
                    raise
                # The replica refused the request, or was lost. It gets no requests until its next report.
                if replica.phase is ReplicaPhase.OPEN:
                    self._move(replica, ReplicaPhase.SUSPECT)
                num_tries, num_losses = 1 if len(shown) > num_shown else num_tries + 1, num_losses + 1
                if num_tries == MAX_TRIES or num_losses == MAX_LOSSES:
                    self.counts["lost"] += 1
                    reason = f"{num_losses} replicas were lost that had this request"
                    raise EngineLost(reason, len(shown)) from error
                self.counts["replayed"] += 1

    def _give_up_at(self, message: Generate | Embed, expires_at: float) -> float:
        """Return the time at which a request stops waiting for a replica; the replica bounds the wait for its slots."""
        if math.isfinite(expires_at) or not (message.client and self.limits.default_deadline_s):
            return expires_at
        return trio.current_time() + self.limits.default_deadline_s

    async def _place(self, seen: RouteRequest, account: str, priority: int, give_up_at: float) -> Replica:
        """Return the replica for a request; wait for one if there is none.

        Raises:
            QueueFull: too many requests wait for a replica.
            DeadlineExceeded: no replica came in time.
        """
        self._number += 1
        waiter: Waiter | None = None
        while not len(self._roster) or (waiter is None and len(self._line)):
            waiter = waiter or Waiter(account, seen.prompt_tokens, (priority, self._number))
            if not await self._line.wait(waiter, give_up_at):
                raise DeadlineExceeded("no replica became available in time")
        numbered = RouteRequest(self._number, seen.blocks, seen.prompt_tokens, seen.block_tokens)
        view = self.router.route(numbered, self._roster)
        self.router.learn(view.name, seen.blocks)
        return self._replicas[view.name]

    async def _any(self) -> Replica:
        """Return the replica for a call that is not a request.

        Raises:
            Unavailable: no replica came in the time that a request may wait.
        """
        if not len(self._roster):
            give_up_at = trio.current_time() + (self.limits.default_deadline_s or math.inf)
            try:
                return await self._place(RouteRequest(0), "", 0, give_up_at)
            except (QueueFull, DeadlineExceeded) as error:
                raise Unavailable("no replica is available", retry_after_ms=RETRY_MS) from error
        return self._replicas[self._roster[0].name]

    # Answers for gateways

    async def _known_models(self) -> Models:
        if self._models is None:
            raise Unavailable("the first replica is being started", retry_after_ms=RETRY_MS)
        return self._models

    def _health(self) -> Health:
        reports = [replica.health for replica in self._replicas.values() if replica.health is not None]
        if self._is_draining:
            status = "draining"
        elif len(self._roster) or not self._replicas:
            status = "ready"  # also without a replica: a request starts one
        else:
            status = "down"
        return Health(
            status=status,  # type: ignore[arg-type]  # one of three literals
            steps=sum(report.steps for report in reports),
            requests_running=sum(report.requests_running for report in reports),
            requests_waiting=sum(report.requests_waiting for report in reports) + self.num_waiting,
            stalled_s=max((report.stalled_s for report in reports), default=0.0),
        )

    async def _stats(self) -> dict[str, Any]:
        """Return the counters of all replicas, added up, and this gateway's counters."""
        reports: dict[str, dict[str, Any]] = {}

        async def ask(replica: Replica) -> None:
            try:
                reports[replica.name] = await replica.connection.ask(StatsRequest())
            except Unavailable:
                reports[replica.name] = {"engine": "down"}

        async with trio.open_nursery() as nursery:
            for replica in self._replicas.values():
                nursery.start_soon(ask, replica)
        total: dict[str, Any] = {}
        for stats in reports.values():
            for name, value in stats.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and name != "kv_block_size":
                    total[name] = total.get(name, 0) + value
                elif isinstance(value, str | int):
                    total.setdefault(name, value)
        return total | {
            "replicas": {name: replica.phase.value for name, replica in self._replicas.items()},
            "requests_open": len(self._open),
            "requests_without_replica": self.num_waiting,
            "requests_replayed_elsewhere": self.counts["replayed"],
            "requests_lost": self.counts["lost"],
        }

    async def _drain_all(self, timeout_s: float) -> Drained:
        """Refuse new requests at this gateway; the replicas continue, since other gateways may use them."""
        self._is_draining = True
        with trio.move_on_after(timeout_s):
            while self._open:
                await self._ended.wait()
        cancelled = list(self._open)
        for scope in cancelled:
            scope.cancel()
        while self._open:
            await self._ended.wait()
        return Drained(num_cancelled=len(cancelled))

    def check_integrity(self) -> None:
        """Assert that each accepted request is open or has had its final, and that replicas count open requests."""
        assert self.counts["accepted"] == self.counts["finals"] + len(self._open), self.counts
        if not self._open:
            assert all(replica.num_own == replica.own_tokens == 0 for replica in self._replicas.values())


@contextmanager
def _taking(replica: Replica, seen: RouteRequest) -> Iterator[Callable[[], None]]:
    """Count a request as the replica's; yield the function to call at its first token."""
    waiting = seen.prompt_tokens
    replica.num_own += 1
    replica.own_tokens += waiting
    replica.update()

    def begun() -> None:
        nonlocal waiting
        if waiting:
            replica.own_tokens -= waiting
            waiting = 0
            replica.update()

    try:
        yield begun
    finally:
        begun()
        replica.num_own -= 1
        replica.update()
