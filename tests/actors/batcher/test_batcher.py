"""The Batcher over a real (tiny) model: every caller gets its own text, and nothing leaks whatever happens."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.intake import Prompt
from genbatch.actors.batcher.messages import Generate, GetStats
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.slots import Slots
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.runtime.errors import ActorDown
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import PauseOrder, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.models.model import Model
from genbatch.nif.runner import Runner
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.text.tokenizer import Tokenizer
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, PromptTooLong, QueueFull, Unavailable
from genbatch.proto.messages import GenerateRequest, Message, Result, Token
from tests.waiting import a_moment

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Bench:
    """A running Batcher and what tests look at inside it."""

    def __init__(self, actor: Batcher, ref: ActorRef) -> None:
        self.actor = actor
        self.ref = ref

    async def generate(self, on_token: Callable[[Token], None] | None = None, **params: Any) -> Result:
        request = GenerateRequest(**{"max_tokens": 8, **params})
        result = await self.ref.call(Generate(request, on_token), timeout=None)
        assert isinstance(result, Result)
        return result

    def assert_idle(self) -> None:
        """Every slot and every block is back, but for prompts held on purpose."""
        actor = self.actor
        assert actor.slots.seq_pool == set(range(actor.options.n_parallel))
        assert (actor.slots.sequences, actor.slots.pending, list(actor.requests)) == ({}, [], [])
        actor.ctx.kv.check_integrity()
        for held in list(actor.held):
            actor.ctx.seq_rm(actor.held.drop(held))
        assert actor.ctx.kv.counts().used == 0


@asynccontextmanager
async def batcher(
    model: Model, *, n_ctx: int = 512, new_runner: Callable[[Model], Runner] = TorchRunner, **options: Any
) -> AsyncIterator[Bench]:
    chosen = BatcherOptions(**{"n_parallel": 4, "batch_timeout": 1.0, "max_batch_tokens": 32, **options})

    def open_context() -> Context:
        return Context(
            model,
            new_runner(model),
            n_ctx=n_ctx,
            n_parallel=chosen.n_parallel,
            n_held=chosen.max_held_prompts,
            block_size=4,
            n_batch=chosen.max_batch_tokens,
        )

    async with trio.open_nursery() as nursery:
        actor = Batcher(open_context, chosen)
        ref = await start(nursery, actor, name="batcher")
        bench = Bench(actor, ref)
        yield bench
        bench.assert_idle()
        await ref.stop()


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


async def gather(bench: Bench, requests: list[dict[str, Any]]) -> list[Result]:
    results: dict[int, Result] = {}

    async def one(index: int, params: dict[str, Any]) -> None:
        results[index] = await bench.generate(**params)

    async with trio.open_nursery() as nursery:
        for index, params in enumerate(requests):
            nursery.start_soon(one, index, params)
    return [results[index] for index in range(len(requests))]


@pytest.mark.trio
@pytest.mark.parametrize("batching_type", list(BatchingType))
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
async def test_a01_every_caller_gets_its_own_text(
    tiny_model: TinyModel, oracle: OracleOf, batching_type: BatchingType, scheduler: str
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 5, 40, 17, 33, 2, 70)]
    lengths = [6, 9, 3, 12, 1, 8, 5]
    async with batcher(tiny_model("llama"), batching_type=batching_type, scheduler=scheduler) as bench:
        requests = [{"token_ids": prompt, "max_tokens": n} for prompt, n in zip(prompts, lengths, strict=True)]
        results = await gather(bench, requests)
    for prompt, n, result in zip(prompts, lengths, results, strict=True):
        assert result.token_ids == oracle("llama").generate(prompt, n)
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.completion_tokens == len(result.token_ids)
        ended = result.token_ids[-1] in tiny_model("llama").eos_token_ids
        assert result.finish_reason == ("stop" if ended else "length")


@pytest.mark.trio
async def test_a01_a_stream_joined_is_the_text_and_its_tokens_are_gap_free(tiny_model: TinyModel) -> None:
    tokens: list[Token] = []
    async with batcher(tiny_model("llama")) as bench:
        result = await bench.generate(tokens.append, prompt="The capital", max_tokens=20)
    assert "".join(token.text for token in tokens) == result.text
    assert [token.token_id for token in tokens] == result.token_ids
    assert [token.index for token in tokens] == list(range(len(tokens)))


@pytest.mark.trio
async def test_a04_pool_and_sequences_partition_all_slots_at_every_step(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), n_parallel=3, batch_size=8, batch_timeout=1e6) as bench:
        actor, seen = bench.actor, []

        def check(token: Token) -> None:
            used = set(actor.slots.sequences)
            assert used | actor.slots.seq_pool == {0, 1, 2}
            assert not used & actor.slots.seq_pool
            seen.append(len(used))

        await gather(bench, [{"prompt": f"number {i}", "on_token": check} for i in range(8)])
        assert max(seen) == 3


@pytest.mark.trio
async def test_a05_an_idle_batcher_waits_for_the_timeout_and_no_longer(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    async with batcher(tiny_model("llama"), batch_timeout=20.0) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.generate, None)  # not a request: see below
            nursery.cancel_scope.cancel()
        started: list[float] = []
        async with trio.open_nursery() as nursery:

            def first(token: Token) -> None:
                started.append(trio.current_time())

            nursery.start_soon(lambda: bench.generate(first, prompt="a"))
            await wait_all_tasks_blocked()
            arrived = trio.current_time()
            mock_clock.jump(0.0199)
            await wait_all_tasks_blocked()
            assert bench.actor.stats.steps == 0
            assert len(bench.actor.slots.pending) == 1
            mock_clock.jump(0.0002)
        assert started[0] - arrived == pytest.approx(0.0201)


@pytest.mark.trio
async def test_a05_a_full_batch_starts_at_once(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    async with batcher(tiny_model("llama"), batch_size=3, batch_timeout=1e6) as bench:
        results = await gather(bench, [{"prompt": f"p{i}"} for i in range(3)])
        assert len(results) == 3
        assert bench.actor.stats.scheduled_entries / bench.actor.stats.steps > 1


@pytest.mark.trio
async def test_a05_a_stepping_batcher_admits_at_the_next_tick_without_a_window(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    async with batcher(tiny_model("llama"), batch_size=1, batch_timeout=1e6) as bench:
        late: list[Result] = []
        async with trio.open_nursery() as nursery:

            async def join() -> None:
                late.append(await bench.generate(prompt="late", max_tokens=2))

            def first(token: Token) -> None:
                if token.index == 0:
                    nursery.start_soon(join)

            await bench.generate(first, prompt="early", max_tokens=30, ignore_eos=True)
            assert late, "the late request ended while the early one was still running"


@pytest.mark.trio
async def test_a06_a_cancelled_caller_frees_its_sequence_at_the_next_tick(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    prompt = prompt_of(9, 1)
    async with batcher(tiny_model("llama")) as bench:
        results: list[Result] = []
        widths: dict[int, int] = {}
        async with trio.open_nursery() as nursery:

            def note(token: Token) -> None:
                widths[bench.actor.stats.steps] = len(bench.actor.slots.sequences)

            async def stays() -> None:
                results.append(await bench.generate(note, token_ids=prompt, max_tokens=40, ignore_eos=True))

            nursery.start_soon(stays)
            seen: list[Token] = []
            with trio.CancelScope() as scope:

                def enough(token: Token) -> None:
                    seen.append(token)
                    if token.index == 3:
                        scope.cancel()

                await bench.generate(enough, prompt="goes away", max_tokens=100, ignore_eos=True)
            assert scope.cancelled_caught
            steps = bench.actor.stats.steps
        assert widths.keys() >= {steps, steps + 3}
        assert all(width == 1 for step, width in widths.items() if step > steps + 2)
        assert results[0].token_ids == oracle("llama").generate(prompt, 40) or results[0].usage.completion_tokens == 40
        assert bench.actor.stats.finished["cancelled"] == 1


@pytest.mark.trio
async def test_a06_callers_that_leave_while_waiting_never_run(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), batch_timeout=1e6, batch_size=100) as bench:
        with trio.move_on_after(0.01):
            await bench.generate(prompt="never")
        await wait_all_tasks_blocked()
        assert bench.actor.stats.steps == 0


@pytest.mark.trio
async def test_a06_a_caller_that_leaves_while_its_prompt_is_tokenized_leaves_nothing(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: 0)  # else it is refused before
    async with batcher(tiny_model("llama")) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(prompt="long " * 20_000))
            while not bench.actor.arrivals:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        while bench.actor.arrivals:
            await a_moment()
        with pytest.raises(PromptTooLong):
            await bench.generate(prompt="long " * 20_000)
        assert len((await bench.generate(prompt="short", ignore_eos=True)).token_ids) == 8


@pytest.mark.trio
async def test_a_prompt_that_breaks_the_tokenizer_fails_alone(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batcher(tiny_model("llama")) as bench:
        read = bench.actor.intake.read

        def fragile(wanted: GenerateRequest) -> Prompt:
            if wanted.prompt == "poison":
                raise RuntimeError("no such merge")
            return read(wanted)

        monkeypatch.setattr(bench.actor.intake, "read", fragile)
        with pytest.raises(EngineError, match="no such merge"):
            await bench.generate(prompt="poison")
        assert len((await bench.generate(prompt="fine", ignore_eos=True)).token_ids) == 8


@pytest.mark.trio
async def test_a06_a_deadline_ends_a_request_with_what_it_has(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    def late(token: Token) -> None:
        if token.index == 3:
            mock_clock.jump(6.0)

    async with batcher(tiny_model("llama"), n_ctx=8192, batch_size=1) as bench:
        result = await bench.generate(late, prompt="long", max_tokens=200, ignore_eos=True, deadline_s=5.0)
        assert result.finish_reason == "deadline"
        assert 4 <= len(result.token_ids) < 50


@pytest.mark.trio
async def test_a08_requests_that_share_a_first_message_prefill_it_once(tiny_model: TinyModel) -> None:
    system = Message(role="system", content="You answer in one short sentence, and you are always polite.")
    questions = ["What is it?", "Who are you?", "Where?", "When was that?"]
    model = tiny_model("llama")
    requests = [{"messages": [system, Message(role="user", content=text)]} for text in questions]
    async with batcher(model, n_parallel=4, max_batch_tokens=64) as bench:
        alone = [await bench.generate(**request) for request in requests[:1]]
        together = await gather(bench, requests)
        stats = bench.actor.stats
    assert together[0].token_ids == alone[0].token_ids
    prefix = len(model.tokenizer.template_prefix([{"role": "system", "content": system.content}]))
    assert prefix > 16
    assert [result.usage.cached_tokens >= prefix for result in together] == [True] * 4
    assert stats.shared_tokens == 4 * prefix
    # The prompt that is held begins with the blocks of the request that brought it first.
    begun = (prefix - 1) // 4 * 4
    lengths = [result.usage.prompt_tokens for result in together]
    assert stats.prefilled_tokens <= lengths[0] + (prefix - begun) + sum(length - prefix for length in lengths)


@pytest.mark.trio
async def test_a_prompt_whose_scores_are_wanted_shares_nothing(tiny_model: TinyModel) -> None:
    """Each of its positions is evaluated, whatever is held of it."""
    system = Message(role="system", content="You answer in one short sentence, and you are always polite.")
    scored = {"messages": [system, Message(role="user", content="Where?")], "prompt_logprobs": 0}
    async with batcher(tiny_model("llama"), batch_size=1) as bench:
        alone = await bench.generate(**scored)
        for question in ("one", "two", "three"):
            shared = await bench.generate(messages=[system, Message(role="user", content=question)])
        assert shared.usage.cached_tokens > 0
        result = await bench.generate(**scored)
    assert (result.usage.cached_tokens, result.token_ids) == (0, alone.token_ids)
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == result.usage.prompt_tokens
    assert [one and one.token_id for one in result.prompt_logprobs] == [
        one and one.token_id for one in alone.prompt_logprobs or ()
    ]
    assert [one.logprob for one in result.prompt_logprobs[1:] if one] == pytest.approx(
        [one.logprob for one in (alone.prompt_logprobs or ())[1:] if one], abs=1e-4
    )


@pytest.mark.trio
async def test_a_held_prompt_that_is_shared_again_is_the_last_to_make_room(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    def asks(system: str, question: str) -> dict[str, Any]:
        return {"messages": [Message(role="system", content=system), Message(role="user", content=question)]}

    async with batcher(tiny_model("llama"), max_held_prompts=2, batch_size=1) as bench:
        for system in ("You are brief and kind.", "You sing every answer."):
            for question in ("one", "two", "three"):
                await bench.generate(**asks(system, question))
        first, second = bench.actor.held
        mock_clock.jump(5.0)
        await bench.generate(**asks("You are brief and kind.", "four"))
        assert bench.actor.held.droppable() == [second, first]


@pytest.mark.trio
async def test_a_step_without_blocks_pauses_the_newest(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batcher(tiny_model("llama"), async_batching=False, batch_size=2) as bench:
        evaluate, paused, pause = bench.actor.stepper.evaluate, [], bench.actor.slots.pause
        numbers: list[int] = []

        def fail_once(batch: Any, copies: Any) -> Any:
            if len(batch) == 2 and len(batch[0].entry.tokens) == 1 and not paused:
                paused.extend(sequence.arrival for sequence in bench.actor.slots.sequences.values())
                raise OutOfBlocks(1, 0)
            return evaluate(batch, copies)

        def note(owner: Any) -> None:
            numbers.append(owner.arrival)
            pause(owner)

        monkeypatch.setattr(bench.actor.stepper, "evaluate", fail_once)
        monkeypatch.setattr(bench.actor.slots, "pause", note)
        await gather(bench, [{"prompt": "abc"}, {"prompt": "abd"}])
        assert len(paused) == 2 and numbers == [max(paused)]


@pytest.mark.trio
async def test_tenants_do_not_find_each_others_prompts(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        for tenant, cached in (("alice", 0), ("bob", 0), ("alice", 16)):
            result = await bench.generate(token_ids=prompt_of(20, 1), tenant=tenant)
            assert result.usage.cached_tokens == cached


@pytest.mark.trio
async def test_a08_a_configured_system_prompt_is_held_from_the_start(tiny_model: TinyModel) -> None:
    content = "You answer in one short sentence, and you are always polite."
    messages = [Message(role="system", content=content), Message(role="user", content="Who are you?")]
    model = tiny_model("llama")
    async with batcher(model) as plain:
        expected = await plain.generate(messages=messages)
    async with batcher(model, system_prompts=[content]) as bench:
        result = await bench.generate(messages=messages)
        prefix = len(model.tokenizer.template_prefix([{"role": "system", "content": content}]))
        assert result.usage.cached_tokens == prefix
        assert bench.actor.stats.prefilled_tokens == result.usage.prompt_tokens - prefix
    assert result.token_ids == expected.token_ids


@pytest.mark.trio
async def test_a10_the_event_loop_goes_on_during_a_forward(tiny_model: TinyModel) -> None:
    turned, went_on = threading.Event(), []
    async with batcher(tiny_model("llama")) as bench:
        evaluate = bench.actor.stepper.evaluate

        def held_up(batch: Any, copies: Any) -> Any:
            went_on.append(turned.wait(60))
            return evaluate(batch, copies)

        bench.actor.stepper.evaluate = held_up  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(prompt="work", max_tokens=2, ignore_eos=True))
            while not bench.actor._stepping:
                await trio.lowlevel.checkpoint()
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            turned.set()
    assert went_on and all(went_on)


@pytest.mark.trio
async def test_a11_more_sequences_need_no_more_steps(tiny_model: TinyModel) -> None:
    """What makes the total rise with the sequences; the benchmark `throughput.py` has the figures."""
    steps = {}
    for count in (1, 8, 16):
        async with batcher(tiny_model("llama"), n_parallel=16, batch_size=count, batch_timeout=1e6) as bench:
            await gather(bench, [{"token_ids": [5, i + 3], "max_tokens": 12, "ignore_eos": True} for i in range(count)])
            steps[count] = bench.actor.stats.steps
            assert bench.actor.stats.generation_tokens == 12 * count
    assert steps == {1: 12, 8: 12, 16: 12}


@pytest.mark.trio
async def test_a_batcher_whose_context_does_not_open_leaves_no_thread() -> None:
    def fails() -> Context:
        raise ValueError("no memory")

    before = set(threading.enumerate())  # of which those may end that trio keeps for a while
    async with trio.open_nursery() as nursery:
        with pytest.raises(ValueError, match="no memory"):
            await start(nursery, Batcher(fails))
    assert set(threading.enumerate()) <= before


@pytest.mark.trio
async def test_a12_one_thread_touches_the_model(tiny_model: TinyModel) -> None:
    threads: set[str] = set()

    class Spy(TorchRunner):
        def forward(self, batch: Any) -> torch.Tensor:
            threads.add(threading.current_thread().name)
            return super().forward(batch)

    model = tiny_model("llama")
    async with trio.open_nursery() as nursery:
        actor = Batcher(lambda: Context(model, Spy(model), n_ctx=256, n_parallel=8, n_held=4), BatcherOptions())
        bench = Bench(actor, await start(nursery, actor))
        await gather(bench, [{"prompt": f"p{i}"} for i in range(10)])
        await bench.ref.stop()
    assert threads == {"genbatch-model"}


@pytest.mark.trio
async def test_a12_a_batcher_that_crashes_is_restarted_and_serves_again(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    model, made = tiny_model("llama"), []

    def make() -> Batcher:
        actor = Batcher(lambda: Context(model, TorchRunner(model), n_ctx=256, n_parallel=8, n_held=4))
        made.append(actor)
        return actor

    supervisor = Supervisor([ChildSpec("batcher", make)])
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        ref = supervisor.registry.ref("batcher")

        def crash(token: Token) -> None:
            if token.index == 2:
                ref.info(object(), control=True)
                made[0].stepper.take = None  # type: ignore[method-assign,assignment]

        with pytest.raises(Unavailable):
            await ref.call(Generate(GenerateRequest(prompt="x", max_tokens=50), crash), timeout=None)
        while supervisor.registry.whereis("batcher") is None:
            await a_moment()
        prompt = prompt_of(5, 5)
        result = await ref.call(Generate(GenerateRequest(token_ids=prompt, max_tokens=6)), timeout=None)
        assert result.token_ids == oracle("llama").generate(prompt, 6)
        assert len(made) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_h01_a_request_goes_through_the_four_phases_in_order(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), max_batch_tokens=8, async_batching=False) as bench:
        phases: list[Phase] = []
        actor = bench.actor
        book = actor.commit.book

        def watch(planned: Any, evaluated: Any) -> None:
            phases.append(planned.owner.phase)
            book(planned, evaluated)
            phases.append(planned.owner.phase)

        actor.commit.book = watch  # type: ignore[method-assign]
        await bench.generate(token_ids=prompt_of(20, 1), max_tokens=3, ignore_eos=True)
    names = [phase.name for phase in dict.fromkeys(phases)]
    assert names == ["PREFILLING", "DECODING", "FINISHED"]


@pytest.mark.trio
async def test_h02_decodes_go_on_between_the_chunks_of_a_long_prompt(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), max_batch_tokens=8, n_ctx=1024) as bench:
        actor, mixed = bench.actor, 0
        evaluate = actor.stepper.evaluate

        def watch(batch: Any, copies: Any) -> Any:
            nonlocal mixed
            sizes = sorted(len(planned.entry.tokens) for planned in batch)
            assert sum(sizes) <= 8
            mixed += len(sizes) == 2 and sizes == [1, 7]
            return evaluate(batch, copies)

        actor.stepper.evaluate = watch  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            def first(token: Token) -> None:
                if token.index == 0:
                    nursery.start_soon(lambda: bench.generate(token_ids=prompt_of(63, 3), max_tokens=1))

            await bench.generate(first, prompt="decode", max_tokens=40, ignore_eos=True)
        assert mixed >= 8


@pytest.mark.trio
@pytest.mark.parametrize("policy", list(SchedulerPolicy))
async def test_a_cache_too_small_for_all_gives_the_same_texts(
    tiny_model: TinyModel, oracle: OracleOf, policy: SchedulerPolicy
) -> None:
    prompts = [prompt_of(9, seed) for seed in range(6)]
    together: dict[str, Any] = {"batch_size": len(prompts), "batch_timeout": 1e6}
    async with batcher(tiny_model("llama"), n_ctx=64, scheduler_policy=policy, **together) as bench:
        results = await gather(
            bench, [{"token_ids": prompt, "max_tokens": 30, "ignore_eos": True, "seed": 1} for prompt in prompts]
        )
        pauses = bench.actor.stats.preemptions
    for prompt, result in zip(prompts, results, strict=True):
        expected = oracle("llama").generate(prompt, 30)
        assert result.token_ids[: len(expected)] == expected
        assert len(result.token_ids) == 30
    assert (pauses > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION)


@pytest.mark.trio
async def test_h13_the_order_oldest_resets_the_oldest_and_gives_the_same_texts(
    tiny_model: TinyModel, oracle: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[tuple[int, list[int]]] = []
    pause = Slots.pause

    def watched(slots: Slots, sequence: Sequence) -> None:
        paused.append((sequence.request_id, sorted(one.request_id for one in slots.sequences.values())))
        pause(slots, sequence)

    monkeypatch.setattr(Slots, "pause", watched)
    prompts = [prompt_of(9, seed) for seed in range(6)]
    async with batcher(
        tiny_model("llama"), n_ctx=64, pause_order=PauseOrder.OLDEST, batch_size=6, batch_timeout=1e6
    ) as bench:
        results = await gather(bench, [{"token_ids": each, "max_tokens": 30, "ignore_eos": True} for each in prompts])
    first, running = paused[0]
    assert first == running[0] and len(running) > 1
    for prompt, result in zip(prompts, results, strict=True):
        expected = oracle("llama").generate(prompt, 30)
        assert result.token_ids[: len(expected)] == expected and len(result.token_ids) == 30


@pytest.mark.trio
async def test_seeded_draws_do_not_depend_on_company_or_pauses(tiny_model: TinyModel) -> None:
    request = {"token_ids": prompt_of(9, 1), "max_tokens": 25, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    async with batcher(tiny_model("llama")) as bench:
        alone = await bench.generate(**request)
    others = [{**request, "token_ids": prompt_of(12, i), "seed": i} for i in range(2, 7)]
    async with batcher(tiny_model("llama"), n_ctx=64, batch_size=6, batch_timeout=1e6) as bench:
        crowded = await gather(bench, [*others[:3], request, *others[3:]])
        assert bench.actor.stats.preemptions > 0
    assert crowded[3].token_ids == alone.token_ids


@pytest.mark.trio
async def test_h16_a_paused_sequence_whose_kv_was_kept_goes_on_without_prefill(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    prompts = [prompt_of(9, seed) for seed in range(6)]
    requests = [{"token_ids": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
    together: dict[str, Any] = {"batch_size": len(prompts), "batch_timeout": 1e6}
    async with batcher(tiny_model("llama"), n_ctx=64, cpu_offload_space=0.01, **together) as bench:
        results = await gather(bench, requests)
        stats = bench.actor.stats
        assert stats.swaps == stats.preemptions > 0
        assert stats.prefilled_tokens + stats.reused_tokens == sum(map(len, prompts))
        assert bench.actor.swap.bytes_used == 0
    for prompt, result in zip(prompts, results, strict=True):
        expected = oracle("llama").generate(prompt, 30)
        assert result.token_ids[: len(expected)] == expected


@pytest.mark.trio
async def test_h16_a_choice_whose_kv_was_kept_comes_back_without_the_one_whose_prompt_it_shared(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[tuple[int, bool]] = []
    pause = Slots.pause

    def note(slots: Slots, owner: LlmRequest) -> None:
        pause(slots, owner)
        assert isinstance(owner, Sequence)
        paused.append((owner.choice, owner.donor is None and not owner.waits_for_donor))

    monkeypatch.setattr(Slots, "pause", note)
    together: dict[str, Any] = {"batch_size": 4, "batch_timeout": 1e6, "cpu_offload_space": 0.01}
    async with batcher(tiny_model("llama"), n_ctx=64, **together) as bench:
        asked = {"max_tokens": 30, "ignore_eos": True, "n": 2}
        results = await gather(bench, [{"token_ids": prompt_of(9, seed), **asked} for seed in (1, 2)])
    assert (1, True) in paused and all(is_free for _, is_free in paused), paused
    assert all(one.choices[0].token_ids == one.choices[1].token_ids for one in results)


@pytest.mark.trio
async def test_h16_a_full_host_pool_falls_back_to_a_soft_reset(tiny_model: TinyModel, oracle: OracleOf) -> None:
    prompts = [prompt_of(9, seed) for seed in range(6)]
    requests = [{"token_ids": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
    one_sequence = 12 * 4 * 4 * 2 * 2 * 8 * 4 / 2**30  # twelve blocks of four positions, in GiB
    together: dict[str, Any] = {"batch_size": len(prompts), "batch_timeout": 1e6}
    async with batcher(tiny_model("llama"), n_ctx=64, cpu_offload_space=one_sequence, **together) as bench:
        results = await gather(bench, requests)
        assert 0 < bench.actor.stats.swaps < bench.actor.stats.preemptions
    for prompt, result in zip(prompts, results, strict=True):
        expected = oracle("llama").generate(prompt, 30)
        assert result.token_ids[: len(expected)] == expected


@pytest.mark.trio
async def test_n_answers_share_their_prompt_and_draw_apart(tiny_model: TinyModel) -> None:
    prompt = prompt_of(20, 2)
    async with batcher(tiny_model("llama")) as bench:
        result = await bench.generate(token_ids=prompt, n=3, temperature=1.0, seed=5, ignore_eos=True)
        assert bench.actor.stats.shared_tokens == 2 * 19
        singles = [
            await bench.generate(token_ids=prompt, temperature=1.0, seed=5 + i, ignore_eos=True) for i in range(3)
        ]
    assert [choice.token_ids for choice in result.choices] == [single.token_ids for single in singles]
    assert result.usage.completion_tokens == 24


@pytest.mark.trio
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("length", [28, 29, 30, 31])  # for one of them, the window has left a block behind by then
async def test_answers_share_a_prompt_as_far_as_a_sliding_window_allows(
    tiny_model: TinyModel, family: str, length: int
) -> None:
    prompt = prompt_of(length, 2)
    async with batcher(tiny_model(family), n_parallel=2) as bench:
        result = await bench.generate(token_ids=prompt, n=2)
        single = await bench.generate(token_ids=prompt)
    assert [choice.token_ids for choice in result.choices] == [single.token_ids] * 2


@pytest.mark.trio
async def test_prompt_logprobs_echo_and_logprobs_agree_with_a_plain_forward(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    prompt = prompt_of(40, 6)
    async with batcher(tiny_model("llama"), max_batch_tokens=16) as bench:
        result = await bench.generate(
            token_ids=prompt, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=1, echo=True
        )
    tokens = prompt + result.token_ids
    expected = oracle("llama").log_probs(tokens)
    scores = [*(result.prompt_logprobs or [])[1:], *(result.logprobs or [])]
    assert len(scores) == len(tokens) - 1
    for position, score in enumerate(scores):
        assert score is not None
        assert score.token_id == tokens[position + 1]
        assert score.logprob == pytest.approx(float(expected[position, score.token_id]), abs=1e-4)
    assert result.text.startswith(tiny_model("llama").tokenizer.decode(prompt))


@pytest.mark.trio
async def test_a_prompt_of_one_token_has_log_probs_of_which_nothing_is_known(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        result = await bench.generate(token_ids=[5], max_tokens=2, prompt_logprobs=2, logprobs=1)
        assert result.prompt_logprobs == [None]
        assert (await bench.generate(token_ids=[5], max_tokens=2)).prompt_logprobs is None


@pytest.mark.trio
async def test_a_deadline_shows_what_was_held_back_but_to_a_stream(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    """The stop string that it might have become will not be complete; a stream has no token to show it with."""
    async with batcher(tiny_model("llama"), async_batching=False, batch_size=2) as bench:
        plain = {"prompt": "abc", "max_tokens": 9, "ignore_eos": True}
        [whole, _] = await gather(bench, [plain, plain])
        shown: list[str] = []

        def late(token: Token) -> None:
            shown.append(token.text)
            if token.index == 8:
                mock_clock.jump(5.0)

        held = {**plain, "max_tokens": 30, "stop": [whole.text[-3:] + "never"], "deadline_s": 1.0, "echo": True}
        [result, streamed] = await gather(bench, [held, {**held, "on_token": late}])
        assert (result.finish_reason, result.token_ids, result.text) == (
            "deadline",
            whole.token_ids,
            "abc" + whole.text,
        )
        assert (streamed.finish_reason, streamed.token_ids) == ("deadline", whole.token_ids)
        assert streamed.text == "".join(shown) == "abc" + whole.text[:-3]


@pytest.mark.trio
async def test_a_stop_string_ends_the_text_before_it(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        whole = await bench.generate(prompt="abc", max_tokens=30, ignore_eos=True)
        stop = whole.text[7:9]
        cut = whole.text.index(stop)
        tokens: list[Token] = []
        result = await bench.generate(tokens.append, prompt="abc", max_tokens=30, ignore_eos=True, stop=[stop])
    assert result.text == whole.text[:cut]
    assert "".join(token.text for token in tokens) == result.text
    assert result.finish_reason == "stop"


BAD_REQUESTS: list[tuple[dict[str, Any], type[GenbatchError], str | None]] = [
    ({"prompt": ""}, InvalidRequest, "prompt"),
    ({"token_ids": []}, InvalidRequest, "token_ids"),
    ({}, InvalidRequest, "prompt"),
    ({"prompt": "a", "token_ids": [5]}, InvalidRequest, "prompt"),
    ({"token_ids": [5, 320]}, InvalidRequest, "token_ids[1]"),
    ({"token_ids": [-1]}, InvalidRequest, "token_ids[0]"),
    ({"token_ids": [5] * 256}, PromptTooLong, "token_ids"),
    ({"token_ids": [5] * 9000}, PromptTooLong, "token_ids"),
    ({"prompt": "a", "max_tokens": 0}, InvalidRequest, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**6}, InvalidRequest, "max_tokens"),
    ({"prompt": "a", "temperature": -0.5}, InvalidRequest, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, InvalidRequest, "temperature"),
    ({"prompt": "a", "temperature": True}, InvalidRequest, "temperature"),
    ({"prompt": "a", "top_p": 0.0}, InvalidRequest, "top_p"),
    ({"prompt": "a", "top_k": -1}, InvalidRequest, "top_k"),
    ({"prompt": "a", "stop": [""]}, InvalidRequest, "stop[0]"),
    ({"prompt": "a", "stop_token_ids": [400]}, InvalidRequest, "stop_token_ids[0]"),
    ({"prompt": "a", "logit_bias": {400: 1.0}}, InvalidRequest, "logit_bias[400]"),
    ({"prompt": "a", "n": 99}, InvalidRequest, "n"),
    ({"prompt": "a", "logprobs": 10**6}, InvalidRequest, "logprobs"),
    ({"messages": [Message(role="", content="x")]}, InvalidRequest, "messages[0].role"),
]


@pytest.mark.trio
async def test_bad_requests_get_typed_errors_and_the_others_do_not_notice(tiny_model: TinyModel) -> None:
    good = [{"token_ids": prompt_of(9, seed), "max_tokens": 12} for seed in range(4)]
    async with batcher(tiny_model("llama")) as bench:
        expected = [result.token_ids for result in await gather(bench, good)]
    async with batcher(tiny_model("llama")) as bench:

        async def bad(params: dict[str, Any], error: type[GenbatchError], field: str | None) -> None:
            with pytest.raises(error) as caught:
                await bench.generate(**params)
            assert type(caught.value) is error
            assert caught.value.field == field

        async with trio.open_nursery() as nursery:
            for params, error, field in BAD_REQUESTS:
                nursery.start_soon(bad, params, error, field)
            results = await gather(bench, good)
        assert [result.token_ids for result in results] == expected
        assert bench.actor.stats.refused == len(BAD_REQUESTS)


@pytest.mark.trio
async def test_a_full_queue_refuses_with_a_retry_hint(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), n_parallel=1, max_queue=2, batch_timeout=1e6, batch_size=99) as bench:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lambda: bench.generate(prompt="waits"))
            await wait_all_tasks_blocked()
            with pytest.raises(QueueFull) as caught:
                await bench.generate(prompt="too many")
            assert (caught.value.retry_after_ms or 0) > 0
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()


@pytest.mark.trio
async def test_a_step_that_fails_for_one_request_fails_that_request_alone(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    """The forward raises whenever the poisoned sequence is in it: its neighbours must come through unharmed."""
    model = tiny_model("llama")
    prompts = [[5 + i, 6, 7 + i] for i in range(3)]
    expected = [oracle("llama").generate(prompt, 8) for prompt in prompts]
    poison = next(
        token for token in range(3, 320) if not any(token in [*p, *e] for p, e in zip(prompts, expected, strict=True))
    )

    class Poisoned(TorchRunner):
        def forward(self, batch: Any) -> torch.Tensor:
            if poison in batch.input_ids.tolist():
                raise RuntimeError("illegal instruction")
            return super().forward(batch)

    options = BatcherOptions(n_parallel=4, batch_size=4, batch_timeout=1e6)
    async with trio.open_nursery() as nursery:
        actor = Batcher(lambda: Context(model, Poisoned(model), n_ctx=256, n_parallel=4, n_held=4), options)
        bench = Bench(actor, await start(nursery, actor))

        async def poisoned() -> None:
            with pytest.raises(EngineError, match="illegal instruction"):
                await bench.generate(token_ids=[4, poison, 4])

        async with trio.open_nursery() as callers:
            callers.start_soon(poisoned)
            results = await gather(bench, [{"token_ids": prompt} for prompt in prompts])
        assert [result.token_ids for result in results] == expected
        bench.assert_idle()
        await bench.ref.stop()


@pytest.mark.trio
async def test_a_row_of_nan_fails_its_request_alone(tiny_model: TinyModel, oracle: OracleOf) -> None:
    model = tiny_model("llama")

    class Broken(TorchRunner):
        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch).clone()
            starts = batch.query_starts.tolist()
            for row, token in enumerate(batch.logit_rows.tolist()):
                owner = max(i for i, start in enumerate(starts) if start <= token)
                if int(batch.kv_lens[owner]) == 12:
                    logits[row] = float("nan")
            return logits

    prompt = [9, 8, 7]
    async with trio.open_nursery() as nursery:
        actor = Batcher(
            lambda: Context(model, Broken(model), n_ctx=256, n_parallel=4, n_held=4),
            BatcherOptions(n_parallel=4, batch_size=2, batch_timeout=1e6),
        )
        bench = Bench(actor, await start(nursery, actor))

        async def broken() -> None:
            with pytest.raises(EngineError, match="not finite"):
                await bench.generate(token_ids=[9] * 12)

        async with trio.open_nursery() as callers:
            callers.start_soon(broken)
            result = await bench.generate(token_ids=prompt)
        assert result.token_ids == oracle("llama").generate(prompt, 8)
        bench.assert_idle()
        await bench.ref.stop()


@pytest.mark.trio
async def test_an_on_token_that_raises_ends_its_own_request_only(tiny_model: TinyModel) -> None:
    def fails(token: Token) -> None:
        raise ZeroDivisionError

    async with batcher(tiny_model("llama"), batch_size=2, batch_timeout=1e6) as bench:

        async def bad() -> None:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await bench.generate(fails, prompt="a")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bad)
            result = await bench.generate(prompt="b")
        assert len(result.token_ids) > 0


@pytest.mark.trio
async def test_a_request_of_several_answers_fails_once_and_alone(tiny_model: TinyModel) -> None:
    """All its sequences are in the step in which one of them ends the request."""

    failures = 0

    def fails(token: Token) -> None:
        nonlocal failures
        if failures or token.index == 3:
            failures += 1
            raise ZeroDivisionError

    async with batcher(tiny_model("llama"), batch_size=4, batch_timeout=1e6) as bench:

        async def bad() -> None:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await bench.generate(fails, prompt="a", n=3, temperature=1.0, ignore_eos=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bad)
            result = await bench.generate(prompt="b", ignore_eos=True)
        assert len(result.token_ids) == 8
        assert bench.actor.stats.finished == {"error": 1, "length": 1}
    assert failures == 1


@pytest.mark.trio
async def test_an_idle_batcher_notices_a_block_that_nobody_holds_without_going_through_all(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a million positions going through them takes as long as several steps."""
    monkeypatch.setattr(KVCache, "check_integrity", lambda _kv: pytest.fail("every block is looked at"))
    model = tiny_model("llama")
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="blocks are used with nobody there")):
        async with trio.open_nursery() as nursery:
            actor = Batcher(lambda: Context(model, TorchRunner(model), n_ctx=256, n_parallel=8, n_held=4))
            bench = Bench(actor, await start(nursery, actor))
            system = Message(role="system", content="You answer in one short sentence, and you are always polite.")
            for question in ("one", "two", "three"):
                await bench.generate(messages=[system, Message(role="user", content=question)])
            assert len(actor.held) == 1 and actor.ctx.kv.counts().used > 0, "what is held belongs there"
            actor.ctx.kv.reserve([(7, [5, 6], 0)]).commit()
            with pytest.raises(ActorDown):
                await bench.generate(prompt="a")
                await bench.generate(prompt="a")


@pytest.mark.trio
async def test_stats_are_plain_data_and_answered_while_stepping(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        await bench.generate(prompt="a", max_tokens=5, ignore_eos=True)
        stats = await bench.ref.call(GetStats())
        assert stats["generation_tokens"] == 5
        assert stats["kv_blocks_free"] + stats["kv_blocks_used"] == stats["kv_blocks_max"]
        assert stats["finished"] == {"length": 1}


@pytest.mark.trio
async def test_stopping_answers_everybody(tiny_model: TinyModel) -> None:
    errors: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        model = tiny_model("llama")
        actor = Batcher(lambda: Context(model, TorchRunner(model), n_ctx=512, n_parallel=8, n_held=4))
        ref = await start(nursery, actor)

        async def caller() -> None:
            try:
                await Bench(actor, ref).generate(prompt="x", max_tokens=200, ignore_eos=True)
            except GenbatchError as error:
                errors.append(error)

        async with trio.open_nursery() as callers:
            for _ in range(12):
                callers.start_soon(caller)
            while actor.stats.steps < 3:
                await a_moment()
            await ref.stop()
    assert [type(error).__name__ for error in errors] == ["Unavailable"] * 12
