"""ServedModels: several models behind one address, each with an engine of its own.

    models = ServedModels({"smollm2": link, "minilm": other})
    await models.call(Generate(request))       # goes to the engine of request.model; to the first engine without a name

It takes the place of a Batcher. Only this file chooses the engine of a name. The engine itself resolves names such as
an adapter's.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.gateways.dispatcher import Callee
from genbatch.actors.runtime.errors import ActorDown, CallTimeout
from genbatch.actors.service.model_keeper import ModelKeeper
from genbatch.proto.errors import InvalidRequest, ModelNotFound, Unavailable
from genbatch.proto.methods import Lane, lane_of
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    HealthStatus,
    LoadAdapterRequest,
    LoadModelRequest,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)

# From best to worst; a service has the status of its worst engine.
_STATUSES: tuple[HealthStatus, ...] = ("ready", "draining", "stuck", "down")
_DOWN = Health(status="down", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)
# The key of the stats of each model, in the stats of several models.
BY_MODEL = "by_model"


class ServedModels:
    """See the module's docstring.

    Args:
        engines: the engine of each model, by the model's name; the first engine serves requests without a name.
        keeper: loads and unloads the models that are served on demand.
    """

    def __init__(self, engines: Mapping[str, Callee], keeper: ModelKeeper | None = None) -> None:
        assert engines, "nothing is served"
        self._engines = dict(engines)
        self._keeper = keeper

    def add(self, name: str, engine: Callee) -> None:
        """Serve one more model."""
        self._engines[name] = engine

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Answer a call as a Batcher's ref does.

        Raises:
            ModelNotFound: a request names a model that is not served.
        """
        match request:
            case Generate() | Embed():
                return await self._work(request)
            case msgspec.Struct() if lane_of(request) is Lane.TEXT:
                model = await self._named(getattr(request, "model", None))
                async with self._using(model):
                    return await self._engines[model].call(request, timeout=timeout, control=control)
            case LoadModelRequest():
                return await self._load(request)
            case ModelsRequest():
                return Models(models=await self._cards())
            case HealthRequest():
                return await self._health()
            case StatsRequest():
                return await self._stats()
            case UnloadAdapterRequest():
                model = await self._named(request.name)
                return await self._engines[model].call(request, timeout=timeout, control=control)
            case LoadAdapterRequest():
                raise InvalidRequest(
                    None, "a service of several models loads no adapter while it runs; serve its model alone"
                )
            case DrainRequest():
                return await self._drain(request)
            case _:
                raise TypeError(f"several models have no call {type(request).__name__}")

    async def _work(self, message: Generate | Embed) -> Any:
        request = message.request
        model = await self._named(request.model)
        began = trio.current_time()
        async with self._using(model, request.n, request.deadline_s, has_default=bool(message.client)):
            waited_s = trio.current_time() - began
            if waited_s and request.deadline_s is not None:
                left_s = max(0.001, request.deadline_s - waited_s)
                request = msgspec.structs.replace(request, deadline_s=left_s)
                message = replace(message, request=request)  # type: ignore[arg-type]  # of the kind that it was
            return await self._engines[model].call(message, timeout=None)

    @asynccontextmanager
    async def _using(
        self, model: str, n: int = 1, wait_s: float | None = None, *, has_default: bool = True
    ) -> AsyncIterator[None]:
        """Keep the model loaded for as long as the body runs."""
        if self._keeper is None or model not in self._keeper:
            yield
            return
        if wait_s is None and has_default:
            wait_s = self._keeper.default_wait_s[model]
        async with self._keeper.using(model, n, wait_s):
            yield

    async def _load(self, request: LoadModelRequest) -> Models:
        model = await self._named(request.model)
        if self._keeper is not None and model in self._keeper:
            if request.keep_alive is not None:
                self._keeper.keep(model, request.keep_alive)
            if request.keep_alive != 0:
                async with self._using(model):
                    pass
        return Models(models=await self._cards())

    async def _named(self, name: str | None) -> str:
        """Return the model of a name: a model's name, or another name that a model's engine lists."""
        served = self._served()
        if name is None and served:
            return served[0]
        if name in served:
            return name
        listed: list[str] = []
        for model in served:
            try:
                names = [card.id for card in await self._cards_of(model)]
            except (Unavailable, ActorDown, CallTimeout):  # it has not started yet, or its link restarts
                names = [model]
            if name in names:
                return model
            listed += names
        there_is = ", ".join(listed) or "no model now"
        raise ModelNotFound(f"the model {(name or '')[:128]!r} is not served here; there is {there_is}", field="model")

    def _served(self) -> list[str]:
        """Return the names of the models that clients see."""
        keeper = self._keeper
        return [name for name in self._engines if keeper is None or name not in keeper or keeper.is_there(name)]

    async def _cards(self) -> tuple[ModelCard, ...]:
        """Return all cards. If one is missing this raises, because clients would take a shorter list for the whole."""
        return tuple([card for model in self._served() for card in await self._cards_of(model)])

    async def _cards_of(self, model: str) -> tuple[ModelCard, ...]:
        """Return the cards of a model and its adapters, as far as they are known."""
        asked = self._engines[model].call(ModelsRequest(), control=True)
        if self._keeper is None or model not in self._keeper:
            answer: Models = await asked
            return answer.models
        try:
            answer = await asked
            cards = answer.models
        except (Unavailable, ActorDown, CallTimeout):  # it was not loaded yet
            adapters = [unknown_card(name, parent=model) for name in self._keeper.adapters[model]]
            cards = (unknown_card(model), *adapters)
        state = self._keeper.state(model)
        return tuple([msgspec.structs.replace(card, state=state) for card in cards])

    def _is_loaded(self, model: str) -> bool:
        return self._keeper is None or model not in self._keeper or self._keeper.is_loaded(model)

    async def _health(self) -> Health:
        loaded = [engine for model, engine in self._engines.items() if self._is_loaded(model)]
        healths = [await self._health_of(engine) for engine in loaded]
        if self._keeper is not None:  # requests load a model that is not there
            waiting = self._keeper.num_waiting()
            status: HealthStatus = "draining" if self._keeper.is_draining else "ready"
            healths.append(Health(status=status, steps=0, requests_running=0, requests_waiting=waiting, stalled_s=0.0))
        return Health(
            status=max((health.status for health in healths), key=_STATUSES.index),
            steps=sum(health.steps for health in healths),
            requests_running=sum(health.requests_running for health in healths),
            requests_waiting=sum(health.requests_waiting for health in healths),
            stalled_s=max(health.stalled_s for health in healths),
        )

    async def _health_of(self, engine: Callee) -> Health:
        try:
            health: Health = await engine.call(HealthRequest(), control=True)
        except (ActorDown, CallTimeout):
            return _DOWN
        return health

    async def _stats(self) -> dict[str, Any]:
        """Return the stats of each model, and the sums of their counts."""
        reports: dict[str, dict[str, Any]] = {}

        async def ask(model: str, engine: Callee) -> None:
            reports[model] = {"engine": "down", "model": model}
            for _ in range(2):  # the second call knows if the engine died during the first
                with suppress(Unavailable, ActorDown, CallTimeout):
                    reports[model] = await engine.call(StatsRequest(), control=True)
                    break
            if self._keeper is not None and model in self._keeper:
                own = self._keeper.stats(model)
                reports[model] |= own
                if own["state"] != "loaded":
                    reports[model] |= {"engine": own["state"], "model": model}

        async with trio.open_nursery() as nursery:
            for model, engine in self._engines.items():
                nursery.start_soon(ask, model, engine)
        ordered = {model: reports[model] for model in self._engines}
        return {**_counts(ordered.values()), BY_MODEL: ordered}

    async def _drain(self, request: DrainRequest) -> Drained:
        cancelled: list[int] = []
        if self._keeper is not None:
            self._keeper.drain()

        async def drain(engine: Callee) -> None:
            drained: Drained = await engine.call(request, timeout=None, control=True)
            cancelled.append(drained.num_cancelled)

        async with trio.open_nursery() as nursery:
            for engine in self._engines.values():
                nursery.start_soon(drain, engine)
        return Drained(num_cancelled=sum(cancelled))


def unknown_card(name: str, parent: str | None = None) -> ModelCard:
    """Return the card of a model that was not loaded yet, or of an adapter of it."""
    return ModelCard(
        id=name,
        n_ctx=0,
        n_parallel=0,
        vocab_size=0,
        dtype="",
        quantize="",
        runner="",
        device="",
        parent=parent,
        state="unloaded",
    )


def _counts(reports: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sums of the counts over all models; times and shares stay per model."""
    total: Counter[str] = Counter()
    for stats in reports:
        total.update({name: value for name, value in stats.items() if type(value) is int and name != "kv_block_size"})
    return dict(total)
