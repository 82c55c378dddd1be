"""ModelKeeper: carries out what LoadedModels plans, and lets requests wait for their model.

    async with keeper.using("a", 1, wait_s=60.0):     # loads the model if it must, and keeps it until the end
        await link.call(request)

The engines are another process's (on_demand.py): the keeper sends it SwitchEngine, and hears of each engine's start and
end. After a crash of the gateway the next keeper learns of the engines that run by their Join messages.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import ManagedModel, SwitchEngine
from genbatch.actors.engine.remote_batcher import EndWaiting
from genbatch.actors.gateways.dispatcher import Callee
from genbatch.actors.observing.observe import log_event
from genbatch.actors.runtime.errors import ActorDown, CallTimeout
from genbatch.actors.service.loaded_models import LoadedModels, OnDemandModel, Residence, Ticket
from genbatch.proto.errors import DeadlineExceeded
from genbatch.proto.service_messages import ModelState


class ModelKeeper:
    """See the module's docstring; `run` is a child for a supervisor.

    Args:
        managed: the models.
        budget: bytes that they may take together.
        options: the Batcher's of each model, by its name. As many sequences may wait for a model as its queue and
            slots hold.
        engines: the link of each model, by its name.
        switch: sends SwitchEngine to the process that starts engines.
    """

    def __init__(
        self,
        managed: Sequence[ManagedModel],
        budget: int,
        options: Mapping[str, BatcherOptions],
        engines: Mapping[str, Callee],
        switch: Callable[[SwitchEngine], None],
    ) -> None:
        self.adapters: dict[str, tuple[str, ...]] = {}
        self.default_wait_s: dict[str, float | None] = {}
        self._models = LoadedModels((), budget)
        self._places: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._engines: dict[str, Callee] = {}
        self._switch = switch
        self._changed = trio.Event()
        self._settled: dict[Ticket, trio.Event] = {}
        for model in managed:
            self.add(model, options[model.name], engines[model.name])

    def __contains__(self, name: str) -> bool:
        return name in self._models.models

    def add(self, model: ManagedModel, options: BatcherOptions, engine: Callee) -> None:
        """Serve one more model through this link."""
        max_waiting = options.queue_size(of_clients=True) + options.n_parallel
        added = OnDemandModel(model.name, model.num_bytes, model.keep_alive, max_waiting, model.is_there)
        self._models.add(added)
        self.adapters[model.name] = model.adapters
        self.default_wait_s[model.name] = options.default_deadline_s or None
        self._places[model.name], self._names[model.engine] = model.engine, model.name
        self._engines[model.name] = engine

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load and unload models until cancelled."""
        task_status.started()
        while True:
            self._changed = trio.Event()
            plan = self._models.plan(trio.current_time())
            for model in plan.unload:
                log_event("model_unloading", model=model.name)
                self._switch(SwitchEngine(self._places[model.name], is_wanted=False))
            for model in plan.load:
                log_event("model_loading", model=model.name)
                self._switch(SwitchEngine(self._places[model.name], is_wanted=True))
            for ticket in plan.settled:
                if (event := self._settled.pop(ticket, None)) is not None:
                    event.set()
            with trio.CancelScope(deadline=plan.wake_at):
                await self._changed.wait()

    @asynccontextmanager
    async def using(self, name: str, n: int, wait_s: float | None) -> AsyncIterator[None]:
        """Wait until the model is loaded, and keep it loaded for as long as the body runs.

        Args:
            n: the sequences of the request.
            wait_s: seconds to wait at most; None for no bound.

        Raises:
            DeadlineExceeded: the model was not loaded in time.
            QueueFull, Unavailable: see LoadedModels.enter; or the load has failed.
        """
        ticket = self._models.enter(name, n, trio.current_time())
        try:
            if not ticket.is_admitted:
                await self._wait(ticket, wait_s)
            yield
        finally:
            self._models.leave(ticket, trio.current_time())
            self._changed.set()

    async def _wait(self, ticket: Ticket, wait_s: float | None) -> None:
        settled = self._settled[ticket] = trio.Event()
        self._changed.set()
        try:
            with trio.move_on_after(float("inf") if wait_s is None else wait_s):
                await settled.wait()
        finally:
            self._settled.pop(ticket, None)
        if ticket.error is not None:
            raise ticket.error
        if not ticket.is_admitted:
            reason = (
                f"the model {ticket.model.name} was not loaded within {wait_s:g} s, and the request waits no longer"
            )
            raise DeadlineExceeded(reason)

    def keep(self, name: str, keep_alive: float) -> None:
        """Set how long the model stays loaded without requests, until it is unloaded."""
        self._models.models[name].keep_alive = keep_alive
        self._changed.set()

    def show(self, name: str, is_there: bool) -> None:
        """Show the model to clients, or hide it and unload it once it has no requests."""
        self._models.models[name].is_there = is_there
        self._changed.set()

    def drain(self) -> None:
        """Load no more models, and refuse the requests that wait for one."""
        self._models.drain()
        self._changed.set()

    # Reports of the process that starts engines

    def engine_is_ready(self, place: int, num_bytes: int) -> None:
        """Note that an engine is connected."""
        if (name := self._names.get(place)) is not None:
            now = trio.current_time()
            self._models.engine_is_ready(name, num_bytes, now)
            model = self._models.models[name]
            log_event("model_loaded", model=name, seconds=round(model.turn_s, 3), bytes=model.num_bytes)
            self._changed.set()

    async def engine_has_ended(self, place: int, reason: str) -> None:
        """Note that an engine has ended; `reason` is "" for one that was unloaded."""
        name = self._names[place]
        error = self._models.engine_has_ended(name, reason, trio.current_time())
        log_event("model_ended" if reason else "model_unloaded", model=name, **({"reason": reason} if reason else {}))
        if error is not None:
            with suppress(ActorDown, CallTimeout):  # requests that had lost their engine before
                await self._engines[name].call(EndWaiting(error), control=True)
        self._changed.set()

    # Reports for clients

    def state(self, name: str) -> ModelState:
        """Return the state that clients see."""
        return self._models.models[name].state(trio.current_time())

    def is_there(self, name: str) -> bool:
        """Return whether clients see the model."""
        return self._models.models[name].is_there

    def is_loaded(self, name: str) -> bool:
        """Return whether the model has an engine."""
        return self._models.models[name].phase is Residence.LOADED

    @property
    def is_draining(self) -> bool:
        """Whether no more models are loaded."""
        return self._models.is_draining

    def num_waiting(self) -> int:
        """Return how many sequences wait for a load."""
        return sum([ticket.n for model in self._models.models.values() for ticket in model.waiting])

    def stats(self, name: str) -> dict[str, Any]:
        """Return the model's counters."""
        model, now = self._models.models[name], trio.current_time()
        left_s = model.expires_at() - now
        return {
            "state": model.state(now),
            "requests_waiting_for_load": len(model.waiting),
            "loads": model.num_loads,
            "failed_loads": model.num_failed_loads,
            "engine_restarts": model.num_deaths,
            "model_bytes": model.num_bytes,
            "unload_in_s": None if model.phase is not Residence.LOADED or model.keep_alive < 0 else max(0.0, left_s),
        }
