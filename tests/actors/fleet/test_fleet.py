"""Fleet: one final for every request, over replicas that die, drain, refuse and come late."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.fleet.fleet import Fleet, FleetLimits, ReplicaPhase
from genbatch.actors.fleet.routing import build_router
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
    DetokenizeRequest,
    DrawnTokens,
    EmbedRequest,
    GenerateRequest,
    Result,
    ScoreRequest,
    Text,
    Token,
    TokenIds,
    TokenizeRequest,
    Usage,
)
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    ModelCard,
    ModelsRequest,
    StatsRequest,
)

CARD = ModelCard(
    id="m", n_ctx=512, n_parallel=2, vocab_size=99, dtype="float32", quantize="none", runner="x", device="cpu"
)
LONG = "You are an assistant of the harbour office. " * 60


class Scripted:
    """A replica's connection, whose requests do what the test says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[GenerateRequest] = []
        self.on_token: list[Callable[[Token], None] | None] = []
        self.ends: list[trio.MemorySendChannel[Result | GenbatchError]] = []
        self.drained: list[float] = []
        self.drawn: list[tuple[DrawnTokens, ...]] = []
        self.embedded: list[EmbedRequest | ScoreRequest] = []

    async def generate(
        self,
        request: GenerateRequest,
        on_token: Callable[[Token], None] | None,
        drawn: tuple[DrawnTokens, ...] = (),
    ) -> Result:
        self.asked.append(request)
        self.drawn.append(drawn)
        self.on_token.append(on_token)
        send, receive = trio.open_memory_channel[Result | GenbatchError](1)
        self.ends.append(send)
        end = await receive.receive()
        if isinstance(end, GenbatchError):
            raise end
        return end

    async def embed(self, request: EmbedRequest | ScoreRequest) -> Embedded:
        self.embedded.append(request)
        send, receive = trio.open_memory_channel[Result | GenbatchError](1)
        self.ends.append(send)
        end = await receive.receive()
        if isinstance(end, GenbatchError):
            raise end
        return Embedded(vectors=[self.name.encode()] * len(request.texts), prompt_tokens=1)

    def place(self, prompt: str) -> int:
        return [request.prompt for request in self.asked].index(prompt)

    def say(self, count: int, place: int = -1) -> None:
        on_token = self.on_token[place]
        assert on_token is not None
        for index in range(count):
            on_token(Token(text="a", token_id=1, index=index, logprob=None, choice=0, top=None))

    def end(self, end: "Result | GenbatchError | None" = None, place: int = -1) -> None:
        self.ends[place].send_nowait(result(self.name) if end is None else end)

    def die(self) -> None:
        for send in self.ends:
            send.send_nowait(Unavailable("the connection was lost"))

    async def ask(self, request: msgspec.Struct) -> Any:
        match request:
            case TokenizeRequest():
                return TokenIds(token_ids=[1, 2])
            case DetokenizeRequest():
                return Text(text="a")
            case StatsRequest():
                if self.name == "silent":
                    raise Unavailable("gone")
                return {"steps": 7, "model": "m", "stuck": False}
            case DrainRequest(timeout_s=timeout_s):
                self.drained.append(timeout_s)
                return Drained(num_cancelled=0)
        raise TypeError(request)


def result(text: str) -> Result:
    return Result(
        text=text,
        token_ids=[1],
        finish_reason="length",
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    )


def fleet_of(*names: str, **limits: Any) -> tuple[Fleet, list[Scripted]]:
    fleet = Fleet(build_router("prefix"), FleetLimits(**limits))
    replicas = [Scripted(name) for name in names]
    for replica in replicas:
        fleet.join(replica.name, replica, CARD)
    return fleet, replicas


class Asked:
    """A request in a task of its own, and its end."""

    def __init__(
        self, fleet: Fleet, nursery: trio.Nursery, *, stream: bool = False, client: str = "c", **fields: Any
    ) -> None:
        self.tokens: list[Token] = []
        self.end: Any = None
        self.scope = trio.CancelScope()
        request = GenerateRequest(**{"prompt": "Hello", **fields})
        self._message = Generate(request, self.tokens.append if stream else None, client)
        nursery.start_soon(self._run, fleet)

    async def _run(self, fleet: Fleet) -> None:
        with self.scope:
            try:
                self.end = await fleet.call(self._message)
            except GenbatchError as error:
                assert self.end is None
                self.end = error


@pytest.mark.trio
async def test_requests_spread_and_end_with_what_their_replica_says(nursery: trio.Nursery) -> None:
    fleet, (one, two) = fleet_of("one", "two")
    asked = [Asked(fleet, nursery, prompt=f"{number}", stream=True) for number in range(4)]
    await wait_all_tasks_blocked()
    assert len(one.asked) == len(two.asked) == 2
    for replica in (one, two):
        for place in range(2):
            replica.say(3, place)
            replica.end(place=place)
    await wait_all_tasks_blocked()
    assert sorted(request.end.text for request in asked) == ["one", "one", "two", "two"]
    assert all(len(request.tokens) == 3 for request in asked)
    fleet.check_integrity()
    assert fleet.counts["finals"] == 4 and all(replica.view.load == 0 for replica in fleet.replicas)


@pytest.mark.trio
async def test_a_death_replays_what_was_not_shown_and_continues_what_was(nursery: trio.Nursery) -> None:
    fleet, (one, two) = fleet_of("one", "two")
    fleet.report("two", Health(status="ready", steps=1, requests_running=2, requests_waiting=7, stalled_s=0.0))
    shown = Asked(fleet, nursery, prompt="shown", stream=True)
    silent, whole = Asked(fleet, nursery, prompt="silent", stream=True), Asked(fleet, nursery)
    await wait_all_tasks_blocked()
    assert len(one.asked) == 3 and not two.asked
    one.say(5, one.place("shown"))
    one.die()
    await wait_all_tasks_blocked()
    assert len(two.asked) == 3 and fleet.replicas[0].phase is ReplicaPhase.SUSPECT
    assert two.drawn[two.place("shown")] == (DrawnTokens([1] * 5),)
    assert two.drawn[two.place("silent")] == two.drawn[two.place("Hello")] == ()
    before, after = one.asked[one.place("shown")], two.asked[two.place("shown")]
    assert before.seed == after.seed is not None
    for place in range(3):
        two.end(place=place)
    await wait_all_tasks_blocked()
    assert shown.end.text == silent.end.text == whole.end.text == "two" and len(shown.tokens) == 5
    assert fleet.counts["replayed"] == 3 and fleet.counts["lost"] == 0
    fleet.check_integrity()


@pytest.mark.trio
@pytest.mark.parametrize(("says", "num_asked"), [(0, 2), (1, 4)])
async def test_a_stream_ends_at_the_second_loss_without_a_new_token_and_at_the_fourth_in_all(
    nursery: trio.Nursery, says: int, num_asked: int
) -> None:
    fleet, replicas = fleet_of("one", "two", "three", "four", "five")
    deadly = Asked(fleet, nursery, stream=True)
    for _ in range(num_asked):
        await wait_all_tasks_blocked()
        assert deadly.end is None
        [had] = [replica for replica in replicas if len(replica.ends) > 0]
        if says:
            had.say(says)
        had.die()
        had.ends.clear()
    await wait_all_tasks_blocked()
    assert isinstance(deadly.end, EngineLost) and deadly.end.tokens_delivered == says * num_asked
    assert sum(len(replica.asked) for replica in replicas) == num_asked
    fleet.check_integrity()


@pytest.mark.trio
async def test_a_request_is_replayed_once_and_what_a_replica_decides_is_final(nursery: trio.Nursery) -> None:
    fleet, replicas = fleet_of("one", "two", "three")
    deadly = Asked(fleet, nursery)
    for _ in range(2):
        await wait_all_tasks_blocked()
        [had] = [replica for replica in replicas if len(replica.ends) > 0]
        had.die()
        had.ends.clear()
    await wait_all_tasks_blocked()
    assert isinstance(deadly.end, EngineLost) and deadly.end.tokens_delivered == 0
    assert sum(len(replica.asked) for replica in replicas) == 2

    for error in (EngineLost("the engine died twice", 0), QueueFull("full", retry_after_ms=5), EngineError("no")):
        refused = Asked(fleet, nursery)
        await wait_all_tasks_blocked()
        [had] = [replica for replica in replicas if replica.ends]
        had.end(error)
        had.ends.clear()
        await wait_all_tasks_blocked()
        assert refused.end is error
    fleet.check_integrity()


@pytest.mark.parametrize("wanted", [EmbedRequest(input=["a", "b"]), ScoreRequest(documents=["a", "b"])])
@pytest.mark.trio
async def test_texts_are_read_by_another_replica_where_theirs_is_lost(
    nursery: trio.Nursery, wanted: EmbedRequest | ScoreRequest
) -> None:
    fleet, replicas = fleet_of("one", "two", "three")
    ends: list[Any] = []

    async def ask(deadline_s: float | None = None) -> None:
        try:
            request = msgspec.structs.replace(wanted, deadline_s=deadline_s)
            ends.append(await fleet.call(Embed(request, "c")))
        except GenbatchError as error:
            ends.append(error)

    def had() -> Scripted:
        [found] = [replica for replica in replicas if replica.ends]
        return found

    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    lost = had()
    lost.die()
    lost.ends.clear()
    await wait_all_tasks_blocked()
    saved = had()
    assert saved is not lost
    saved.end()
    saved.ends.clear()
    await wait_all_tasks_blocked()
    assert ends == [Embedded(vectors=[saved.name.encode()] * 2, prompt_tokens=1)]
    assert (fleet.counts["replayed"], fleet.counts["lost"]) == (1, 0)
    nursery.start_soon(ask)
    for _ in range(2):
        await wait_all_tasks_blocked()
        lost = had()
        lost.die()
        lost.ends.clear()
    await wait_all_tasks_blocked()
    assert isinstance(ends[1], EngineLost)
    assert (fleet.counts["replayed"], fleet.counts["lost"]) == (2, 1)
    await ask(deadline_s=0.0)
    assert isinstance(ends[2], InvalidRequest)
    fleet.check_integrity()
    assert fleet.counts["finals"] == 2


@pytest.mark.trio
async def test_a_suspect_gets_nothing_until_it_is_heard_of(nursery: trio.Nursery) -> None:
    fleet, (one, two) = fleet_of("one", "two")
    Asked(fleet, nursery)
    await wait_all_tasks_blocked()
    had, other = (one, two) if one.asked else (two, one)
    had.die()
    await wait_all_tasks_blocked()
    for _ in range(5):
        Asked(fleet, nursery)
    await wait_all_tasks_blocked()
    assert len(had.asked) == 1 and len(other.asked) == 6
    fleet.report(had.name, Health(status="ready", steps=1, requests_running=0, requests_waiting=0, stalled_s=0.0))
    Asked(fleet, nursery)
    await wait_all_tasks_blocked()
    assert len(had.asked) == 2
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_draining_replica_loses_nothing_and_gets_nothing_new(nursery: trio.Nursery) -> None:
    fleet, (one, two) = fleet_of("one", "two")
    first = [Asked(fleet, nursery, prompt=LONG + text) for text in "ab"]
    await wait_all_tasks_blocked()
    had, other = (one, two) if one.asked else (two, one)
    before = len(had.asked)
    await fleet.drain(had.name, 3.0)
    fleet.report(had.name, Health(status="draining", steps=1, requests_running=1, requests_waiting=0, stalled_s=0.0))
    later = Asked(fleet, nursery, prompt=LONG + "c")  # whose beginning the other one holds
    await wait_all_tasks_blocked()
    assert had.drained == [3.0] and len(had.asked) == before
    for replica in (one, two):
        for place in range(len(replica.ends)):
            replica.end(place=place)
    await wait_all_tasks_blocked()
    assert all(request.end.finish_reason == "length" for request in [*first, later])
    fleet.leave(had.name)
    assert [replica.name for replica in fleet.replicas] == [other.name]


@pytest.mark.trio
async def test_the_first_request_waits_for_a_replica_within_its_deadline_and_a_bound(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    fleet, _ = fleet_of(max_waiting=2)
    patient, hasty = Asked(fleet, nursery), Asked(fleet, nursery, client="d", deadline_s=2.0)
    with trio.testing.assert_checkpoints():
        await trio.sleep(0.1)
    assert fleet.num_waiting == 2
    refused = Asked(fleet, nursery)
    await trio.sleep(3.0)
    assert isinstance(refused.end, QueueFull) and refused.end.retry_after_ms
    assert isinstance(hasty.end, DeadlineExceeded)
    late = Scripted("late")
    fleet.join("late", late, CARD)
    await trio.sleep(0.1)
    # Once it is placed the replica bounds the wait for its own slots, and nothing bounds its answer.
    assert late.asked[0].deadline_s is None
    await trio.sleep(500.0)
    late.end()
    await trio.sleep(0.1)
    assert patient.end.text == "late"
    fleet.check_integrity()


@pytest.mark.trio
async def test_a_request_waits_for_a_replica_no_longer_than_the_default_deadline(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    fleet, _ = fleet_of(default_deadline_s=10.0)
    asked, own, patient = (
        Asked(fleet, nursery),
        Asked(fleet, nursery, client=""),
        Asked(fleet, nursery, deadline_s=30.0),
    )
    await trio.sleep(11.0)
    assert isinstance(asked.end, DeadlineExceeded) and own.end is None and patient.end is None
    await trio.sleep(20.0)
    assert isinstance(patient.end, DeadlineExceeded) and own.end is None
    own.scope.cancel()


@pytest.mark.trio
async def test_a_caller_that_leaves_takes_its_request_along(nursery: trio.Nursery) -> None:
    fleet, _ = fleet_of("one")
    asked = Asked(fleet, nursery)
    await wait_all_tasks_blocked()
    asked.scope.cancel()
    await wait_all_tasks_blocked()
    fleet.check_integrity()
    assert not fleet.replicas[0].num_own and fleet.counts["finals"] == 1


@pytest.mark.trio
async def test_draining_the_gateway_waits_and_then_cancels(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    fleet, (one,) = fleet_of("one")
    ends, stays = Asked(fleet, nursery, prompt="ends"), Asked(fleet, nursery, prompt="stays")
    await trio.sleep(0.1)

    async def finish() -> None:
        await trio.sleep(1.0)
        one.end(place=one.place("ends"))

    nursery.start_soon(finish)
    drained = await fleet.call(DrainRequest(timeout_s=5.0))
    assert drained.num_cancelled == 1 and ends.end.text == "one" and isinstance(stays.end, Cancelled)
    late = Asked(fleet, nursery)
    await trio.sleep(0.1)
    assert isinstance(late.end, Unavailable) and (await fleet.call(HealthRequest())).status == "draining"


@pytest.mark.trio
async def test_a_callers_function_that_raises_ends_its_request_only(nursery: trio.Nursery) -> None:
    fleet, (one,) = fleet_of("one")
    caught: list[BaseException] = []

    def fail(token: Token) -> None:
        raise ValueError("no")

    async def ask() -> None:
        try:
            await fleet.call(Generate(GenerateRequest(prompt="Hello"), fail, "c"))
        except EngineError as error:
            caught.append(error)

    async def speak() -> None:
        await wait_all_tasks_blocked()
        with pytest.raises(EngineError):
            one.say(1)
        one.end(EngineError("on_token raised"))

    nursery.start_soon(ask)
    await speak()
    await wait_all_tasks_blocked()
    assert caught
    fleet.check_integrity()


@pytest.mark.trio
async def test_what_gateways_ask_is_answered_whatever_replicas_do() -> None:
    fleet, _ = fleet_of()
    with pytest.raises(Unavailable, match="first replica"):
        await fleet.call(ModelsRequest())
    assert (await fleet.call(HealthRequest())).status == "ready"  # a request makes one start
    for name in ("one", "silent"):
        fleet.join(name, Scripted(name), CARD)
    report = Health(status="ready", steps=3, requests_running=2, requests_waiting=1, stalled_s=0.5)
    fleet.report("one", report)
    fleet.report("gone", report)
    assert (await fleet.call(ModelsRequest())).models == (CARD,)
    health = await fleet.call(HealthRequest())
    assert (health.status, health.steps, health.requests_running) == ("ready", 3, 2)
    assert fleet.replicas[0].view.num_open == 3  # another gateway's
    assert (await fleet.call(TokenizeRequest(prompt="a"))).token_ids == [1, 2]
    stats = await fleet.call(StatsRequest())
    assert stats["steps"] == 7 and stats["model"] == "m" and stats["replicas"] == {"one": "open", "silent": "open"}
    for name in ("one", "silent"):
        fleet.report(name, Health(status="stuck", steps=3, requests_running=2, requests_waiting=1, stalled_s=9.0))
    assert (await fleet.call(HealthRequest())).status == "down"


@pytest.mark.trio
async def test_what_no_gateway_takes_is_refused() -> None:
    fleet, _ = fleet_of("one")
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await fleet.call(Generate(GenerateRequest(prompt="a", max_tokens=0)))
    with pytest.raises(InvalidRequest, match="beams"):
        await fleet.call(Generate(GenerateRequest(prompt="a"), beam_width=2))
    fleet.check_integrity()


@pytest.mark.trio
async def test_a_replica_gets_a_callers_own_deadline_and_no_other(
    nursery: trio.Nursery,
) -> None:
    fleet, [replica] = fleet_of("one", default_deadline_s=60.0)
    Asked(fleet, nursery)
    Asked(fleet, nursery, deadline_s=5.0)
    for deadline_s in (None, 5.0):
        nursery.start_soon(fleet.call, Embed(EmbedRequest(input=["a"], deadline_s=deadline_s), "c"))
    await wait_all_tasks_blocked()
    for asked in (replica.asked, replica.embedded):
        own = [request.deadline_s for request in asked if request.deadline_s is not None]
        assert len(asked) == 2 and len(own) == 1 and 0 < own[0] <= 5.0
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_prompt_is_work_that_waits_until_its_first_token_is_there(nursery: trio.Nursery) -> None:
    fleet, (one,) = fleet_of("one")
    Asked(fleet, nursery, prompt="a long prompt " * 100, stream=True)
    await wait_all_tasks_blocked()
    (replica,) = fleet.replicas
    assert replica.own_tokens > 0 and replica.num_own == 1
    one.say(1)
    assert replica.own_tokens == 0 and replica.num_own == 1
    one.end()
    await wait_all_tasks_blocked()
    assert replica.own_tokens == 0 and replica.num_own == 0
