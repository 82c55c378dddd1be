"""Telemetry events: every one is documented with what it carries, and every documented one exists."""

import ast
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import genbatch.actors.batcher.journal
import genbatch.actors.runtime.telemetry
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Message

TinyModel = Callable[[str], Model]
Events = list[tuple[str, Mapping[str, float], Mapping[str, object]]]

ACTORS = Path(genbatch.actors.runtime.telemetry.__file__).parent.parent
NAME = re.compile(r"(actor|supervisor|request|step)\.[a-z_]+")


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """{event: (measurements, metadata)}, as the tables in the docstrings have them."""
    events: dict[str, tuple[set[str], set[str]]] = {}
    for module in (genbatch.actors.runtime.telemetry, genbatch.actors.batcher.journal):
        # A row's continuation is indented deeper than the event's name.
        rows = re.split(r"\n    (?=[a-z]+\.[a-z_]+ )", module.__doc__ or "")[1:]
        for row in rows:
            name, rest = row.split("\n\n")[0].split(maxsplit=1)
            measurements, _, others = re.sub(r"\n +", " ", rest).partition("|")
            metadata = re.match(r" ?(\w+(?:, \w+)*)", others)
            assert metadata is not None, row
            events[name] = (set(re.findall(r"\w+", measurements)), set(metadata[1].split(", ")))
    return events


def executed_in_the_source() -> set[str]:
    names: set[str] = set()
    for path in ACTORS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                names.update(text for text in texts if isinstance(text, str) and NAME.fullmatch(text))
    return names


def test_the_documented_events_are_those_that_are_executed() -> None:
    assert executed_in_the_source() == set(documented())


@asynccontextmanager
async def listened(model: Model, events: Events, **options: int) -> AsyncIterator[ActorRef]:
    telemetry = Telemetry()
    telemetry.attach(lambda *event: events.append(event))
    chosen = BatcherOptions(n_parallel=2, batch_timeout=0.0, max_batch_tokens=32)

    def open_context() -> Context:
        held = chosen.max_held_prompts
        return Context(model, TorchRunner(model), n_parallel=2, n_held=held, block_size=4, n_batch=32, **options)

    async with trio.open_nursery() as nursery:
        ref = await start(nursery, Batcher(open_context, chosen), name="batcher", telemetry=telemetry)
        yield ref
        await ref.stop()


def of_requests(events: Events) -> Events:
    return [event for event in events if event[0].startswith("request.")]


@pytest.mark.trio
async def test_a_request_s_life_is_told_in_order_and_with_the_documented_keys(tiny_model: TinyModel) -> None:
    events: Events = []
    async with listened(tiny_model("llama"), events, n_ctx=256) as ref:
        asked = GenerateRequest(token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True, tenant="acme")
        await ref.call(Generate(asked, client="c", request_id="c/7"), timeout=None)
        with pytest.raises(InvalidRequest):
            await ref.call(Generate(GenerateRequest(prompt="Hello", temperature=-1.0), client="c"), timeout=None)
    life = of_requests(events)
    assert [name.removeprefix("request.") for name, _, _ in life] == [
        "accepted", "started", "first_token", "finished", "refused",
    ]  # fmt: skip
    assert {metadata["request_id"] for _, _, metadata in life[:4]} == {"c/7"}
    assert life[4][2]["request_id"] == "c#1", "one that its gateway has not named gets a name"
    end = life[3]
    assert end[1]["generation_tokens"] == 4 and end[1]["prompt_tokens"] == 3
    assert (end[2]["reason"], end[2]["tenant"], end[2]["code"]) == ("length", "acme", "")
    documents = documented()
    for name, measurements, metadata in events:
        assert (set(measurements), set(metadata)) == documents[name], name


@pytest.mark.trio
async def test_a_preempted_request_is_told_of(tiny_model: TinyModel) -> None:
    events: Events = []
    async with listened(tiny_model("llama"), events, n_ctx=64) as ref, trio.open_nursery() as nursery:
        for first in (5, 50):
            asked = GenerateRequest(token_ids=list(range(first, first + 16)), max_tokens=40, ignore_eos=True)
            nursery.start_soon(lambda asked=asked: ref.call(Generate(asked), timeout=None))
    preempted = [event for event in events if event[0] == "request.preempted"]
    assert preempted
    assert all((set(event[1]), set(event[2])) == documented()["request.preempted"] for event in preempted)


@pytest.mark.trio
async def test_no_event_holds_text_of_a_prompt_or_an_answer(tiny_model: TinyModel) -> None:
    events: Events = []
    async with listened(tiny_model("llama"), events, n_ctx=256) as ref:
        asked = GenerateRequest(messages=[Message(role="user", content="a secret")], max_tokens=3)
        await ref.call(Generate(asked), timeout=None)
        with pytest.raises(InvalidRequest):
            await ref.call(Generate(GenerateRequest(prompt="a secret", stop=[""])), timeout=None)
    told = of_requests(events)
    assert len(told) == 5 and "secret" not in str(told)
    assert all(isinstance(value, str | bool) for _, _, metadata in told for value in metadata.values())


@pytest.mark.trio
async def test_a_request_that_the_batcher_s_end_cuts_off_is_finished_as_an_error(tiny_model: TinyModel) -> None:
    events: Events = []
    async with trio.open_nursery() as nursery, listened(tiny_model("llama"), events, n_ctx=256) as ref:
        begun = trio.Event()
        asked = GenerateRequest(token_ids=[5, 6, 7], max_tokens=200, ignore_eos=True)

        async def ask() -> None:
            with pytest.raises(Exception, match="stopped"):
                await ref.call(Generate(asked, lambda token: begun.set()), timeout=None)

        nursery.start_soon(ask)
        await begun.wait()
    [end] = [event for event in events if event[0] == "request.finished"]
    assert (end[2]["reason"], end[2]["code"]) == ("error", "unavailable")
