"""ServedModels: several models behind one address, each with an engine of its own.

    models = ServedModels({"smollm2": link, "minilm": other})
    await models.call(Generate(request))       # goes to the engine of request.model; to the first engine without a name

It takes the place of a Batcher. Only this file chooses the engine of a name. The engine itself resolves names such as
an adapter's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.gateways.dispatcher import Callee
from genbatch.actors.runtime.errors import ActorDown, CallTimeout
from genbatch.proto.errors import InvalidRequest, ModelNotFound, Unavailable
from genbatch.proto.messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    HealthStatus,
    LoadAdapterRequest,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)
from genbatch.proto.methods import Lane, lane_of

# From best to worst; a service has the status of its worst engine.
_STATUSES: tuple[HealthStatus, ...] = ("ready", "draining", "stuck", "down")
_DOWN = Health(status="down", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)
BY_MODEL = "by_model"
"""The key of the stats of each model, in the stats of several models."""


class ServedModels:
    """See the module's docstring.

    Args:
        engines: the engine of each model, by the model's name; the first engine serves requests without a name.
    """

    def __init__(self, engines: Mapping[str, Callee]) -> None:
        assert engines, "nothing is served"
        self._engines = dict(engines)

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Answer a call as a Batcher's ref does.

        Raises:
            ModelNotFound: a request names a model that is not served.
        """
        match request:
            case Generate() | Embed():
                engine = await self._named(request.request.model)
                return await engine.call(request, timeout=timeout, control=control)
            case msgspec.Struct() if lane_of(request) is Lane.TEXT:
                engine = await self._named(getattr(request, "model", None))
                return await engine.call(request, timeout=timeout, control=control)
            case ModelsRequest():
                return Models(models=await self._cards())
            case HealthRequest():
                return await self._health()
            case StatsRequest():
                return await self._stats()
            case UnloadAdapterRequest():
                engine = await self._named(request.name)
                return await engine.call(request, timeout=timeout, control=control)
            case LoadAdapterRequest():
                raise InvalidRequest(
                    None, "which of several models it adapts cannot be said; load it at the start, or alone"
                )
            case DrainRequest():
                return await self._drain(request)
            case _:
                raise TypeError(f"several models have no call {type(request).__name__}")

    async def _named(self, name: str | None) -> Callee:
        """Return the engine for a name: a model's name, or another name that a model's engine lists."""
        if name is None:
            return next(iter(self._engines.values()))
        if name in self._engines:
            return self._engines[name]
        listed: list[str] = []
        for model, engine in self._engines.items():
            try:
                names = [card.id for card in await _cards_of(engine)]
            except (Unavailable, ActorDown, CallTimeout):  # it has not started yet, or its link restarts
                names = [model]
            if name in names:
                return engine
            listed += names
        raise ModelNotFound(f"the model {name[:128]!r} is not served here; there is {', '.join(listed)}", field="model")

    async def _cards(self) -> tuple[ModelCard, ...]:
        """Return all cards, or raise: clients would take an incomplete list for the whole."""
        return tuple([card for engine in self._engines.values() for card in await _cards_of(engine)])

    async def _health(self) -> Health:
        found = [await self._health_of(engine) for engine in self._engines.values()]
        return Health(
            status=max((health.status for health in found), key=_STATUSES.index),
            steps=sum(health.steps for health in found),
            requests_running=sum(health.requests_running for health in found),
            requests_waiting=sum(health.requests_waiting for health in found),
            stalled_s=max(health.stalled_s for health in found),
        )

    async def _health_of(self, engine: Callee) -> Health:
        try:
            health: Health = await engine.call(HealthRequest(), control=True)
        except (ActorDown, CallTimeout):
            return _DOWN
        return health

    async def _stats(self) -> dict[str, Any]:
        """Return the stats of each model, and the sums of their counts."""
        found: dict[str, dict[str, Any]] = {}

        async def ask(model: str, engine: Callee) -> None:
            found[model] = {"engine": "down", "model": model}
            for _ in range(2):  # the second call knows if the engine died during the first
                with suppress(Unavailable, ActorDown, CallTimeout):
                    found[model] = await engine.call(StatsRequest(), control=True)
                    return

        async with trio.open_nursery() as nursery:
            for model, engine in self._engines.items():
                nursery.start_soon(ask, model, engine)
        ordered = {model: found[model] for model in self._engines}
        return {**_counts(ordered.values()), BY_MODEL: ordered}

    async def _drain(self, request: DrainRequest) -> Drained:
        cancelled: list[int] = []

        async def drain(engine: Callee) -> None:
            drained: Drained = await engine.call(request, timeout=None, control=True)
            cancelled.append(drained.num_cancelled)

        async with trio.open_nursery() as nursery:
            for engine in self._engines.values():
                nursery.start_soon(drain, engine)
        return Drained(num_cancelled=sum(cancelled))


async def _cards_of(engine: Callee) -> tuple[ModelCard, ...]:
    answer: Models = await engine.call(ModelsRequest(), control=True)
    return answer.models


def _counts(found: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sums of the counts over all models; times and shares stay per model."""
    total: Counter[str] = Counter()
    for stats in found:
        total.update({name: value for name, value in stats.items() if type(value) is int and name != "kv_block_size"})
    return dict(total)
