"""What callers of a Batcher get: the same texts under every pressure, typed errors, faults that stay with their own."""

from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.slots import Slots
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.errors import ActorDown
from genbatch.actors.scheduling.request import LlmRequest
from genbatch.actors.scheduling.scheduler import PauseOrder, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Rows, host_copy
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, PromptTooLong, QueueFull
from genbatch.proto.messages import GenerateRequest, Message, Result, Token
from genbatch.proto.service_messages import StatsRequest
from genbatch.proto.validation import RequestLimits
from tests.actors.batcher.bench import Bench, OracleOf, TinyModel, batcher, gather, prompt_of
from tests.waiting import a_moment


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
        paused.append((owner.choice, owner.donor is None and not owner.waits_for_others))

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
    assert all([choice.token_ids for choice in single.choices] == [single.token_ids] for single in singles)
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
async def test_a_prompt_is_scored_without_a_token_behind_it(tiny_model: TinyModel) -> None:
    asked = {"token_ids": prompt_of(40, 6), "prompt_logprobs": 2, "echo": True}
    async with batcher(tiny_model("llama"), max_batch_tokens=16) as bench:
        one = await bench.generate(**asked, max_tokens=1)
        tokens: list[Token] = []
        none = await bench.generate(tokens.append, **asked, max_tokens=0, n=2)
        for choice in none.choices:
            assert (choice.token_ids, choice.finish_reason) == ([], "length")
            assert choice.text == tiny_model("llama").tokenizer.decode(asked["token_ids"])
        assert (none.prompt_logprobs, tokens, none.usage.completion_tokens) == (one.prompt_logprobs, [], 0)
        for nothing in ({"token_ids": [5]}, {"token_ids": [5], "logprobs": 1}):
            with pytest.raises(InvalidRequest) as caught:
                await bench.generate(**nothing, max_tokens=0)
            assert caught.value.field == "max_tokens"


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
    ({"prompt": "a", "temperature": -0.5}, InvalidRequest, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, InvalidRequest, "temperature"),
    ({"prompt": "a", "temperature": True}, InvalidRequest, "temperature"),
    ({"prompt": "a", "top_p": -0.1}, InvalidRequest, "top_p"),
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
async def test_an_answer_that_does_not_fit_is_cut_to_the_room_that_is_left(tiny_model: TinyModel) -> None:
    prompt = prompt_of(200, 1)
    async with batcher(tiny_model("llama")) as bench:
        unlimited = await bench.generate(token_ids=prompt, ignore_eos=True, max_tokens=None)
        assert len(prompt) + len(unlimited.token_ids) == 256
        for max_tokens in (57, 32000, 2**31 - 1):
            result = await bench.generate(token_ids=prompt, ignore_eos=True, max_tokens=max_tokens)
            assert (result.token_ids, result.finish_reason) == (unlimited.token_ids, "length")
        with pytest.raises(PromptTooLong):  # there is no room for one token
            await bench.generate(token_ids=prompt_of(256, 1), max_tokens=1)


@pytest.mark.trio
async def test_what_a_request_does_not_say_of_drawing_is_the_models_own(tiny_model: TinyModel) -> None:
    own = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.5}
    plain, drawing = tiny_model("llama"), replace(tiny_model("llama"), sampling=own)
    asked = {"token_ids": prompt_of(9, 1), "max_tokens": 20, "ignore_eos": True, "seed": 3}
    async with batcher(plain) as bench:
        greedy = (await bench.generate(**asked, temperature=0.0)).token_ids
        assert (await bench.generate(**asked)).token_ids == greedy
        drawn, hotter, penalized = [
            (await bench.generate(**asked | own | more)).token_ids
            for more in ({}, {"temperature": 5.0}, {"temperature": 0.0})
        ]
        beams = await bench.ref.call(Generate(GenerateRequest(**asked | {"seed": None}), beam_width=2), timeout=None)
    assert len({tuple(ids) for ids in (greedy, drawn, hotter, penalized)}) == 4
    async with batcher(drawing) as bench:
        assert (await bench.generate(**asked)).token_ids == drawn
        assert (await bench.generate(**asked, temperature=5.0)).token_ids == hotter
        assert (await bench.generate(**asked, temperature=0.0)).token_ids == penalized
        assert (await bench.generate(**asked, temperature=5.0, top_p=0.0)).token_ids == penalized
        off = {"temperature": 0.0, "top_k": 0, "repetition_penalty": 1.0}
        assert (await bench.generate(**asked, **off)).token_ids == greedy
        same = await bench.ref.call(Generate(GenerateRequest(**asked | {"seed": None}), beam_width=2), timeout=None)
        assert same.choices == beams.choices, "a beam search draws nothing"


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
        def forward(self, batch: Any) -> Rows:
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
        def forward(self, batch: Any) -> Rows:
            logits = host_copy(super().forward(batch))
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
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="blocks are used without a request")):
        async with trio.open_nursery() as nursery:
            actor = Batcher(lambda: Context(model, TorchRunner(model), n_ctx=256, n_parallel=8, n_held=4))
            bench = Bench(actor, await start(nursery, actor))
            system = Message(role="system", content="You answer in one short sentence, and you are always polite.")
            for question in ("one", "two", "three"):
                await bench.generate(messages=[system, Message(role="user", content=question)])
            assert len(actor.held_prompts) == 1 and actor.ctx.kv.counts().used > 0, "what is held belongs there"
            actor.ctx.kv.reserve([(7, [5, 6], 0)]).commit()
            with pytest.raises(ActorDown):
                await bench.generate(prompt="a")
                await bench.generate(prompt="a")


@pytest.mark.trio
async def test_stats_are_plain_data_and_answered_while_stepping(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        await bench.generate(prompt="a", max_tokens=5, ignore_eos=True)
        stats = await bench.ref.call(StatsRequest())
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


@pytest.mark.trio
async def test_a_request_that_a_gateway_has_validated_is_not_validated_again(tiny_model: TinyModel) -> None:
    """The gateway's limits are the same; here they differ so that a second validation would show."""
    request = GenerateRequest(prompt="a", max_tokens=2, n=2)
    async with batcher(tiny_model("llama"), limits=RequestLimits(max_n=1)) as bench:
        with pytest.raises(InvalidRequest) as caught:
            await bench.ref.call(Generate(request, client="c"), timeout=None)
        assert caught.value.field == "n"
        answer: Result = await bench.ref.call(Generate(request, client="c", is_validated=True), timeout=None)
        assert len(answer.choices) == 2
