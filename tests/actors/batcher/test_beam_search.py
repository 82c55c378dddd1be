"""Beam search: token for token what transformers' generate(num_beams=...) gives, alone, in company and after pauses."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.beam_search import BeamSearch
from genbatch.actors.batcher.messages import Keep
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import EngineError, InvalidRequest, PromptTooLong
from genbatch.proto.messages import Result
from tests.actors.batcher.bench import batcher as open_batcher
from tests.actors.batcher.bench import prompt_of
from tests.waiting import a_moment

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]


@torch.inference_mode()
def reference(oracle: Any, prompt: list[int], beams: int, max_tokens: int, **options: Any) -> list[list[int]]:
    """transformers' beams, best first, without what fills them up behind the end-of-sequence token."""
    ids = torch.tensor([prompt])
    rows = oracle._hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=max_tokens,
        do_sample=False,
        **options,
    )
    new = rows[:, len(prompt) :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in new]


@asynccontextmanager
async def batcher(
    model: Model, *, n_ctx: int = 1024, runner: Callable[[Model], Any] = TorchRunner, **options: Any
) -> AsyncIterator[tuple[Batcher, Callable[..., Any]]]:
    options = {"n_parallel": 12, "max_batch_tokens": 64, **options}
    async with open_batcher(model, n_ctx=n_ctx, new_runner=runner, usual={"max_tokens": 12}, **options) as bench:

        async def generate(prompt: list[int], beam_width: int = 1, keep: Keep | None = None, **params: Any) -> Result:
            return await bench.generate(token_ids=prompt, beam_width=beam_width, keep=keep, **params)

        yield bench.actor, generate


def outputs(result: Result) -> list[list[int]]:
    return [choice.token_ids for choice in result.choices]


@pytest.mark.trio
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("beams", [2, 3, 5])
async def test_b16_beams_are_those_of_transformers(
    tiny_model: TinyModel, oracle: OracleOf, family: str, beams: int
) -> None:
    async with batcher(tiny_model(family)) as (_, generate):
        for length in (1, 7, 22):
            prompt = prompt_of(length, length + beams)
            expected = reference(oracle(family), prompt, beams, 12)
            assert outputs(await generate(prompt, beams)) == expected


@pytest.mark.trio
async def test_b16_beams_that_end_early_end_as_in_transformers(tiny_model: TinyModel, oracle: OracleOf) -> None:
    """Every token id that some beam holds is tried as the end: many searches stop by themselves."""
    prompt, ended = prompt_of(9, 4), 0
    async with batcher(tiny_model("llama")) as (_, generate):
        plain = outputs(await generate(prompt, 4, max_tokens=16, ignore_eos=True))
        for end in sorted({token for beam in plain for token in beam})[:10]:
            expected = reference(oracle("llama"), prompt, 4, 16, eos_token_id=end, pad_token_id=2)
            expected = [beam[: beam.index(end) + 1] if end in beam else beam for beam in expected]
            result = await generate(prompt, 4, max_tokens=16, ignore_eos=True, stop_token_ids=[end])
            assert outputs(result) == expected
            reasons = [choice.finish_reason for choice in result.choices]
            assert reasons == ["stop" if beam[-1] == end else "length" for beam in expected]
            ended += reasons.count("stop")
    assert ended > 4


@pytest.mark.trio
@pytest.mark.parametrize("batching_type", list(BatchingType))
async def test_b16_beams_in_company_are_those_alone(
    tiny_model: TinyModel, oracle: OracleOf, batching_type: BatchingType
) -> None:
    wanted = [
        (prompt_of(length, length), beams) for length, beams in ((5, 3), (30, 1), (3, 4), (12, 2), (2, 1), (9, 6))
    ]
    results: dict[int, Result] = {}
    async with batcher(tiny_model("llama"), batching_type=batching_type) as (_, generate):

        async def one(index: int) -> None:
            results[index] = await generate(*wanted[index])

        async with trio.open_nursery() as nursery:
            for index in range(len(wanted)):
                nursery.start_soon(one, index)
    for index, (prompt, beams) in enumerate(wanted):
        expected = reference(oracle("llama"), prompt, beams, 12) if beams > 1 else None
        assert outputs(results[index]) == (expected or [oracle("llama").generate(prompt, 12)])


@pytest.mark.trio
@pytest.mark.parametrize("policy", list(SchedulerPolicy))
async def test_b16_beams_survive_a_cache_too_small_for_all(
    tiny_model: TinyModel, oracle: OracleOf, policy: SchedulerPolicy
) -> None:
    wanted = [(prompt_of(6, seed), beams) for seed, beams in ((1, 3), (2, 2), (3, 4), (4, 1), (5, 3))]
    results: dict[int, Result] = {}
    async with batcher(tiny_model("llama"), n_ctx=96, scheduler_policy=policy) as (actor, generate):

        async def one(index: int) -> None:
            results[index] = await generate(*wanted[index], max_tokens=14)

        async with trio.open_nursery() as nursery:
            for index in range(len(wanted)):
                nursery.start_soon(one, index)
        pauses = actor.stats.preemptions
    for index, (prompt, beams) in enumerate(wanted):
        expected = reference(oracle("llama"), prompt, beams, 14) if beams > 1 else None
        assert outputs(results[index]) == (expected or [oracle("llama").generate(prompt, 14)])
    assert (pauses > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION)


@pytest.mark.trio
async def test_b16_beams_share_the_blocks_of_their_prompt(tiny_model: TinyModel) -> None:
    prompt, most, prefilled = prompt_of(40, 7), 0, 0
    async with batcher(tiny_model("llama")) as (actor, generate):
        evaluate = actor.stepper.evaluate

        def watch(*args: Any) -> Any:
            nonlocal most, prefilled
            most = max(most, actor.ctx.kv.counts().used)
            prefilled += sum(len(one.entry.tokens) for one in args[0] if len(one.entry.tokens) > 1)
            return evaluate(*args)

        actor.stepper.evaluate = watch  # type: ignore[method-assign]
        await generate(prompt, 4, max_tokens=4, ignore_eos=True)
    assert prefilled == 40, "the prompt is evaluated once for all beams"
    assert 10 < most <= 10 + 4, "ten blocks of prompt once, and a tail a beam"


@pytest.mark.trio
async def test_b16_kept_logits_and_logprobs_follow_each_beam(tiny_model: TinyModel, oracle: OracleOf) -> None:
    prompt = prompt_of(11, 3)
    keep = Keep(context=True, generation=True)
    async with batcher(tiny_model("llama"), max_batch_tokens=16) as (_, generate):
        result = await generate(prompt, 3, keep, logprobs=0)
    context = keep.context_logits()
    assert context is not None
    expected = oracle("llama").log_probs(prompt)
    torch.testing.assert_close(torch.log_softmax(torch.from_numpy(context), -1), expected, atol=1e-4, rtol=1e-4)
    for index, choice in enumerate(result.choices):
        rows = keep.generation_logits(index)
        assert rows is not None and len(rows) == len(choice.token_ids)
        truth = oracle("llama").log_probs(prompt + choice.token_ids)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.log_softmax(torch.from_numpy(rows), -1), truth, atol=1e-4, rtol=1e-4)
        for score, token, row in zip(choice.logprobs or [], choice.token_ids, truth, strict=True):
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.trio
async def test_b16_a_cancelled_search_frees_every_beam(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as (actor, generate):
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                while actor.stats.steps < 4:
                    await a_moment()
                assert len(actor.slots.seq_pool) == 12 - 5
                nursery.cancel_scope.cancel()

            nursery.start_soon(leave)
            await generate(prompt_of(5, 5), 5, max_tokens=200, ignore_eos=True)
        while actor.slots.sequences:
            await a_moment()


@pytest.mark.trio
async def test_b16_a_search_that_fails_fails_alone(tiny_model: TinyModel, oracle: OracleOf) -> None:
    model, prompt = tiny_model("llama"), prompt_of(5, 8)

    class Broken(TorchRunner):
        def forward(self, batch: Any) -> Rows:
            if 14 in batch.kv_lens.tolist():
                raise RuntimeError("no such position")
            return super().forward(batch)

    async with batcher(model, runner=Broken) as (_, generate), trio.open_nursery() as nursery:

        async def fails() -> None:
            with pytest.raises(EngineError, match="no such position"):
                await generate(prompt_of(10, 10), 3)

        nursery.start_soon(fails)
        result = await generate(prompt, max_tokens=8)
        assert result.token_ids == oracle("llama").generate(prompt, 8)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("beams", "params", "field"),
    [
        (0, {}, "beam_width"),
        (13, {}, "beam_width"),
        (2, {"temperature": 0.5}, "temperature"),
        (2, {"stop": ["a"]}, "stop"),
        (2, {"n": 2}, "n"),
        (2, {"min_tokens": 2}, "min_tokens"),
    ],
)
async def test_b16_what_a_beam_search_cannot_do_is_refused_by_name(
    tiny_model: TinyModel, beams: int, params: dict[str, Any], field: str
) -> None:
    async with batcher(tiny_model("llama")) as (_, generate):
        with pytest.raises(InvalidRequest) as caught:
            await generate([5, 6], beams, **params)
        assert caught.value.field == field


@pytest.mark.trio
async def test_b16_beams_that_no_cache_could_hold_are_refused(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), n_ctx=40) as (_, generate):
        with pytest.raises(PromptTooLong):
            await generate(prompt_of(10, 1), 8, max_tokens=20)
        assert len(outputs(await generate(prompt_of(10, 1), 1))) == 1


def test_a_beam_keeps_its_place_and_its_siblings_take_free_ones() -> None:
    search = BeamSearch(3, frozenset(), 10)
    assert search.draw(0, [(5, -0.1), (6, -0.2), (7, -0.3)])
    assert not search.advance()
    assert [beam.tokens for beam in search.running] == [[5], [6], [7]]
    assert search.moves == [(0, 1), (0, 2)]
    for slot in (0, 1, 2):
        done = search.draw(slot, [(8, -5.0), (9, -6.0)] if slot != 2 else [(8, -0.1), (9, -0.2), (10, -0.3)])
        assert done == (slot == 2)
    assert not search.advance()
    assert [beam.tokens for beam in search.running] == [[7, 8], [7, 9], [7, 10]]
    assert search.moves == [(2, 0), (2, 1)]


def test_b16_a_search_ends_when_no_running_beam_can_beat_the_ended_ones() -> None:
    search = BeamSearch(2, frozenset({9}), 100)
    search.draw(0, [(9, -0.1), (5, -3.0), (6, -3.1), (7, -9.0)])
    assert not search.advance(), "one beam has ended, two are wanted"
    search.draw(0, [(9, -0.1), (5, -5.0), (6, -5.1), (7, -9.0)])
    search.draw(1, [(5, -8.0), (6, -8.1), (7, -8.2), (8, -8.3)])
    assert search.advance(), "-8.0 / 2 is less than -3.1 / 2"
    assert [beam.tokens for beam in search.best()] == [[9], [5, 9]]


@pytest.mark.trio
async def test_b16_beams_count_one_token_each_in_the_budget_of_a_step(tiny_model: TinyModel, oracle: OracleOf) -> None:
    sizes: list[int] = []
    async with batcher(tiny_model("llama"), max_batch_tokens=8) as (actor, generate):
        evaluate = actor.stepper.evaluate

        def watch(*args: Any) -> Any:
            sizes.append(sum(len(one.entry.tokens) for one in args[0]))
            return evaluate(*args)

        actor.stepper.evaluate = watch  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(generate, prompt_of(6, seed), 4)
            result = await generate(prompt_of(5, 8))
    assert max(sizes) == 8
    assert result.token_ids == oracle("llama").generate(prompt_of(5, 8), 12)


def test_a_running_beam_that_can_only_equal_the_ended_ones_ends_the_search() -> None:
    """As transformers has it: a tie is no improvement."""
    search = BeamSearch(1, frozenset({2}), 100)
    assert search.draw(0, [(2, -1.0), (3, -1.0)])
    assert search.advance()
    assert [beam.tokens for beam in search.best()] == [[2]]
    better = BeamSearch(1, frozenset({2}), 100)
    better.draw(0, [(2, -1.0), (3, -0.5)])
    assert not better.advance(), "one that is ahead goes on"
