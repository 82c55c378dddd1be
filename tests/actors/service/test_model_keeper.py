"""Models on demand over scripted engines and a mocked clock: waits, deadlines, failures, and the reports to clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import EngineStopped, ManagedModel, SwitchEngine, encode_options
from genbatch.actors.engine.remote_batcher import EndWaiting
from genbatch.actors.gateways.http import generating
from genbatch.actors.observing.metrics import render
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.service.model_keeper import ModelKeeper
from genbatch.actors.service.on_demand import WATCH_S, EngineOnDemand, ModelOnDemand, on_demand_in, watch_models
from genbatch.actors.service.served_models import ServedModels
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import DeadlineExceeded, GenbatchError, QueueFull, Unavailable
from genbatch.proto.messages import GenerateRequest, TokenizeRequest
from genbatch.proto.service_messages import (
    DrainRequest,
    Health,
    HealthRequest,
    LoadModelRequest,
    ModelCard,
    Models,
    ModelsRequest,
    StatsRequest,
)
from tests.actors.gateways.http.serving import served_http
from tests.actors.service.test_served_models import card
from tests.waiting import received_until

pytestmark = pytest.mark.trio


class Engine:
    """An engine that answers once it is up, as its link does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_up = False
        self.was_up = False
        self.asked: list[Any] = []
        self.may_answer = trio.Event()
        self.may_answer.set()

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        match request:
            case EndWaiting() | DrainRequest():
                return type("Drained", (), {"num_cancelled": 0})()
            case ModelsRequest() if self.was_up:
                return Models(models=(card(self.name),))
            case HealthRequest():
                return Health(status="ready", steps=3, requests_running=1, requests_waiting=0, stalled_s=0.0)
            case StatsRequest():
                up = {"engine": "up", "steps": 3} if self.is_up else {"engine": "down"}
                return {**up, "engine_restarts": 7, "model": self.name}
        if not self.is_up:
            raise Unavailable("the engine is being started", retry_after_ms=1)
        await self.may_answer.wait()
        return self.name


class Service:
    """A keeper; its engines start after `load_s` seconds, or fail if a reason is set."""

    def __init__(self, nursery: trio.Nursery, names: str, *, budget: int = 100, options: BatcherOptions) -> None:
        managed = [
            ManagedModel(name, place, 10, 30.0, encode_options(options), ("law",) if name == "a" else ())
            for place, name in enumerate(names)
        ]
        self.engines = {name: Engine(name) for name in names}
        self.keeper = ModelKeeper(managed, budget, dict.fromkeys(names, options), self.engines, self.switch)
        self.models = ServedModels(self.engines, self.keeper)
        self.log: list[str] = []
        self.load_s = 2.0
        self.failure = ""
        self._nursery = nursery

    def switch(self, message: SwitchEngine) -> None:
        name = list(self.engines)[message.engine]
        self.log.append(f"{'load' if message.is_wanted else 'unload'} {name}")
        self._nursery.start_soon(self._start if message.is_wanted else self._stop, message.engine)

    async def _start(self, place: int) -> None:
        engine = list(self.engines.values())[place]
        await trio.sleep(self.load_s)
        if self.failure:
            await self.keeper.engine_has_ended(place, self.failure)
            return
        engine.is_up = engine.was_up = True
        self.keeper.engine_is_ready(place, 10)

    async def _stop(self, place: int) -> None:
        list(self.engines.values())[place].is_up = False
        await trio.sleep(0.1)
        await self.keeper.engine_has_ended(place, "")

    async def generate(self, model: str | None = None, *, client: str = "x", **params: Any) -> Any:
        request = GenerateRequest(prompt="p", model=model, **params)
        return await self.models.call(Generate(request, client=client), timeout=None)


async def start(nursery: trio.Nursery, names: str = "ab", *, budget: int = 100, **options: Any) -> Service:
    service = Service(nursery, names, budget=budget, options=BatcherOptions(**options))
    await nursery.start(service.keeper.run)
    return service


async def failure_of(call: Callable[[], Any]) -> GenbatchError:
    with pytest.raises(GenbatchError) as caught:
        await call()
    return caught.value


async def test_requests_wait_for_one_load_and_the_model_goes_when_it_was_idle(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery)
    answers: list[str] = []

    async def ask(model: str | None) -> None:
        answers.append(await service.generate(model))

    async with trio.open_nursery() as callers:
        for model in (None, "a", "law"):
            callers.start_soon(ask, model)
    assert answers == ["a"] * 3 and service.log == ["load a"] and trio.current_time() == 2.0
    assert await service.models.call(TokenizeRequest(prompt="x", model="b")) == "b"
    assert service.log == ["load a", "load b"] and trio.current_time() == 4.0
    await trio.sleep(27.9)
    assert service.log == ["load a", "load b"]
    await trio.sleep(3.0)
    assert service.log == ["load a", "load b", "unload a", "unload b"]


async def test_a_deadline_counts_the_wait_for_a_load(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery, default_deadline_s=1.5)
    late = await failure_of(lambda: service.generate("a"))
    assert isinstance(late, DeadlineExceeded) and "the model a was not loaded within 1.5 s" in str(late)
    assert trio.current_time() == 1.5
    assert isinstance(await failure_of(lambda: service.generate("a", deadline_s=0.25)), DeadlineExceeded)
    assert await service.generate("a", deadline_s=9.0) == "a"  # 1.75 s after the load began
    sent = service.engines["a"].asked[-1].request
    assert sent.deadline_s == pytest.approx(9.0 - 0.25) and service.log == ["load a"]
    assert await service.generate("b", client="") == "b"  # a program's own requests have no bound


async def test_a_caller_that_leaves_does_not_end_a_load_that_others_wait_for(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery, budget=15)
    async with trio.open_nursery() as callers:
        callers.start_soon(service.generate, "a")
        await trio.sleep(0.5)
        with trio.move_on_after(0.5):
            await service.generate("a")
        callers.start_soon(service.generate, "b")
    assert service.log == ["load a", "unload a", "load b"]
    with trio.move_on_after(0.5):
        await service.generate("a")
    await trio.testing.wait_all_tasks_blocked()
    assert service.log == ["load a", "unload a", "load b"]  # b has its turn, and nobody waits for a


async def test_a_load_that_fails_answers_who_waits_and_the_next_one_tries_again_later(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery)
    service.failure = "/secret/path is broken"
    failures: list[GenbatchError] = []

    async def ask() -> None:
        failures.append(await failure_of(lambda: service.generate("a")))

    async with trio.open_nursery() as callers:
        callers.start_soon(ask)
        callers.start_soon(ask)
    assert [str(failure) for failure in failures] == [
        "the model a could not be loaded; the service's log has the reason"
    ] * 2
    assert isinstance(service.engines["a"].asked[-1], EndWaiting)  # for requests that had lost their engine
    soon = await failure_of(lambda: service.generate("a"))
    assert isinstance(soon, Unavailable) and soon.retry_after_ms == 1000 and service.log == ["load a"]
    cards = (await service.models.call(ModelsRequest())).models
    assert [(one.id, one.state, one.parent) for one in cards] == [
        ("a", "failed", None),
        ("law", "failed", "a"),
        ("b", "unloaded", None),
    ]
    await trio.sleep(1.0)
    service.failure = ""
    assert await service.generate("a") == "a" and service.log == ["load a", "load a"]


async def test_who_waits_is_bounded(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    service = await start(nursery, n_parallel=1, max_queue=1)
    async with trio.open_nursery() as callers:
        callers.start_soon(service.generate, "a")
        callers.start_soon(service.generate, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(await failure_of(lambda: service.generate("a")), QueueFull)
        assert (await service.models.call(HealthRequest())).requests_waiting == 2


async def test_what_clients_are_told_follows_the_state(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery)
    ask = service.models.call
    health = await ask(HealthRequest())
    assert (health.status, health.steps) == ("ready", 0)
    unknown = (await ask(ModelsRequest())).models[0]
    assert (unknown.state, unknown.n_ctx, unknown.device) == ("unloaded", 0, "")
    listed = await ask(LoadModelRequest(model="a", keep_alive=100.0))
    known: ModelCard = listed.models[0]
    assert (known.id, known.state, known.n_ctx) == ("a", "loaded", 64)
    assert (await ask(HealthRequest())).steps == 3
    stats = await ask(StatsRequest())
    one, two = stats["by_model"]["a"], stats["by_model"]["b"]
    assert (one["engine"], one["state"], one["loads"], one["unload_in_s"]) == ("up", "loaded", 1, 100.0)
    assert (two["engine"], two["loads"], two["engine_restarts"]) == ("unloaded", 0, 0)
    await trio.sleep(60.0)
    assert service.log == ["load a"]
    await ask(LoadModelRequest(model="a", keep_alive=0.0))
    await trio.sleep(1.0)
    assert service.log == ["load a", "unload a"]
    cards = (await ask(ModelsRequest())).models
    assert (cards[0].state, cards[0].n_ctx) == ("unloaded", 64)  # what is known stays known
    text = render({"by_model": {"b": two}})[0].decode()
    assert 'genbatch:model_loaded{model_name="b"} 0.0' in text and "engine_up" not in text
    assert 'genbatch:model_loads_total{model_name="b"} 0.0' in text


async def test_a_drain_refuses_who_waits_for_a_load(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery)
    failures: list[GenbatchError] = []

    async def ask() -> None:
        failures.append(await failure_of(lambda: service.generate("a")))

    async with trio.open_nursery() as callers:
        callers.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await service.models.call(DrainRequest(timeout_s=5.0))
    assert isinstance(failures[0], Unavailable) and failures[0].retry_after_ms
    assert (await service.models.call(HealthRequest())).status == "draining"
    assert isinstance(await failure_of(lambda: service.generate("b")), Unavailable)


async def test_many_callers_of_many_models_spend_at_most_half_of_the_time_with_loads(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    service = await start(nursery, "abcd", budget=15, default_deadline_s=0.0)
    answered = dict.fromkeys("abcd", 0)

    async def caller(name: str) -> None:
        while trio.current_time() < 400.0:
            await service.generate(name)
            answered[name] += 1
            await trio.sleep(0.1)

    async with trio.open_nursery() as callers:
        for name in "abcd":
            callers.start_soon(caller, name)
            callers.start_soon(caller, name)
    loads = sum(entry.startswith("load") for entry in service.log)
    assert loads <= 400.0 / (2 * service.load_s) + 4
    assert all(count > 200 for count in answered.values()), answered  # and everybody has a turn


# The engines' side


async def test_an_engine_on_demand_starts_and_ends_as_it_is_told(nursery: trio.Nursery) -> None:
    told: list[EngineStopped] = []
    running = trio.Event()
    failure: list[Exception] = []

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if failure:
            raise failure.pop()
        running.set()
        await trio.sleep_forever()

    async def tell(message: EngineStopped) -> None:
        told.append(message)

    engine = EngineOnDemand(3, run, tell)
    nursery.start_soon(engine.run)
    engine.switch(SwitchEngine(3, is_wanted=False))  # nothing runs
    engine.switch(SwitchEngine(3, is_wanted=True))
    await running.wait()
    engine.switch(SwitchEngine(3, is_wanted=False))
    running = trio.Event()
    engine.switch(SwitchEngine(3, is_wanted=True))  # a new gateway wants it again, while it ends
    await running.wait()
    assert told == [EngineStopped(3, "")]
    engine.switch(SwitchEngine(3, is_wanted=False))
    await trio.testing.wait_all_tasks_blocked()
    failure.append(ValueError("broken"))
    engine.switch(SwitchEngine(3, is_wanted=True))
    await trio.testing.wait_all_tasks_blocked()
    assert told[1:] == [EngineStopped(3, ""), EngineStopped(3, "broken")]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("suffix", [None, "x"])
async def test_a_stream_waits_for_its_model_with_heartbeats_and_so_many_may_wait(
    suffix: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "HEARTBEAT_S", 0.02)
    options = BatcherOptions(n_parallel=1, max_queue=0)
    managed = [ManagedModel("scripted", 0, 10, 30.0, encode_options(options))]
    switched: list[SwitchEngine] = []
    keepers: list[ModelKeeper] = []

    def on_demand(ref: ActorRef) -> ServedModels:
        keepers.append(ModelKeeper(managed, 100, {"scripted": options}, {"scripted": ref}, switched.append))
        return ServedModels({"scripted": ref}, keepers[0])

    async with served_http(in_front=on_demand) as served, trio.open_nursery() as nursery:
        await nursery.start(keepers[0].run)
        content = json.dumps({"prompt": "hold", "suffix": suffix, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", served.port) as client:
            await client.send_all(head.encode() + content)
            begun = await received_until(client, b"\n: heartbeat\n\n")
            assert begun.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in begun
            await received_until(client, b"\n: heartbeat\n\n")
            assert [message.is_wanted for message in switched] == [True] and not served.batcher.requests
            refused = await served.complete("too many")
            assert refused.status_code == 429 and float(refused.headers["retry-after"]) > 0
            if fails:
                await keepers[0].engine_has_ended(0, "broken")
                ended = await received_until(client, b"}\n\n")
                assert b"could not be loaded" in ended and b"broken" not in ended
            else:
                keepers[0].engine_is_ready(0, 10)
                if suffix is None:
                    (await served.batcher.arrival("hold")).finish()
                    await received_until(client, b"[DONE]")
                else:
                    assert b"no fill-in-the-middle" in await received_until(client, b"}\n\n")
        nursery.cancel_scope.cancel()


async def test_models_are_added_once_their_files_no_longer_grow_and_hidden_while_they_have_gone(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    def find() -> list[ModelOnDemand]:
        if (tmp_path / "unreadable").exists():
            raise OptionError("models", "cannot be read")
        return [
            ModelOnDemand(EngineOptions(model_path=path, served_model_name=name), BatcherOptions(), 1.0)
            for name, path in on_demand_in(tmp_path).items()
        ]

    added: list[str] = []
    send, changes = trio.open_memory_channel[tuple[str, bool]](9)  # a look takes a thread's time, not the clock's

    async def add(model: ModelOnDemand) -> None:
        added.append(model.engine.served_model_name)
        await send.send((added[-1], True))

    async def show(name: str, is_there: bool) -> None:
        await send.send((name, is_there))

    (tmp_path / "a.gguf").write_bytes(b"1")
    nursery.start_soon(watch_models, find, ["kept", "a"], find(), add, show)
    await trio.sleep(3 * WATCH_S)
    for size in range(3):
        (tmp_path / "b.gguf").write_bytes(bytes(1 + size))
        await trio.sleep(WATCH_S)
        assert added == []
    (tmp_path / "unreadable").touch()
    await trio.sleep(3 * WATCH_S)
    assert added == []
    (tmp_path / "unreadable").unlink()
    assert await changes.receive() == ("b", True)
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").rename(tmp_path / f"{name}.away")
        assert await changes.receive() == (name, False)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()  # the name at another path
    (tmp_path / "b.away").rename(tmp_path / "b.gguf")
    assert await changes.receive() == ("b", True)
    await trio.sleep(3 * WATCH_S)
    assert changes.statistics().current_buffer_used == 0 and added == ["b"]
