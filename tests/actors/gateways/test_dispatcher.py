"""What the methods do, and that every failure is a typed error."""

import re
from typing import Any

import pytest
import trio
import trio.testing

from genbatch.actors.gateways.accepting import Peer
from genbatch.actors.gateways.dispatcher import (
    MAX_TEXT_BYTES,
    MAX_TEXT_CALLS,
    MAX_TEXTS_BYTES,
    TEXT_TURN_BYTES,
    Caller,
    Dispatcher,
)
from genbatch.actors.gateways.session import CallHost, Outbox, RPCSession
from genbatch.actors.runtime.actor import NOREPLY, From, GenServer, reply, start
from genbatch.actors.runtime.supervisor import Registry
from genbatch.proto.codec import encode
from genbatch.proto.errors import (
    EngineError,
    Forbidden,
    GenbatchError,
    InvalidRequest,
    QueueFull,
    Unavailable,
    UnknownMethod,
)
from genbatch.proto.messages import Result, Token, TokenIds, TokenizeRequest
from genbatch.proto.methods import METHODS
from tests.actors.gateways.scripted_batcher import ScriptedBatcher

pytestmark = pytest.mark.trio


async def call(dispatcher: Dispatcher, method: str, params: object, on_token: object = None) -> object:
    assert isinstance(params, dict)
    return await dispatcher.call(method, params, Caller("tester", on_token))  # type: ignore[arg-type]


async def test_generate_gives_the_result_and_stream_the_tokens_too(nursery: trio.Nursery) -> None:
    batcher = ScriptedBatcher()
    dispatcher = Dispatcher(await start(nursery, batcher))
    tokens: list[Token] = []
    whole = await call(dispatcher, "generate", {"prompt": "a b"}, tokens.append)
    assert isinstance(whole, Result) and whole.text == "ab"
    assert tokens == []
    assert await call(dispatcher, "stream", {"prompt": "a b"}, tokens.append) == whole
    assert [token.text for token in tokens] == ["a", "b"]
    assert batcher.requests[0].client == "tester"
    assert (dispatcher.streams("stream"), dispatcher.streams("generate"), dispatcher.streams("?")) == (
        True,
        False,
        False,
    )


async def test_stats_are_the_batchers(nursery: trio.Nursery) -> None:
    dispatcher = Dispatcher(await start(nursery, ScriptedBatcher()))
    stats = await call(dispatcher, "stats", {})
    assert isinstance(stats, dict) and stats["steps"] == 7
    with pytest.raises(InvalidRequest):
        await call(dispatcher, "stats", {"verbose": True})


async def test_an_unknown_method_is_named_beside_those_there_are(nursery: trio.Nursery) -> None:
    dispatcher = Dispatcher(await start(nursery, ScriptedBatcher()))
    with pytest.raises(UnknownMethod, match=r"'generat'.*generate, stream, .*stats, .*drain"):
        await call(dispatcher, "generat", {})


async def test_cancelling_the_caller_frees_the_request(nursery: trio.Nursery) -> None:
    batcher = ScriptedBatcher()
    dispatcher = Dispatcher(await start(nursery, batcher))
    async with trio.open_nursery() as callers:
        callers.start_soon(call, dispatcher, "generate", {"prompt": "hold"})
        await batcher.arrival("hold")
        callers.cancel_scope.cancel()
    await batcher.release("hold")


async def test_a_key_has_one_share_however_many_connections_it_has(nursery: trio.Nursery) -> None:
    batcher = ScriptedBatcher()
    dispatcher = Dispatcher(await start(nursery, batcher))
    for client in ("zeromq:1", "rpc:2"):
        await dispatcher.call("generate", {"prompt": "a"}, Caller(client, tenant="alice"))
    assert [message.client for message in batcher.requests] == ["tenant:alice"] * 2


async def test_only_a_fleets_gateways_say_whom_they_ask_for_and_may_drain_with_a_key(nursery: trio.Nursery) -> None:
    batcher = ScriptedBatcher()
    ref = await start(nursery, batcher)
    params = {"prompt": "a", "tenant": "alice", "payer": {"name": "g/c1", "served": 2.5}}
    with pytest.raises(InvalidRequest) as refused:
        await call(Dispatcher(ref), "generate", dict(params) | {"tenant": ""})
    assert refused.value.field == "payer" and not batcher.requests
    ours = Dispatcher(ref, of_fleet=True)
    await ours.call("generate", params, Caller("zeromq:1", tenant="gateway-1"))
    [message] = batcher.requests
    assert (message.client, message.request.tenant) == ("g/c1", "alice")
    assert (await call(ours, "hello", {})) and ours.max_calls > Dispatcher(ref).max_calls
    with pytest.raises(Forbidden):
        await Dispatcher(ref).call("drain", {}, Caller("c", tenant="alice"))
    await ours.call("drain", {}, Caller("zeromq:1", tenant="gateway-1"))


async def test_a_typed_error_passes_and_any_other_is_hidden(nursery: trio.Nursery) -> None:
    dispatcher = Dispatcher(await start(nursery, ScriptedBatcher()))
    with pytest.raises(EngineError, match="the step failed"):
        await call(dispatcher, "generate", {"prompt": "fault"})
    with pytest.raises(InvalidRequest, match="temperature"):
        await call(dispatcher, "generate", {"prompt": "a", "temperature": -1})
    with pytest.raises(EngineError) as info:
        await call(dispatcher, "generate", {"prompt": "bug"})
    assert "secret" not in str(info.value)


async def test_a_batcher_that_is_not_there_is_unavailable_and_says_when_to_retry() -> None:
    with pytest.raises(Unavailable) as info:
        await call(Dispatcher(Registry().ref("batcher")), "generate", {"prompt": "a"})
    assert info.value.retry_after_ms


async def test_a_full_mailbox_is_a_full_queue_and_stats_pass_it(nursery: trio.Nursery) -> None:
    class Busy(GenServer):
        async def handle_call(self, request: object, from_: object) -> object:
            await gate.wait()
            return {"answered": True}

    gate = trio.Event()
    ref = await start(nursery, Busy(), mailbox_size=1)
    dispatcher = Dispatcher(ref)
    answers: list[object] = []

    async def ask_stats() -> None:
        answers.append(await call(dispatcher, "stats", {}))

    async with trio.open_nursery() as callers:
        callers.start_soon(ref.call, "keeps it busy")
        await trio.testing.wait_all_tasks_blocked()
        callers.start_soon(ref.call, "fills the mailbox")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull) as info:
            await call(dispatcher, "generate", {"prompt": "a"})
        assert info.value.retry_after_ms
        callers.start_soon(ask_stats)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert answers == [{"answered": True}]


async def test_texts_that_are_being_read_are_bounded_for_each_client_and_for_all(
    nursery: trio.Nursery,
) -> None:
    """The tokenizer has one thread; what waits for it would be memory that nobody bounds."""

    class Slow(GenServer):
        async def handle_call(self, request: object, from_: object) -> object:
            return NOREPLY

    dispatcher = Dispatcher(await start(nursery, Slow()))
    text = "x" * (MAX_TEXT_BYTES // 2 - 600)  # with what a request takes besides
    ids = [1] * (MAX_TEXT_BYTES // 48)

    async def read(client: str, method: str = "tokenize", **params: object) -> None:
        await dispatcher.call(method, params or {"prompt": text}, Caller(client))

    async with trio.open_nursery() as callers:
        callers.start_soon(read, "a")
        callers.start_soon(read, "a")
        await trio.testing.wait_all_tasks_blocked()
        for params in ({"prompt": "y"}, {"messages": [{"role": "user", "content": "z"}]}):
            with pytest.raises(QueueFull, match="2 texts of") as refused:
                await read("a", **params)
            assert refused.value.retry_after_ms
        with pytest.raises(QueueFull):
            await read("a", "detokenize", token_ids=[1])
        for _ in range(MAX_TEXT_CALLS):
            callers.start_soon(lambda: read("few", prompt="y"))
        callers.start_soon(lambda: read("ids", "detokenize", token_ids=ids))
        for number in range((MAX_TEXTS_BYTES - 2 * MAX_TEXT_BYTES) // len(text) - 1):
            callers.start_soon(read, f"c{number}")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match="32 texts"):
            await read("few", prompt="y")
        with pytest.raises(QueueFull, match=r"^texts of"):
            await read("another", prompt=2 * text)
        callers.start_soon(read, "")  # the program's own
        await trio.testing.wait_all_tasks_blocked()
        callers.cancel_scope.cancel()
    with trio.move_on_after(0):  # all have left: there is room again
        await read("a")
    assert not dispatcher._texts._bytes and not dispatcher._texts._calls


async def test_long_texts_of_one_client_are_sent_one_after_another_and_others_do_not_wait_for_them(
    nursery: trio.Nursery,
) -> None:
    """The tokenizer reads in the order in which texts come to it."""
    sent: list[tuple[str, From[object]]] = []

    class Slow(GenServer):
        async def handle_call(self, request: object, from_: "From[object]") -> object:
            assert isinstance(request, TokenizeRequest) and request.prompt is not None
            sent.append((request.prompt[:2], from_))
            return NOREPLY

    dispatcher = Dispatcher(await start(nursery, Slow()))
    scopes: dict[str, trio.CancelScope] = {}

    async def read(name: str, size: int) -> None:
        with trio.CancelScope() as scopes[name]:
            params = {"prompt": name.ljust(size, "x")}
            await dispatcher.call("tokenize", params, Caller(name[0] if name[0] != "-" else ""))

    async def step(*names: str, size: int = TEXT_TURN_BYTES) -> list[str]:
        before = len(sent)
        for name in names:
            callers.start_soon(read, name, size)
            await trio.testing.wait_all_tasks_blocked()
        return [name for name, _ in sent[before:]]

    async def answer(number: int) -> list[str]:
        before = len(sent)
        reply(sent[number][1], TokenIds(token_ids=[]))
        await trio.testing.wait_all_tasks_blocked()
        return [name for name, _ in sent[before:]]

    async with trio.open_nursery() as callers:
        assert await step("a1", "a2", "a3", "a4", "b1", "b2", "-1", "-2") == ["a1", "b1", "-1", "-2"]
        assert await step("a5", "c1", "c2", size=10) == ["c1", "c2"], "behind the client's own, short texts together"
        scopes["a2"].cancel()
        assert await answer(0) == ["a3"]
        scopes["a3"].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert [name for name, _ in sent[-1:]] == ["a4"]
        assert await answer(len(sent) - 1) == ["a5"]
        assert await answer(1) == ["b2"]
        callers.cancel_scope.cancel()
    assert not dispatcher._turns._waiting and not +dispatcher._turns._bytes


class StandsStill(GenServer):
    """An engine that answers nothing; what waits for it waits in its gateway."""

    def __init__(self) -> None:
        self.waiting: list[object] = []

    async def handle_call(self, request: object, from_: object) -> object:
        self.waiting.append(request)
        return NOREPLY


LONG = "x" * 30_000


@pytest.mark.parametrize(
    "long",
    [
        {"tools": [{"name": "f", "description": LONG}]},
        {"tools": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, LONG]}}}}]},
        {"tools": [{"name": "f", "parameters": {"type": "object", "properties": {LONG: {}}}}]},
        {"response_format": {"type": "json_schema", "schema": {"const": LONG}}},
        {"chat_template_kwargs": {"names": [LONG]}},
        {"stop": [LONG]},
        {"logit_bias": dict.fromkeys(range(290), 1.0)},
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": LONG}]}
            ]
        },
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": LONG}]},
        {"prompt": LONG},
        {"token_ids": [5] * 750},
        {"messages": [{"role": "user", "content": LONG}]},
        {"grammar": LONG},
        {"regex": LONG},
        {"tenant": LONG},
        {"model": LONG},
        {"input": [LONG, "short"]},
        {"input": [[5] * 750]},
    ],
    ids=lambda long: next(iter(long)),
)
async def test_all_that_is_long_in_a_request_is_counted(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, long: dict[str, Any]
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.dispatcher.MAX_REQUEST_BYTES", 29_999)
    dispatcher = Dispatcher(await start(nursery, StandsStill()))
    method, rest = ("embed", {}) if "input" in long else ("generate", {"messages": [{"role": "user", "content": "a"}]})

    refusals: list[str] = []

    async def ask() -> None:
        try:
            await dispatcher.call(method, {**rest, **long}, Caller("a"))
        except QueueFull as refusal:
            refusals.append(str(refusal))

    async with trio.open_nursery() as callers:
        for _ in range(2):  # one alone is always taken
            callers.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
        [told] = refusals
        assert re.match(r"1 texts of 3\d{4} bytes are being answered for this client", told)
        callers.cancel_scope.cancel()


# Method -> parameters that are too long for it, and how it is told. A method that is not here has no bound.
BOUNDED: dict[str, tuple[dict[str, Any], type[Exception] | None]] = {
    "hello": ({"token": LONG}, None),  # answered at once: nothing is held
    "generate": ({"prompt": LONG}, QueueFull),
    "stream": ({"prompt": LONG}, QueueFull),
    "embed": ({"input": LONG}, QueueFull),
    "score": ({"documents": [LONG]}, QueueFull),
    "tokenize": ({"prompt": LONG}, QueueFull),
    "detokenize": ({"token_ids": [5] * 1000}, QueueFull),
    "keep_session": ({"name": "a", "messages": [{"role": "user", "content": LONG}]}, QueueFull),
    "resume_session": ({"name": LONG}, InvalidRequest),
    "models": ({"x": LONG}, InvalidRequest),
    "health": ({"x": LONG}, InvalidRequest),
    "stats": ({"x": LONG}, InvalidRequest),
    "load_model": ({"model": LONG}, InvalidRequest),
    "load_adapter": ({"name": "a", "path": "/" + LONG * 2}, InvalidRequest),
    "unload_adapter": ({"name": LONG}, InvalidRequest),
    "drain": ({"timeout_s": 1.0, "x": LONG}, InvalidRequest),
}


async def test_no_method_holds_what_is_long_without_a_bound(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_REQUEST_BYTES", "MAX_TEXT_BYTES"):
        monkeypatch.setattr(f"genbatch.actors.gateways.dispatcher.{name}", 29_999)
    engine = StandsStill()
    dispatcher = Dispatcher(await start(nursery, engine))
    assert set(METHODS) == set(BOUNDED), "a method needs a bound, and a line here"
    for method, (params, refusal) in BOUNDED.items():
        engine.waiting.clear()
        told: list[type[Exception]] = []

        async def ask(method: str = method, params: object = params, told: list[Any] = told) -> None:
            try:
                await call(dispatcher, method, params)
            except GenbatchError as error:
                told.append(type(error))

        async with trio.open_nursery() as callers:
            for _ in range(2 if refusal is QueueFull else 1):  # one alone is taken, where texts are counted
                callers.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
            assert told == ([] if refusal is None else [refusal]), method
            assert len(engine.waiting) == (refusal is QueueFull), method
            callers.cancel_scope.cancel()


@pytest.mark.parametrize("method", [name for name in BOUNDED if name != "hello"])
async def test_calls_of_every_method_are_bounded_in_number(
    method: str, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.dispatcher.MAX_CALLS", 3)
    short = {
        "generate": {"prompt": "a"},
        "stream": {"prompt": "a"},
        "embed": {"input": "a"},
        "score": {"documents": ["a"]},
        "tokenize": {"prompt": "a"},
        "detokenize": {"token_ids": [5]},
        "keep_session": {"name": "a", "messages": [{"role": "user", "content": "a"}]},
        "resume_session": {"name": "a"},
        "load_adapter": {"name": "a", "path": "/a"},
        "unload_adapter": {"name": "a"},
    }
    engine = StandsStill()
    outbox = Outbox()
    async with trio.open_nursery() as calls:
        dispatcher = Dispatcher(await start(nursery, engine))
        session = RPCSession(dispatcher, CallHost(calls), outbox, lambda: None, peer=Peer("tester", "tester"))
        for msgid in range(1, 6):
            session.receive(encode([0, msgid, method, [short.get(method, {})]]))
        await trio.testing.wait_all_tasks_blocked()
        assert session.num_calls == len(engine.waiting) == 3
        assert outbox.num_waiting == 2  # who is refused is told so
        calls.cancel_scope.cancel()


async def test_what_open_requests_hold_is_bounded_for_a_client_and_for_all(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that stands still gives nothing back: what its gateway keeps for it must have an end."""
    monkeypatch.setattr("genbatch.actors.gateways.dispatcher.MAX_REQUEST_BYTES", 30_000)
    monkeypatch.setattr("genbatch.actors.gateways.dispatcher.MAX_REQUESTS_BYTES", 50_000)
    dispatcher = Dispatcher(await start(nursery, StandsStill()))

    async def ask(client: str, **params: object) -> None:
        await dispatcher.call("generate", params, Caller(client))

    long = "x" * 20_000
    async with trio.open_nursery() as callers:
        leaving = trio.CancelScope()

        async def leave() -> None:
            with leaving:
                await ask("a", prompt=long)

        callers.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match=r"1 texts of 2\d{4} bytes are being answered for this client") as refused:
            await ask("a", messages=[{"role": "user", "content": long}])
        assert refused.value.retry_after_ms
        callers.start_soon(lambda: ask("b", token_ids=[5] * 416))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match=r"^texts of 4\d{4} bytes"):
            await ask("c", prompt=long)
        callers.start_soon(lambda: ask("c", prompt="short"))  # there is room for that
        leaving.cancel()  # who leaves gives all back
        await trio.testing.wait_all_tasks_blocked()
        callers.start_soon(lambda: ask("a", prompt=long))
        await trio.testing.wait_all_tasks_blocked()
        callers.cancel_scope.cancel()
