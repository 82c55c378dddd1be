"""The Batcher when more is asked than it can give: turns among clients, priorities that age, hopeless deadlines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.arrivals import INLINE_PROMPT_CHARS
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import OWN_QUEUE, BatcherOptions
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.text.tokenizer import Tokenizer
from genbatch.proto.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, QueueFull
from genbatch.proto.messages import GenerateRequest, Message, Payer, Result, Token, TokenizeRequest

TinyModel = Callable[[str], Model]


class Served:
    """A Batcher of one slot, and the order in which its requests ended."""

    def __init__(self, actor: Batcher, ref: ActorRef) -> None:
        self.actor = actor
        self.ref = ref
        self.order: list[str] = []
        self.results: dict[str, Result] = {}

    async def ask(self, name: str, client: str = "", **params: Any) -> None:
        request = GenerateRequest(**{"token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, **params})
        self.results[name] = await self.ref.call(Generate(request, client=client), timeout=None)
        self.order.append(name)


@pytest.fixture
def served(tiny_model: TinyModel, nursery: trio.Nursery) -> Callable[..., Any]:
    model = tiny_model("llama")

    async def made(**options: Any) -> Served:
        chosen = BatcherOptions(**{"n_parallel": 1, "batch_timeout": 1e6, "batch_size": 99, **options})

        def open_context() -> Context:
            return Context(model, TorchRunner(model), n_ctx=64, n_parallel=1, n_held=4, block_size=4, n_batch=32)

        actor = Batcher(open_context, chosen)
        return Served(actor, await start(nursery, actor, name="batcher"))

    return made


@contextmanager
def setting(gate: threading.Event) -> Iterator[None]:
    """Sets the gate in the end, however the body ends: a thread waits at it."""
    try:
        yield
    finally:
        gate.set()


async def ask_all(served: Served, asked: list[dict[str, Any]]) -> list[str]:
    async with trio.open_nursery() as nursery:
        for params in asked:
            nursery.start_soon(lambda params=params: served.ask(**params))
            await wait_all_tasks_blocked()
    await served.ref.stop()
    return served.order


@pytest.mark.trio
async def test_a_client_with_one_request_does_not_wait_behind_anothers_four(served: Callable[..., Any]) -> None:
    asked = [{"name": f"a{number}", "client": "a"} for number in range(4)] + [{"name": "b0", "client": "b"}]
    # Nobody is served before all have asked.
    options: dict[str, Any] = {"max_queue": 9, "max_client_open": 9, "batch_size": len(asked)}
    assert await ask_all(await served(**options), asked) == ["a0", "b0", "a1", "a2", "a3"]
    assert await ask_all(await served(**options, fair_share=False), asked) == ["a0", "a1", "a2", "a3", "b0"]


@pytest.mark.trio
async def test_a_client_is_charged_whatever_tenant_it_names(served: Callable[..., Any]) -> None:
    asked = [{"name": f"a{number}", "client": "a", "tenant": f"t{number}"} for number in range(3)]
    asked.append({"name": "b0", "client": "b", "tenant": "t0"})
    assert await ask_all(await served(max_client_open=9, batch_size=len(asked)), asked) == ["a0", "b0", "a1", "a2"]


@pytest.mark.trio
async def test_what_a_client_had_of_a_fleets_other_replicas_counts_here(served: Callable[..., Any]) -> None:
    asked: list[dict[str, Any]] = [{"name": name, "client": name[0]} for name in ("b0", "a0", "a1", "b1")]
    options: dict[str, Any] = {"max_client_open": 9, "batch_size": len(asked)}
    assert await ask_all(await served(**options), asked) == ["b0", "a0", "a1", "b1"]
    asked[1]["payer"] = Payer(name="a", served=500.0)
    assert await ask_all(await served(**options), asked) == ["b0", "b1", "a0", "a1"]


@pytest.mark.trio
async def test_a_priority_is_worth_so_much_waiting_and_no_more(
    served: Callable[..., Any], mock_clock: MockClock
) -> None:
    bench = await served(priority_ageing_s=10.0)
    async with trio.open_nursery() as nursery:
        for name, priority, later_s in (("first", 0, 0), ("urgent", -1, 8), ("too late", -1, 4)):
            mock_clock.jump(later_s)
            nursery.start_soon(lambda name=name, priority=priority: bench.ask(name, priority=priority))
            await wait_all_tasks_blocked()
        mock_clock.jump(1e6)
    await bench.ref.stop()
    assert bench.order == ["urgent", "first", "too late"]


@pytest.mark.trio
async def test_without_ageing_a_priority_is_refused(served: Callable[..., Any]) -> None:
    bench = await served()
    with pytest.raises(InvalidRequest) as refused:
        await bench.ask("one", priority=-1)
    assert refused.value.field == "priority"
    await bench.ref.stop()


@pytest.mark.trio
async def test_the_queue_of_clients_is_four_a_slot_and_the_programs_own_longer(served: Callable[..., Any]) -> None:
    bench = await served()
    with pytest.raises(InvalidRequest, match="1 slots and 4 places") as refused:
        await bench.ask("n", client="a", n=6)
    assert refused.value.field == "n"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.ask("n", n=6))
        await wait_all_tasks_blocked()
        assert len(bench.actor.slots.pending) == 6
        nursery.cancel_scope.cancel()
    assert BatcherOptions().queue_size(of_clients=False) == OWN_QUEUE
    await bench.ref.stop()


@pytest.mark.trio
async def test_beside_others_a_client_has_no_more_than_its_share_open(served: Callable[..., Any]) -> None:
    bench = await served()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.ask, "b0", "b")
        for number in range(2):
            nursery.start_soon(bench.ask, f"a{number}", "a")
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match="this client") as refused:
            await bench.ask("a2", "a")
        assert refused.value.retry_after_ms is not None
        nursery.cancel_scope.cancel()
    await bench.ref.stop()


@pytest.mark.trio
async def test_a_clients_request_without_a_deadline_waits_no_longer_than_the_default_one(
    served: Callable[..., Any], mock_clock: MockClock
) -> None:
    bench = await served(default_deadline_s=7.0, batch_timeout=10_000.0)

    async def ask_in_vain(**params: Any) -> None:
        with pytest.raises(DeadlineExceeded, match=r"7 s.* wait") as ended:
            await bench.ask("client", "a", **params)
        assert ended.value.retry_after_ms

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_in_vain)
        nursery.start_soon(bench.ask, "own")
        nursery.start_soon(lambda: bench.ask("patient", "b", deadline_s=9.0))
        await wait_all_tasks_blocked()
        mock_clock.jump(10.0)
    await bench.ref.stop()
    assert bench.results["patient"].finish_reason == "deadline", "a caller's own deadline keeps its meaning"
    assert bench.results["own"].finish_reason == "length"


@pytest.mark.trio
async def test_the_default_deadline_does_not_end_an_answer_that_is_being_generated(
    served: Callable[..., Any], mock_clock: MockClock
) -> None:
    bench = await served(default_deadline_s=7.0, batch_size=1)

    def late(token: Token) -> None:
        mock_clock.jump(6.0)  # twelve tokens take more than a minute

    long: dict[str, Any] = {"token_ids": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
    request = Generate(GenerateRequest(**long), late, client="a")
    result = await bench.ref.call(request, timeout=None)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 12)
    own = Generate(GenerateRequest(**long, deadline_s=7.0), late, client="a")
    result = await bench.ref.call(own, timeout=None)
    assert result.finish_reason == "deadline" and 2 <= len(result.token_ids) < 12
    await bench.ref.stop()


@pytest.mark.trio
@pytest.mark.parametrize("own", [{}, {"deadline_s": 1000.0}])
@pytest.mark.parametrize("client", ["", "a"])
async def test_the_operators_limit_on_an_answers_time_ends_it_as_its_length_does(
    served: Callable[..., Any], mock_clock: MockClock, client: str, own: dict[str, Any]
) -> None:
    bench = await served(max_answer_s=20.0, batch_size=1)
    mock_clock.jump(100.0)  # counts from its start and not from the service's
    tokens: list[Token] = []

    def late(token: Token) -> None:
        tokens.append(token)
        mock_clock.jump(6.0)

    asked = GenerateRequest(token_ids=[5, 6, 7], max_tokens=12, ignore_eos=True, **own)
    result = await bench.ref.call(Generate(asked, late, client=client), timeout=None)
    assert result.finish_reason == "length"
    assert 4 <= len(result.token_ids) < 12 if client else len(result.token_ids) == 12
    assert result.text == "".join(token.text for token in tokens)
    await bench.ref.stop()


@pytest.mark.trio
async def test_a_hopeless_deadline_is_refused_before_anything_is_spent(served: Callable[..., Any]) -> None:
    bench = await served()
    bench.actor.stats.service.append(100.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.ask, "waiting")
        await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match="the expected wait is"):
            await bench.ask("hopeless", client="a", deadline_s=5.0)
        nursery.cancel_scope.cancel()
    await bench.ref.stop()


@pytest.mark.trio
async def test_a_clients_share_of_the_queue_counts_all_its_waiting_sequences(served: Callable[..., Any]) -> None:
    """Those of one request are as many as its answers, and what another client has waiting is not counted."""
    bench = await served(max_queue=24, max_client_queue_share=0.5, max_client_open=99)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.ask("other", client="b", n=4))
        nursery.start_soon(lambda: bench.ask("mine", client="a", n=8))
        await wait_all_tasks_blocked()
        assert bench.actor.requests.waiting_of() == bench.actor.requests.open_of() == {"a": 8, "b": 4}
        with pytest.raises(QueueFull, match="this client has 8 waiting requests; at most 10 may wait"):
            await bench.ask("more", client="a", n=4)
        nursery.start_soon(lambda: bench.ask("fits", client="a", n=3))
        await wait_all_tasks_blocked()
        assert bench.actor.requests.waiting_of()["a"] == 11
        nursery.cancel_scope.cancel()
    await bench.ref.stop()


@pytest.mark.trio
async def test_what_is_with_the_tokenizer_counts_in_sequences(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers are eight that wait, be their prompt long or short."""
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: 0)  # else the long one is refused before
    bench = await served(max_queue=10)
    prompts = {"short": "a b", "long": "a " * INLINE_PROMPT_CHARS}
    async with trio.open_nursery() as nursery:
        # Jobs of the tokenizer's thread come one after another: the first keeps the others waiting.
        gate = threading.Event()
        bench.actor._tokenizing.submit(gate.wait, on_done=lambda _: None)
        nursery.start_soon(lambda: bench.ask("first", client="a", prompt=prompts["long"], token_ids=None, n=8))
        await wait_all_tasks_blocked()
        try:
            assert bench.actor.requests.waiting_of() == {"a": 8}
            for kind, prompt in prompts.items():
                with pytest.raises(QueueFull, match="8 requests are waiting; at most 10 may wait"):
                    await bench.ask(kind, client="a", prompt=prompt, token_ids=None, n=8)
        finally:
            gate.set()
        nursery.cancel_scope.cancel()
    await bench.ref.stop()


@pytest.mark.trio
@pytest.mark.parametrize("away", ["in the window", "at the tokenizer"])
async def test_an_idle_batchers_request_waits_no_longer_than_its_deadline(
    served: Callable[..., Any], mock_clock: MockClock, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no step that would look for it."""
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: 0)  # else the long one is refused before
    bench = await served()
    gate = threading.Event()
    bench.actor._tokenizing.submit(gate.wait, on_done=lambda _: None)
    long = {"prompt": "a " * INLINE_PROMPT_CHARS, "token_ids": None} if away == "at the tokenizer" else {}
    ends: dict[float, float] = {}  # deadline and end

    async def ask(deadline_s: float) -> None:
        with suppress(DeadlineExceeded):  # nothing of it was begun
            await bench.ask("any", deadline_s=deadline_s, **long)
            assert bench.results["any"].finish_reason == "deadline"
        ends[deadline_s] = trio.current_time()

    try:
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            deadlines = (3.0, 0.25, 7.0) if long else (0.25,)  # the window is a thousand seconds
            for deadline_s in deadlines:
                nursery.start_soon(ask, deadline_s)
            await wait_all_tasks_blocked()
            for at in (0.2, 0.26, 2.9, 3.1, 6.9, 7.1):
                mock_clock.jump(began + at - trio.current_time())
                await wait_all_tasks_blocked()
                assert set(ends) == {deadline_s for deadline_s in deadlines if deadline_s < at}
    finally:
        gate.set()
    await bench.ref.stop()


@pytest.mark.trio
async def test_long_prompts_of_one_client_let_those_of_another_have_their_turn_at_the_tokenizer(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: 0)  # else they are refused before
    bench = await served(batch_size=1, max_queue=20)
    text, ended = "a " * INLINE_PROMPT_CHARS, list[str]()
    conversation = [Message(role="system", content=text)]
    gate = threading.Event()
    bench.actor._reader._turns.submit("greedy", gate.wait, on_done=lambda _: None)

    async def ask(name: str, message: Any) -> None:
        with suppress(PromptTooLong):  # a text that takes a thread is more than so small a context holds
            await bench.ref.call(message, timeout=None)
        ended.append(name)

    messages: list[tuple[str, Any]] = [
        *((f"greedy {number}", Generate(GenerateRequest(prompt=text), client="greedy")) for number in range(4)),
        ("tokenize", TokenizeRequest(prompt=text)),
        ("prompt", Generate(GenerateRequest(prompt=text), client="a")),
        ("conversation", Generate(GenerateRequest(messages=conversation), client="b")),
    ]
    async with trio.open_nursery() as nursery:
        with setting(gate):
            for name, message in messages:
                nursery.start_soon(ask, name, message)
                await wait_all_tasks_blocked()
    # A template may take a while in its own process, and the prompt's turn is then a later one.
    assert [name for name in ended if name != "conversation"] == [
        *("greedy 0", "tokenize", "prompt"),
        *("greedy 1", "greedy 2", "greedy 3"),
    ]
    await bench.ref.stop()
