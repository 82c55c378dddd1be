"""A link over a real socketpair: the gateways' end, the engine's end, and a scripted Batcher behind it."""

import socket
from dataclasses import fields
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.engine import link as link_module
from genbatch.actors.engine.link import EngineSession, FrameStream
from genbatch.actors.engine.remote_batcher import CANCEL_GRACE_S, HEALTH_WAIT_S, TICK_S
from genbatch.actors.runtime.actor import reply, start
from genbatch.actors.runtime.errors import CallTimeout
from genbatch.proto.codec import encode
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    GenbatchError,
    InvalidRequest,
    Unavailable,
)
from genbatch.proto.messages import (
    DetokenizeRequest,
    DrawnTokens,
    EmbedRequest,
    GenerateRequest,
    ScoreRequest,
    Text,
    Token,
    TokenIds,
    TokenizeRequest,
    ToolCallDelta,
)
from genbatch.proto.rpc import (
    CallAnswered,
    ClientConnection,
    TokensReceived,
    notification,
    tokens_message,
)
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    Models,
    ModelsRequest,
    StatsRequest,
)
from tests.actors.engine.link_bench import CARD, OPTIONS, Bench, Scripted, settle, until


@pytest.fixture
async def bench(nursery: trio.Nursery) -> Bench:
    made = Bench(nursery)
    await made.open()
    return made


# What crosses


@pytest.mark.trio
async def test_a_stream_crosses_token_by_token_and_ends_with_its_result(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go", streams=True, n=2, temperature=0.5, seed=2**64 - 1)
    [work] = await bench.working("go")
    assert work.message.request == GenerateRequest(prompt="go", n=2, temperature=0.5, seed=2**64 - 1)
    assert work.message.drawn == ()
    assert (work.message.client, work.message.request_id) == ("c", "r1")
    for text, choice in (("a", 0), ("b", 1), ("c", 0)):
        work.emit(text, choice)
    work.finish()
    assert (await bench.end_of("go")).text == "all"
    assert [(t.text, t.choice, t.index) for t in bench.tokens["go"]] == [("a", 0, 0), ("b", 1, 0), ("c", 0, 1)]
    assert bench.tokens["go"] == work.given, "something of a token is lost on the way"


@pytest.mark.trio
async def test_every_field_of_a_token_crosses(bench: Bench, mock_clock: MockClock) -> None:
    plain = Token(text="", token_id=0, index=0)
    full = Token(
        text="é",
        token_id=7,
        index=0,
        logprob=-0.25,
        choice=1,
        top={7: -0.25, 3: -2.0},
        reasoning="so",
        tool_calls=(ToolCallDelta(index=0, id="c1", name="f", arguments="{"),),
    )
    unset = {"index"}  # counted anew for each choice
    assert all(getattr(full, name) != getattr(plain, name) for name in set(Token.__struct_fields__) - unset)
    await bench.engine_comes()
    bench.ask("go", streams=True)
    [work] = await bench.working("go")
    assert work.message.on_token is not None
    work.message.on_token(plain)
    work.message.on_token(full)
    work.finish()
    await bench.end_of("go")
    assert bench.tokens["go"] == [plain, full]


@pytest.mark.trio
async def test_a_caller_that_wants_the_whole_gets_no_tokens(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    [work] = await bench.working("go")
    work.emit("a")
    work.emit("b")
    await until(lambda: [entry.phase.value for entry in bench.link.accepted] == ["begun"])
    work.finish()
    assert (await bench.end_of("go")).text == "all"
    assert not bench.tokens["go"]


@pytest.mark.trio
async def test_errors_cross_with_their_class_and_their_hint(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("refused")
    error = await bench.end_of("refused")
    assert isinstance(error, EngineError) and error.retry_after_ms == 7


@pytest.mark.trio
async def test_a_request_that_cannot_be_sent_is_refused_and_hurts_no_other(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("good")
    await bench.working("good")
    for prompt, params in (("\ud800", {}), ("a", {"max_tokens": 0}), ("b", {"logit_bias": {2**70: 1.0}})):
        bench.ask(prompt, **params)
        assert isinstance(await bench.end_of(prompt), InvalidRequest)
    [work] = await bench.working("good")
    work.finish()
    assert (await bench.end_of("good")).text == "all"


@pytest.mark.trio
async def test_the_other_calls_cross_and_stats_tell_of_engines(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    assert await bench.link.call(TokenizeRequest(prompt="x")) == TokenIds(token_ids=[1, 2])
    assert await bench.link.call(DetokenizeRequest(token_ids=[1])) == Text(text="12")
    assert await bench.link.call(ModelsRequest()) == Models(models=(CARD,))
    stats = await bench.link.call(StatsRequest(), control=True)
    assert (stats["steps"], stats["finished"]) == (3, {"stop": 1})
    assert (stats["engine_restarts"], stats["requests_replayed"], stats["requests_lost"]) == (0, 0, 0)
    with pytest.raises(InvalidRequest):
        await bench.link.call(TokenizeRequest(prompt="\ud800"))
    heard = trio.Event()

    async def ask() -> None:
        with pytest.raises(InvalidRequest, match="the model's own reason"):
            await bench.link.call(TokenizeRequest(prompt="refused"), timeout=None)
        heard.set()

    bench.nursery.start_soon(ask)
    await until(heard.is_set)


def test_every_field_of_a_generate_call_is_sent_or_is_known_to_stay() -> None:
    sent = set(link_module.EngineWork.__struct_fields__) - {"streams"} | {"drawn"}  # an option of the stream
    stays = {"on_token", "shows", "tag", "keep"}  # become `streams`; for programs that run the Batcher themselves
    over_there = {"is_validated"}  # the engine's end sets it: this end has validated the request
    assert {field.name for field in fields(Generate)} == sent | stays | over_there


@pytest.mark.trio
async def test_a_caller_that_leaves_cancels_its_request_over_there(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    scope = bench.ask("go", streams=True)
    [work] = await bench.working("go")
    work.emit("a")
    await until(lambda: bench.tokens["go"])
    scope.cancel()
    await until(lambda: bench.engine.left == ["go"])
    assert len(bench.link.accepted) == 0
    work.emit("b")  # on its way when the caller left
    await until(lambda: not bench.link._calls)
    bench.link.accepted.check_integrity()


@pytest.mark.trio
async def test_a_callers_own_fault_ends_its_request_only(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    ends: list[object] = []

    async def call() -> None:
        try:
            await bench.link.call(Generate(GenerateRequest(prompt="bad"), lambda token: 1 / 0), timeout=None)
        except GenbatchError as error:
            ends.append(error)

    bench.nursery.start_soon(call)
    bench.ask("good", streams=True)
    bad, good = await bench.working("bad", "good")
    bad.emit("a")
    bad.emit("b")
    good.emit("a")
    await until(lambda: ends and bench.tokens["good"])
    assert isinstance(ends[0], EngineError) and "ZeroDivisionError" in str(ends[0])
    await until(lambda: bench.engine.left == ["bad"])


@pytest.mark.parametrize("texts", [EmbedRequest(input=["a", "b"]), ScoreRequest(documents=["a", "b"], query="q")])
@pytest.mark.trio
async def test_texts_cross_and_are_asked_again_of_a_new_engine(
    bench: Bench, mock_clock: MockClock, texts: EmbedRequest | ScoreRequest
) -> None:
    ends: list[Any] = []
    wanted = Embed(texts, "somebody", request_id="r")

    async def ask(call: Embed) -> None:
        try:
            ends.append(await bench.link.call(call, timeout=None))
        except GenbatchError as error:
            ends.append(error)

    bench.nursery.start_soon(ask, wanted)
    await bench.engine_comes()
    await until(lambda: bench.engine.texts)
    bench.nursery.start_soon(ask, Embed(EmbedRequest(input="")))
    await until(lambda: ends)
    assert isinstance(ends.pop(), InvalidRequest)
    await bench.engine_dies()
    await bench.engine_comes()
    await until(lambda: bench.engine.texts)
    call, from_ = bench.engine.texts[-1]
    assert (call.request, call.client, call.request_id) == (wanted.request, "somebody", "r")
    reply(from_, Embedded(vectors=[b"1234", b"5678"], prompt_tokens=2))
    await until(lambda: ends)
    assert ends == [Embedded(vectors=[b"1234", b"5678"], prompt_tokens=2)]
    assert (await bench.link.call(StatsRequest()))["requests_replayed"] == 1
    bench.link.accepted.check_integrity()


# The engine dies


@pytest.mark.trio
async def test_finals_and_replays_follow_an_engines_death(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("streamed", streams=True)
    await bench.working("streamed")  # of those that have begun the last is sent first
    bench.ask("whole")
    bench.ask("done")
    streamed, whole, done = await bench.working("streamed", "whole", "done")
    streamed.emit("a")
    streamed.emit("b")
    whole.emit("a")
    done.finish()
    await bench.end_of("done")
    await until(lambda: len(bench.tokens["streamed"]) == 2)
    seed = streamed.message.request.seed
    await bench.engine_dies()
    bench.ask("meanwhile")
    assert bench.ends.keys() == {"done"}
    await bench.engine_comes()
    [again, meanwhile] = await bench.working("whole", "meanwhile")
    assert again.message.drawn == (DrawnTokens([0]),) and not again.message.shows
    assert meanwhile.message.drawn == ()
    again.indices[0] = 1
    again.emit("b")  # it has begun, and the next one is sent
    [goes_on] = await bench.working("streamed")
    assert goes_on.message.drawn == (DrawnTokens([0, 1]),) and goes_on.message.shows
    assert goes_on.message.request.seed == seed is not None, "a replay draws by the same seed"
    goes_on.indices[0] = 2
    goes_on.emit("c")
    for work in (goes_on, again, meanwhile):
        work.finish()
    for prompt in ("streamed", "whole", "meanwhile"):
        assert (await bench.end_of(prompt)).text == "all"
    assert [(token.index, token.text) for token in bench.tokens["streamed"]] == [(0, "a"), (1, "b"), (2, "c")]
    stats = await bench.link.call(StatsRequest())
    assert (stats["engine_restarts"], stats["requests_replayed"], stats["requests_lost"]) == (1, 2, 0)


@pytest.mark.trio
async def test_questions_end_with_the_engine_that_was_asked(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    errors: list[GenbatchError] = []

    async def ask() -> None:
        with pytest.raises(Unavailable) as caught:
            await bench.link.call(TokenizeRequest(prompt="hold"), timeout=None)
        errors.append(caught.value)

    bench.nursery.start_soon(ask)
    await settle()
    await bench.engine_dies()
    await until(lambda: errors)
    assert errors[0].retry_after_ms


@pytest.mark.trio
async def test_a_batchers_last_breath_does_not_end_what_can_be_replayed(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    await bench.working("go")
    crashed = bench.engine.ref
    crashed.cast("crash")
    await crashed.wait()
    await settle()
    assert not bench.ends
    await bench.engine_dies()
    await bench.engine_comes()
    [again] = await bench.working("go")
    again.finish()
    assert (await bench.end_of("go")).text == "all"


@pytest.mark.trio
async def test_without_an_engine_questions_are_answered_and_the_queue_has_a_bound(
    bench: Bench, mock_clock: MockClock
) -> None:
    assert (await bench.link.call(HealthRequest(), control=True)).status == "down"
    with pytest.raises(Unavailable):
        await bench.link.call(ModelsRequest())
    await bench.engine_comes()
    assert (await bench.link.call(HealthRequest(), control=True)) == bench.engine.health
    await bench.engine_dies()
    health = await bench.link.call(HealthRequest(), control=True)
    assert health.status == "down"
    assert await bench.link.call(ModelsRequest()) == Models(models=(CARD,))
    with pytest.raises(Unavailable) as refused:
        await bench.link.call(TokenizeRequest(prompt="x"))
    assert refused.value.retry_after_ms
    for number in range(4):  # n_parallel + max_queue
        bench.ask(f"waits {number}")
    await until(lambda: len(bench.link.accepted) == 4)
    bench.ask("too much")
    error = await bench.end_of("too much")
    assert isinstance(error, Unavailable) and error.retry_after_ms


@pytest.mark.trio
async def test_what_remains_of_a_deadline_is_sent_with_a_replay(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go", deadline_s=10.0)
    [work] = await bench.working("go")
    assert work.message.request.deadline_s == 10.0
    await bench.engine_dies()
    mock_clock.jump(4.0)
    await bench.engine_comes()
    [again] = await bench.working("go")
    assert again.message.request.deadline_s == pytest.approx(6.0)


@pytest.mark.trio
async def test_a_deadline_is_kept_while_there_is_no_engine(bench: Bench, mock_clock: MockClock) -> None:
    bench.ask("go", deadline_s=1.0)
    await until(lambda: len(bench.link.accepted) == 1)
    mock_clock.jump(1.0 + TICK_S)
    assert isinstance(await bench.end_of("go"), DeadlineExceeded)


@pytest.mark.trio
async def test_a_clients_request_waits_for_an_engine_no_longer_than_the_default_deadline(
    bench: Bench, mock_clock: MockClock
) -> None:
    bench.ask("go")
    await until(lambda: len(bench.link.accepted) == 1)
    mock_clock.jump(OPTIONS.default_deadline_s + TICK_S)
    assert isinstance(await bench.end_of("go"), DeadlineExceeded)


@pytest.mark.trio
async def test_the_default_deadline_ends_nothing_that_an_engine_works_on(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    [work] = await bench.working("go")
    assert work.message.request.deadline_s is None
    for _ in range(4 * int(OPTIONS.default_deadline_s / TICK_S)):  # the engine's signs of life come between
        mock_clock.jump(TICK_S)
        await settle()
    assert len(bench.link.accepted) == 1
    # After the engine's death it waits anew: what it had of the dead one is not counted.
    await bench.engine_dies()
    mock_clock.jump(OPTIONS.default_deadline_s - 1.0)
    await bench.engine_comes()
    assert len(await bench.working("go")) == 1


# The engine hangs


@pytest.mark.trio
async def test_health_is_that_of_now_and_the_last_known_where_the_engine_does_not_answer(
    bench: Bench, mock_clock: MockClock
) -> None:
    await bench.engine_comes()
    before = await bench.link.call(HealthRequest(), control=True)
    bench.engine.health = msgspec.structs.replace(before, steps=4, requests_running=0)
    assert (await bench.link.call(HealthRequest(), control=True)).steps == 4  # no beat has come in between
    bench.engine.health = None
    answers: list[Health] = []

    async def ask() -> None:
        answers.append(await bench.link.call(HealthRequest(), control=True))

    bench.nursery.start_soon(ask)
    await settle()
    assert answers == []
    mock_clock.jump(HEALTH_WAIT_S)
    await until(lambda: answers)
    assert (answers[0].status, answers[0].steps) == ("ready", 4)
    bench.nursery.start_soon(ask)
    await settle()
    await bench.engine_dies()  # in the middle of a question
    await until(lambda: len(answers) == 2)
    assert answers[1].status == "down"


@pytest.mark.trio
@pytest.mark.parametrize("how", ["silent", "stalled"])
async def test_an_engine_that_does_not_get_on_is_to_be_killed(how: str, bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    await bench.working("go")
    if how == "silent":
        bench.engine.health = None  # no beat is sent any more
    else:
        assert bench.engine.health is not None
        bench.engine.health = msgspec.structs.replace(bench.engine.health, stalled_s=OPTIONS.stall_s + 0.1)
    waited = 0.0
    while not bench.hung:
        assert waited <= OPTIONS.stall_s + 2 * TICK_S
        assert how == "stalled" or bench.ends == {}
        mock_clock.jump(TICK_S)
        waited += TICK_S
        await settle()
    assert len(bench.hung) == 1 and "no progress" in bench.hung[0]
    assert how == "stalled" or waited > OPTIONS.stall_s
    assert (await bench.link.call(HealthRequest(), control=True)).status == "stuck"
    bench.ask("meanwhile")
    await settle()
    assert "meanwhile" not in bench.engine.work
    await bench.engine_dies()
    await bench.engine_comes()
    for work in await bench.working("go", "meanwhile"):
        work.finish()
    assert (await bench.end_of("go")).text == (await bench.end_of("meanwhile")).text == "all"
    assert len(bench.hung) == 1


@pytest.mark.trio
async def test_an_engine_that_is_busy_or_idle_for_long_is_left_alone(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    for _ in range(4 * int(OPTIONS.stall_s / TICK_S)):
        mock_clock.jump(TICK_S)
        await settle()
    mock_clock.jump(10 * OPTIONS.stall_s)  # while this event loop was held up nobody could be heard
    await settle()
    assert not bench.hung


@pytest.mark.trio
@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1 no msgpack",
        encode([9, 1]),
        tokens_message([[1, 5, 7, "x"]]),
        tokens_message([[1, 0, True, "x"]]),
        notification("health", {"status": "well"}),
    ],
    ids=["bytes", "no message", "a gap", "a type", "no health"],
)
async def test_an_engine_that_talks_nonsense_is_to_be_killed(frame: bytes, bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go", streams=True)
    [work] = await bench.working("go")
    await bench.side.stream.send(frame)
    await until(lambda: bench.hung)
    work.emit("a")
    work.finish()
    await settle()
    assert len(bench.hung) == 1 and not bench.tokens["go"] and not bench.ends
    await bench.engine_dies()
    await bench.engine_comes()
    [again] = await bench.working("go")
    again.finish()
    assert (await bench.end_of("go")).text == "all"


@pytest.mark.trio
async def test_a_gateway_that_reads_nothing_does_not_hold_up_a_step(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(link_module, "MAX_BACKLOG", 64)
    batcher = Scripted()
    ours, theirs = socket.socketpair()
    ended = trio.Event()
    ref = await start(nursery, batcher)

    async def serve() -> None:
        await EngineSession(ref, FrameStream(theirs)).run()
        ended.set()

    nursery.start_soon(serve)
    with ours:
        gateway = FrameStream(ours.dup())
        work = link_module.EngineWork(request=GenerateRequest(prompt="go"), client="c", streams=True)
        await gateway.send(ClientConnection(limits=None).request("generate", work)[1])
        await until(lambda: "go" in batcher.work)
        given = 0
        while not ended.is_set():
            batcher.work["go"].emit("x" * 1000)  # returns at once, every time
            given += 1
            assert given < 100_000
            await trio.lowlevel.checkpoint()
        await until(lambda: batcher.left == ["go"])
        await gateway.aclose()


@pytest.mark.trio
async def test_messages_of_an_engine_that_is_gone_are_dropped(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go", streams=True)
    await bench.working("go")
    gone = bench.link._connection
    assert gone is not None
    await bench.engine_dies()
    await bench.engine_comes()
    [again] = await bench.working("go")
    [msgid] = bench.link._calls
    token = Token(text="late", token_id=1, index=0)
    for event in (TokensReceived([(msgid, token)]), CallAnswered(msgid, {}), None):
        bench.link._hear(gone, event)
    assert not bench.tokens["go"] and not bench.ends and bench.link.accepted.is_up
    again.finish()
    assert (await bench.end_of("go")).text == "all"


@pytest.mark.trio
async def test_callers_who_ask_for_the_counters_at_once_share_one_question(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.engine.holds_stats = trio.Event()
    answers: list[int] = []

    async def ask() -> None:
        answers.append((await bench.link.call(StatsRequest(), timeout=None))["asked"])

    bench.nursery.start_soon(ask)
    await until(lambda: bench.engine.num_stats == 1)
    for _ in range(5):
        bench.nursery.start_soon(ask)
    leaves = trio.CancelScope()

    async def leave() -> None:
        with leaves:
            await ask()

    bench.nursery.start_soon(leave)
    await settle()
    leaves.cancel()
    bench.engine.holds_stats.set()
    await until(lambda: len(answers) == 6)
    # Callers that come during a question hear of nothing older than their call.
    assert answers == [1, 2, 2, 2, 2, 2] and bench.engine.num_stats == 2


@pytest.mark.trio
async def test_a_call_that_takes_too_long_is_given_up(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    gave_up = trio.Event()

    async def ask() -> None:
        with pytest.raises(CallTimeout):
            await bench.link.call(TokenizeRequest(prompt="hold"), timeout=3.0)
        gave_up.set()

    bench.nursery.start_soon(ask)
    await until(lambda: bench.link._calls)
    mock_clock.jump(3.0)
    await until(gave_up.is_set)
    assert not bench.link._calls


@pytest.mark.trio
async def test_a_link_that_stops_ends_every_call(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    await bench.working("go")
    errors: list[GenbatchError] = []

    async def ask() -> None:
        try:
            await bench.link.call(TokenizeRequest(prompt="hold"), timeout=None)
        except GenbatchError as error:
            errors.append(error)

    bench.nursery.start_soon(ask)
    await until(lambda: len(bench.link._calls) == 2)
    bench.running.cancel()
    assert isinstance(await bench.end_of("go"), Unavailable)
    await until(lambda: errors)
    assert isinstance(errors[0], Unavailable)
    with pytest.raises(Unavailable):
        await bench.link.call(Generate(GenerateRequest(prompt="late")))
    bench.side.scope = trio.CancelScope()
    await bench.open()  # as a supervisor starts it again
    bench.ask("anew")
    [work] = await bench.working("anew")
    work.finish()
    assert (await bench.end_of("anew")).text == "all"


@pytest.mark.trio
async def test_a_link_that_is_closed_between_two_that_live_is_made_anew(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    await bench.working("go")
    bench.side.scope.cancel()  # its session ends, as it does with a backlog
    await until(lambda: bench.engine.left == ["go"])
    bench.engine.work.clear()
    bench.side.scope = trio.CancelScope()
    await bench.joint.unjoined(0)  # of a link that has been replaced
    assert bench.side.joins == 1
    await bench.joint.unjoined(1)
    [again] = await bench.working("go")
    again.finish()
    assert (await bench.end_of("go")).text == "all"


# Draining


@pytest.mark.trio
async def test_a_drain_refuses_what_is_new_and_waits_for_what_is_open(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("go")
    [work] = await bench.working("go")
    drained: list[Drained] = []

    async def drain() -> None:
        drained.append(await bench.link.call(DrainRequest(timeout_s=30.0), timeout=None))

    bench.nursery.start_soon(drain)
    await until(lambda: bench.link.is_draining)
    bench.ask("new")
    assert isinstance(await bench.end_of("new"), Unavailable)
    assert (await bench.link.call(HealthRequest(), control=True)).status == "draining"
    assert not drained
    work.finish()
    await until(lambda: drained)
    assert drained == [Drained(num_cancelled=0)]
    assert (await bench.end_of("go")).text == "all"


@pytest.mark.trio
async def test_a_drain_cancels_what_does_not_end_in_time(bench: Bench, mock_clock: MockClock) -> None:
    await bench.engine_comes()
    bench.ask("ends when told")
    bench.ask("does not listen")
    [listens, _] = await bench.working("ends when told", "does not listen")
    drained: list[Drained] = []

    async def drain() -> None:
        drained.append(await bench.link.call(DrainRequest(timeout_s=3.0), timeout=None))

    bench.nursery.start_soon(drain)
    await until(lambda: bench.link.is_draining)
    mock_clock.jump(3.0)
    await until(lambda: bench.engine.drained == 0.0)
    listens.finish("what there was")
    assert (await bench.end_of("ends when told")).text == "what there was"
    assert not drained
    mock_clock.jump(CANCEL_GRACE_S)
    assert isinstance(await bench.end_of("does not listen"), Cancelled)
    await until(lambda: drained)
    assert drained == [Drained(num_cancelled=2)]


@pytest.mark.trio
async def test_stats_without_an_engine_are_the_links_own(bench: Bench, mock_clock: MockClock) -> None:
    assert (await bench.link.call(StatsRequest()))["engine"] == "down"
    await bench.engine_comes()
    assert (await bench.link.call(StatsRequest()))["engine"] == "up"
    bench.ask("whole")
    bench.ask("streamed", streams=True)
    _, streamed = await bench.working("whole", "streamed")
    streamed.emit("a")
    await until(lambda: bench.tokens["streamed"])
    await bench.engine_dies()
    stats = await bench.link.call(StatsRequest())
    assert (stats["engine"], stats["model"], stats["engine_restarts"]) == ("down", "m", 0)
    assert (stats["requests_open"], stats["requests_replayed"], stats["requests_lost"]) == (2, 2, 0)
    assert "steps" not in stats
