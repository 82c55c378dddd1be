"""LoadedModels: decides which of a service's models to load next, and which ones to unload for it.

    models = LoadedModels([OnDemandModel("a", ...), OnDemandModel("b", ...)], budget=8 * 2**30)
    ticket = models.enter("a", 1, now)          # a request; admitted now, or by a later plan
    plan = models.plan(now)                     # what to load and unload now, and which requests go to their engines
    models.engine_is_ready("a", num_bytes, now)
    models.leave(ticket, now)                   # the request has ended, or its caller has left

This file uses no clock, process or event loop. Its user reports events, carries out the plan, and plans again at
`plan.wake_at`.

    UNLOADED --a request, and room--> LOADING --ready--> LOADED --idle, or for another model--> UNLOADING
       ^  ^                              |                  |                                       |
       |  +------- failed, later --------+------ died ------+                                       |
       +--------------------------------------- the process has ended ------------------------------+

One model is loaded at a time, in the order of the first waiting request. To make room for it, idle models go first,
the least recently used one before the others. No model goes with open requests. So a busy model takes no new requests
once another model waits for its room, and it goes when its open requests have ended. A model may stay loaded for at
least as long as its load took (its turn): loading takes at most half of the time, however many models are asked for.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from genbatch.actors.batcher.messages import DRAINING, RETRY_AFTER_DRAIN_MS
from genbatch.proto.errors import GenbatchError, QueueFull, Unavailable
from genbatch.proto.service_messages import ModelState

# Seconds until a model is loaded again after its load has failed: twice as long after each failure.
BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0
# An engine that lived for longer does not count as one that fails again and again.
LIVED_S = 60.0
# The retry hint of a full queue, before the duration of a load is known.
RETRY_AFTER_LOAD_MS = 2000


class Residence(enum.Enum):
    """Where a model is."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for a model.

    Args:
        n: its sequences.
        arrived_at: when it came.
        error: the reason why it is not admitted.
    """

    model: "OnDemandModel"
    n: int
    arrived_at: float
    is_admitted: bool = False
    error: GenbatchError | None = None


@dataclass(slots=True, eq=False)
class OnDemandModel:
    """A model that is loaded by its first request.

    Args:
        name: the name that requests give.
        num_bytes: the memory that it takes: the size of its files, or the measured size once it was loaded.
        default_keep_alive: seconds without requests after which it is unloaded; negative for never.
        max_waiting: sequences that may wait for it.
        is_there: whether clients see it; False if its files have gone. It is then unloaded once it has no requests.
    """

    name: str
    num_bytes: int
    default_keep_alive: float
    max_waiting: int
    is_there: bool = True
    keep_alive: float = field(init=False)  # in force until it is unloaded
    phase: Residence = Residence.UNLOADED
    is_closing: bool = False  # takes no new requests, because another model waits for its memory
    num_open: int = 0  # admitted requests
    waiting: list[Ticket] = field(default_factory=list)
    began_at: float = 0.0  # of its last load
    loaded_at: float = 0.0
    used_at: float = 0.0
    turn_s: float = 0.0  # the duration of its last load
    failures: int = 0  # failed loads and early deaths, one after another
    retry_at: float = -math.inf
    failed: str = ""  # the reason of the last failed load
    num_loads: int = 0
    num_failed_loads: int = 0
    num_deaths: int = 0

    def __post_init__(self) -> None:
        self.keep_alive = self.default_keep_alive

    @property
    def is_wanted(self) -> bool:
        """Whether a request needs it loaded: one that waits, or one that has lost its engine."""
        return bool(self.waiting or self.num_open)

    @property
    def takes_memory(self) -> bool:
        """Whether its memory is in use."""
        return self.phase is not Residence.UNLOADED

    def state(self, now: float) -> ModelState:
        """Return the state that clients see."""
        if self.phase is Residence.UNLOADED:
            return "failed" if now < self.retry_at and self.failed else "unloaded"
        return "unloaded" if self.phase is Residence.UNLOADING else self.phase.value

    def expires_at(self) -> float:
        """Return when it is unloaded unless a request comes."""
        if not self.is_there:
            return -math.inf
        return math.inf if self.keep_alive < 0 else max(self.used_at, self.loaded_at) + self.keep_alive


@dataclass(slots=True)
class Plan:
    """The next actions.

    Args:
        load, unload: the models to load and to unload. A model that is loading may be unloaded.
        settled: the requests that need not wait any longer: each is admitted, or has an error.
        wake_at: when to plan again, if nothing else happens.
    """

    load: list[OnDemandModel] = field(default_factory=list)
    unload: list[OnDemandModel] = field(default_factory=list)
    settled: list[Ticket] = field(default_factory=list)
    wake_at: float = math.inf


class LoadedModels:
    """See the module's docstring.

    Args:
        models: all of them.
        budget: bytes that the loaded models may take together. A model larger than that is served alone, if its files
            are no larger.
    """

    def __init__(self, models: Iterable[OnDemandModel], budget: int) -> None:
        self.models = {model.name: model for model in models}
        self.is_draining = False
        self._budget = budget
        self._refused: list[Ticket] = []

    def add(self, model: OnDemandModel) -> None:
        """Serve one more model."""
        assert model.name not in self.models
        self.models[model.name] = model

    # Requests

    def enter(self, name: str, n: int, now: float) -> Ticket:
        """Return the ticket of a new request of `n` sequences.

        Raises:
            QueueFull: too many sequences wait for this model.
            Unavailable: the model cannot be loaded, or not yet again, or the service is draining.
        """
        model = self.models[name]
        # guard: no loads while draining
        if self.is_draining:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)
        ticket = Ticket(model, n, now)
        if model.phase is Residence.LOADED and not model.is_closing:
            self._admit(ticket)
            return ticket
        # guard: models that never fit
        if not model.num_loads and model.num_bytes > self._budget:
            size, room = model.num_bytes / 2**30, self._budget / 2**30
            raise Unavailable(f"the model {name} takes {size:.3g} GiB, and models may take {room:.3g} (model_memory)")
        # guard: back-off of failed loads
        if model.phase is Residence.UNLOADED and now < model.retry_at:
            raise _not_loaded(model, now)
        num_waiting = sum([waiting.n for waiting in model.waiting])
        # guard: requests that wait for a load
        if model.waiting and num_waiting + n > model.max_waiting:
            retry_ms = round(1000 * model.turn_s) or RETRY_AFTER_LOAD_MS
            raise QueueFull(f"{num_waiting} requests wait for the model {name} to load", retry_after_ms=retry_ms)
        model.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """Note that a request has ended, or that its caller has left."""
        model = ticket.model
        if ticket.is_admitted:
            model.num_open -= 1
            model.used_at = now
        elif ticket in model.waiting:
            model.waiting.remove(ticket)

    def drain(self) -> None:
        """Refuse new requests and the waiting ones; the next plan has them."""
        self.is_draining = True
        for model in self.models.values():
            self._refuse(model, Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS))

    # Engines

    def engine_is_ready(self, name: str, num_bytes: int, now: float) -> None:
        """Note that a model is loaded and takes so many bytes; also one that an earlier gateway has loaded."""
        model = self.models[name]
        if model.phase in (Residence.LOADED, Residence.UNLOADING):
            return
        model.turn_s = now - model.began_at if model.phase is Residence.LOADING else 0.0
        model.phase = Residence.LOADED
        model.loaded_at = model.used_at = now
        model.num_bytes = max(model.num_bytes, num_bytes)
        model.num_loads += 1
        model.failed = ""

    def engine_has_ended(self, name: str, reason: str, now: float) -> GenbatchError | None:
        """Note the end of an engine; `reason` is "" for an engine that was unloaded.

        Returns the error of its requests if its load failed. Otherwise they continue after the next load.
        """
        model = self.models[name]
        before, model.phase = model.phase, Residence.UNLOADED
        model.is_closing = False
        if before is Residence.UNLOADED:  # it was loaded for an earlier gateway
            return None
        if before is Residence.UNLOADING or not reason:
            if before is Residence.LOADING:  # an earlier engine has ended; the new one is being started
                model.phase = Residence.LOADING
            model.keep_alive = model.default_keep_alive
            return None
        if before is Residence.LOADED:
            model.num_deaths += 1
            model.failures = 1 if now - model.loaded_at >= LIVED_S else model.failures + 1
            # The first death costs no pause.
            model.retry_at = now + min(MAX_BACK_OFF_S, BACK_OFF_S * (2 ** (model.failures - 1) - 1))
            return None
        model.num_failed_loads += 1
        model.failures += 1
        model.retry_at = now + min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** (model.failures - 1))
        model.failed = reason
        error = _not_loaded(model, now)
        self._refuse(model, error)
        return error

    # The plan

    def plan(self, now: float) -> Plan:
        """Return the actions that are due now, and book them as begun."""
        plan = Plan(settled=self._refused)
        self._refused = []
        if self.is_draining:
            return plan
        following = self._following(now, plan)
        self._close(following, now, plan)
        for model in self.models.values():
            if model.phase is Residence.LOADED:
                self._settle(model, now, plan)
            # guard: a load without a waiting caller
            elif model.phase is Residence.LOADING and following is not None and not model.is_wanted:
                model.phase = Residence.UNLOADING
                plan.unload.append(model)
        if following is not None and self._has_room(following):
            following.phase, following.began_at = Residence.LOADING, now
            plan.load.append(following)
        return plan

    def _following(self, now: float, plan: Plan) -> OnDemandModel | None:
        """Return the model to load next: one that has lost its engine, or the one with the first waiting request."""
        candidates: list[tuple[float, OnDemandModel]] = []
        for model in self.models.values():
            if model.phase is not Residence.UNLOADED or not model.is_wanted:
                continue
            if now < model.retry_at:
                plan.wake_at = min(plan.wake_at, model.retry_at)
            else:
                candidates.append((-math.inf if model.num_open else model.waiting[0].arrived_at, model))
        return min(candidates, key=lambda pair: pair[0])[1] if candidates else None

    def _close(self, following: OnDemandModel | None, now: float, plan: Plan) -> None:
        """Choose the models to unload: to make room for `following`, or because the loaded ones exceed the budget."""
        loaded = [model for model in self.models.values() if model.phase is Residence.LOADED]
        staying = [model for model in self.models.values() if model.phase in (Residence.LOADED, Residence.LOADING)]
        excess = sum([model.num_bytes for model in staying]) - self._budget
        if following is not None:
            excess += following.num_bytes
        else:
            loaded = sorted(loaded, key=lambda model: model.loaded_at)[:-1]  # the last one stays, of any size
        for model in self.models.values():
            model.is_closing = False
        # Idle models go first, and of busy ones the one that has been loaded for longest.
        order = sorted(
            loaded, key=lambda model: (bool(model.num_open), model.loaded_at if model.num_open else model.used_at)
        )
        going: list[OnDemandModel] = []
        for model in order:
            if excess <= 0:
                break
            turn_ends = model.loaded_at + model.turn_s
            # guard: a model's turn
            if now < turn_ends:
                plan.wake_at = min(plan.wake_at, turn_ends)
                continue
            going.append(model)
            excess -= model.num_bytes
        for model in going:
            model.is_closing = True

    def _settle(self, model: OnDemandModel, now: float, plan: Plan) -> None:
        """Admit a loaded model's requests, or unload it."""
        if not model.is_closing:
            for ticket in model.waiting:
                self._admit(ticket)
            plan.settled += model.waiting
            model.waiting = []
        # guard: models with open requests stay
        if model.num_open:
            return
        expires_at = model.expires_at()
        if model.is_closing or expires_at <= now:
            model.phase, model.is_closing = Residence.UNLOADING, False
            model.failures = 0
            plan.unload.append(model)
        else:
            plan.wake_at = min(plan.wake_at, expires_at)

    def _has_room(self, model: OnDemandModel) -> bool:
        others = [other for other in self.models.values() if other.takes_memory]
        # guard: one load at a time
        if any(other.phase is Residence.LOADING for other in others):
            return False
        return not others or sum([other.num_bytes for other in others]) + model.num_bytes <= self._budget

    def _admit(self, ticket: Ticket) -> None:
        ticket.is_admitted = True
        ticket.model.num_open += 1

    def _refuse(self, model: OnDemandModel, error: GenbatchError) -> None:
        for ticket in model.waiting:
            ticket.error = error
        self._refused += model.waiting
        model.waiting = []


def _not_loaded(model: OnDemandModel, now: float) -> Unavailable:
    what = "could not be loaded" if model.failed else "has lost its engine"
    retry_ms = max(1, math.ceil(1000 * (model.retry_at - now)))
    return Unavailable(f"the model {model.name} {what}; the service's log has the reason", retry_after_ms=retry_ms)
