"""Several models at one address: who answers for which name, and what of all of them together is said."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.observing.metrics import render
from genbatch.actors.runtime.errors import CallTimeout
from genbatch.actors.service.served_models import ServedModels
from genbatch.clients.cli.command import UsageError
from genbatch.clients.cli.serve import default_name, engines_of, named_models
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.errors import ModelNotFound, Unavailable
from genbatch.proto.messages import DetokenizeRequest, EmbedRequest, GenerateRequest, TokenizeRequest
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    HealthStatus,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
)


def card(name: str) -> ModelCard:
    return ModelCard(
        id=name, n_ctx=64, n_parallel=2, vocab_size=9, dtype="float32", quantize="none", runner="x", device="cpu"
    )


class Scripted:
    """An engine that says who it is."""

    def __init__(self, *names: str, status: HealthStatus = "ready") -> None:
        self.names = names
        self.status = status
        self.asked: list[object] = []
        self.is_gone = False

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        if self.is_gone:
            raise CallTimeout("link", 5.0) if isinstance(request, HealthRequest) else Unavailable("gone")
        match request:
            case ModelsRequest():
                return Models(models=tuple(map(card, self.names)))
            case HealthRequest():
                return Health(status=self.status, steps=3, requests_running=1, requests_waiting=2, stalled_s=0.5)
            case StatsRequest():
                return {"model": self.names[0], "steps": 3, "ttft_p50": 0.1, "kv_block_size": 16, "engine": "up"}
            case DrainRequest():
                return Drained(num_cancelled=2)
        return self.names[0]


def several() -> tuple[ServedModels, Scripted, Scripted]:
    one, two = Scripted("one"), Scripted("two", "adapter of two")
    return ServedModels({"one": one, "two": two}), one, two


@pytest.mark.trio
@pytest.mark.parametrize(
    "make",
    [
        lambda model: Generate(GenerateRequest(prompt="a", model=model)),
        lambda model: Embed(EmbedRequest(input="a", model=model)),
        lambda model: TokenizeRequest(prompt="a", model=model),
        lambda model: DetokenizeRequest(token_ids=[1], model=model),
    ],
)
async def test_a_request_goes_to_the_model_that_it_names(make: Callable[[str | None], Any]) -> None:
    models, _, two = several()
    assert [await models.call(make(name)) for name in (None, "one", "two", "adapter of two")] == [
        "one",
        "one",
        "two",
        "two",
    ]
    with pytest.raises(
        ModelNotFound, match=r"'three' is not served here; there is one, two, adapter of two"
    ) as refused:
        await models.call(make("three"))
    assert refused.value.field == "model"
    two.is_gone = True  # its name is known all the same
    with pytest.raises(Unavailable):
        await models.call(make("two"))
    assert await models.call(make("one")) == "one"


@pytest.mark.trio
async def test_what_is_said_of_all_is_the_sum_or_the_worst() -> None:
    models, _, two = several()
    assert [found.id for found in (await models.call(ModelsRequest())).models] == ["one", "two", "adapter of two"]
    health = await models.call(HealthRequest())
    assert (health.status, health.steps, health.requests_waiting) == ("ready", 6, 4)
    two.status = "stuck"
    assert (await models.call(HealthRequest())).status == "stuck"
    stats = await models.call(StatsRequest())
    assert stats["steps"] == 6 and "ttft_p50" not in stats and "kv_block_size" not in stats
    assert [own["model"] for own in stats["by_model"].values()] == ["one", "two"]
    assert (await models.call(DrainRequest(timeout_s=1.0))).num_cancelled == 4
    two.is_gone = True
    assert (await models.call(HealthRequest())).status == "down"
    assert (await models.call(StatsRequest()))["by_model"]["two"] == {"engine": "down", "model": "two"}
    with pytest.raises(Unavailable):
        await models.call(ModelsRequest())
    with pytest.raises(ModelNotFound, match="there is one, two"):
        await models.call(Generate(GenerateRequest(prompt="a", model="adapter of two")))
    with pytest.raises(TypeError):
        await models.call("something else")


@pytest.mark.trio
async def test_each_models_metrics_have_its_label() -> None:
    counted = {"engine": "down", "engine_restarts": 1, "requests_replayed": 2, "requests_lost": 3}
    text = render({"by_model": {name: {**counted, "model": name} for name in ("one", "two")}})[0].decode()
    assert 'genbatch:engine_restarts_total{model_name="one"} 1.0' in text
    assert 'genbatch:engine_restarts_total{model_name="two"} 1.0' in text
    assert text.count("# TYPE genbatch:engine_restarts_total counter") == 1


# The command line


def test_models_are_named_by_what_is_said_or_by_themselves(tmp_path: Any) -> None:
    strange = tmp_path / "a=b"
    strange.mkdir()
    given = ["smollm2", "mini=./all-MiniLM", str(strange), "x/y", "q=z.gguf"]
    assert named_models(given) == [
        ("", "smollm2"),
        ("mini", "./all-MiniLM"),
        ("", str(strange)),
        ("", "x/y"),
        ("q", "z.gguf"),
    ]
    assert [default_name(model) for model in ("smollm2", str(strange), "x/y", "some/z.gguf")] == [
        "smollm2",
        "a=b",
        "x/y",
        "z",
    ]


@pytest.mark.parametrize("argument", ["=x", "name="])
def test_half_a_name_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match="NAME=MODEL"):
        named_models([argument])


def test_several_models_share_the_memory() -> None:
    engine = EngineOptions(model_path="configured", max_memory_percent=0.9, n_ctx=77)
    assert engines_of(engine, []) == [engine]
    [named] = engines_of(engine, [("name", "configured")])
    assert (named.served_model_name, named.max_memory_percent) == ("name", 0.9)
    three = engines_of(engine, [("", "a"), ("b", "some/path"), ("", "c")])
    assert [(one.served_model_name, one.model_path) for one in three] == [("a", "a"), ("b", "some/path"), ("c", "c")]
    assert [one.max_memory_percent for one in three] == pytest.approx([0.3] * 3)
    assert {one.n_ctx for one in three} == {77}
    with pytest.raises(UsageError, match="two models have the name a"):
        engines_of(engine, [("", "a"), ("a", "b")])
