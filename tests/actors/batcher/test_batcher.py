"""The Batcher over a real (tiny) model: when requests start, what they share, and that nothing leaks."""

import threading
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Prompt
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor
from genbatch.actors.scheduling.plan import BatchingType, StepWork
from genbatch.actors.scheduling.request import Phase
from genbatch.nif.context import Context
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.runner import Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.text.tokenizer import ChatPrompt, Tokenizer
from genbatch.proto.errors import EngineError, PromptTooLong, Unavailable
from genbatch.proto.messages import GenerateRequest, Message, Result, Token
from tests.actors.batcher.bench import Bench, OracleOf, TinyModel, batcher, gather, prompt_of
from tests.waiting import a_moment


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


async def steps_after(bench: Bench, mock_clock: MockClock, seconds: float) -> int:
    """How many steps there were when so much time had passed."""
    await wait_all_tasks_blocked()
    mock_clock.jump(seconds)
    await wait_all_tasks_blocked()
    return bench.actor.stats.steps + bench.actor._stepping


@pytest.mark.trio
async def test_an_idle_batcher_lets_a_lone_caller_wait_for_two_milliseconds(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    async with batcher(tiny_model("llama"), batch_timeout=None) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.generate(prompt="a"))
        assert await steps_after(bench, mock_clock, 0.0019) == 0
        assert await steps_after(bench, mock_clock, 0.0002) > 0


@pytest.mark.trio
async def test_an_idle_batcher_waits_for_others_a_tenth_of_a_short_step(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    async with batcher(tiny_model("llama"), batch_timeout=None) as bench, trio.open_nursery() as nursery:
        bench.actor.times.took(StepWork(prompts=1, prefill=1), 0.005)  # so a token or two take five milliseconds
        nursery.start_soon(lambda: bench.generate(prompt="a"))
        assert await steps_after(bench, mock_clock, 0.0004) == 0
        assert await steps_after(bench, mock_clock, 0.0004) > 0


@pytest.mark.trio
async def test_a_burst_of_long_steps_shares_its_first_forward(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    async with batcher(tiny_model("llama"), n_parallel=8, batch_timeout=None) as bench:
        bench.actor.times.took(StepWork(prompts=1, prefill=1), 0.1)
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(lambda number: bench.generate(prompt=f"p{number}", max_tokens=1), number)
                assert await steps_after(bench, mock_clock, 0.0015) == 0
            mock_clock.jump(0.001)
        assert (bench.actor.stats.steps, bench.actor.stats.scheduled_entries) == (1, 5)


@pytest.mark.trio
async def test_a_burst_shares_its_first_forward(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    async with batcher(tiny_model("llama"), n_parallel=8, batch_timeout=None) as bench:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(lambda number: bench.generate(prompt=f"p{number}", max_tokens=1), number)
                assert await steps_after(bench, mock_clock, 0.0015) == 0
            mock_clock.jump(0.001)
        assert (bench.actor.stats.steps, bench.actor.stats.scheduled_entries) == (1, 5)


@pytest.mark.trio
async def test_a_prompt_that_a_thread_still_tokenizes_keeps_the_window_open(
    tiny_model: TinyModel, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests share the first forward, though the tokenizer takes longer than `batch_quiet`."""
    is_quiet = threading.Event()
    async with batcher(tiny_model("llama"), batch_timeout=None) as bench:
        encode = Tokenizer.encode

        def slow_encode(self: Any, text: str, *args: Any, **options: Any) -> Any:
            if text.startswith("long"):
                assert is_quiet.wait(10)
            return encode(self, text, *args, **options)

        monkeypatch.setattr(Tokenizer, "encode", slow_encode)
        monkeypatch.setattr(bench.actor.arrivals._reader, "_inline_chars", 3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(prompt="a", max_tokens=1))
            nursery.start_soon(lambda: bench.generate(prompt="long", max_tokens=1))
            assert await steps_after(bench, mock_clock, 0.003) == 0
            is_quiet.set()
            while len(bench.actor.slots.pending) < 2:
                await wait_all_tasks_blocked()
            mock_clock.jump(0.003)
        assert (bench.actor.stats.steps, bench.actor.stats.scheduled_entries) == (1, 2)


@pytest.mark.trio
@pytest.mark.parametrize("callers", [1, 2])
async def test_the_time_of_a_long_rendering_is_part_of_the_wait(
    tiny_model: TinyModel, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch, callers: int
) -> None:
    """A short step that others could share does not wait any more, and those who came meanwhile share it."""
    async with batcher(tiny_model("llama"), batch_timeout=None) as bench, trio.open_nursery() as nursery:
        bench.actor.times.took(StepWork(prompts=1, prefill=1), 0.005)
        encode = Tokenizer.encode

        def slow_encode(self: Any, text: str, *args: Any, **options: Any) -> Any:
            mock_clock.jump(0.001)  # the event loop stands still
            return encode(self, text, *args, **options)

        monkeypatch.setattr(Tokenizer, "encode", slow_encode)
        for _ in range(callers):
            nursery.start_soon(lambda: bench.generate(prompt="a", max_tokens=1))
        assert await steps_after(bench, mock_clock, 0.0) > 0
        while bench.actor.stats.steps == 0:
            await wait_all_tasks_blocked()
        assert (bench.actor.stats.steps, bench.actor.stats.scheduled_entries) == (1, callers)


@pytest.mark.trio
async def test_a_caller_that_the_tokenizer_kept_long_waits_no_longer_for_others(
    tiny_model: TinyModel, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_quiet = threading.Event()
    async with batcher(tiny_model("llama"), batch_timeout=None) as bench, trio.open_nursery() as nursery:
        encode = Tokenizer.encode

        def slow_encode(self: Any, text: str, *args: Any, **options: Any) -> Any:
            assert is_quiet.wait(10)
            return encode(self, text, *args, **options)

        monkeypatch.setattr(Tokenizer, "encode", slow_encode)
        monkeypatch.setattr(bench.actor.arrivals._reader, "_inline_chars", 3)
        nursery.start_soon(lambda: bench.generate(prompt="long", max_tokens=1))
        assert await steps_after(bench, mock_clock, 0.003) == 0
        is_quiet.set()
        while not bench.actor.slots.pending:
            await wait_all_tasks_blocked()
        assert await steps_after(bench, mock_clock, 0.00001) > 0


@pytest.mark.trio
async def test_callers_that_go_on_coming_keep_nobody_waiting_for_longer_than_the_window(
    tiny_model: TinyModel, mock_clock: MockClock
) -> None:
    async with batcher(tiny_model("llama"), n_parallel=32, batch_timeout=None) as bench:
        async with trio.open_nursery() as nursery:
            steps = []
            for number in range(20):
                nursery.start_soon(lambda number: bench.generate(prompt=f"p{number}", max_tokens=1), number)
                steps.append(await steps_after(bench, mock_clock, 0.0015))
            mock_clock.jump(0.1)
        assert steps.index(next(filter(None, steps))) == 13  # after 14 times 1.5 ms


@pytest.mark.trio
async def test_a_first_token_is_read_before_the_next_step_begins(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a step take all cores: a task that is to send the token would wait for one."""
    async with batcher(tiny_model("llama")) as bench, trio.open_nursery() as nursery:
        told = trio.Event()
        order: list[str] = []
        begin = bench.actor.stepper.begin

        def noted(*args: Any, **options: Any) -> None:
            order.append("begin")
            begin(*args, **options)

        async def read() -> None:
            await told.wait()
            order.append("read")

        monkeypatch.setattr(bench.actor.stepper, "begin", noted)
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        await bench.generate(lambda _: told.set(), prompt="a", max_tokens=3)
    assert order == ["begin", "read", "begin"]


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

        def fragile(wanted: GenerateRequest, prompt: ChatPrompt | None) -> Prompt:
            if wanted.prompt == "poison":
                raise RuntimeError("no such merge")
            return read(wanted, prompt)

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
    # Every prompt token was shared, found or computed, and so was the prompt that is held.
    asked = sum(result.usage.prompt_tokens for result in (*alone, *together)) + prefix
    assert stats.shared_tokens + stats.reused_tokens + stats.prefilled_tokens == asked
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
        first, second = bench.actor.held_prompts
        mock_clock.jump(5.0)
        await bench.generate(**asks("You are brief and kind.", "four"))
        assert bench.actor.held_prompts.droppable() == [second, first]


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
        for tenant, cached in (("alice", 0), ("bob", 0), ("alice", 19)):
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
        def forward(self, batch: Any) -> Rows:
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
