"""The time for prompts in a step: gaps stay short, prompts do not starve, and nothing else changes."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.plan import (
    LEAST_PROMPT_TOKENS,
    STEP_SHARE,
    PromptBudget,
    StepLimits,
    StepTime,
    StepTimeModel,
    StepWork,
    prompt_budget,
)
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import FIFOScheduler, SchedulerOutput, normalize_output
from tests.actors.scheduling.closed_loop import closed_loop, decode_work, prompt_work
from tests.actors.scheduling.real_blocks import decoding, prefilling, request

TARGET_S = 0.03
MACHINES = st.builds(
    StepTime,
    base=st.floats(1e-4, 0.1),
    decode=st.floats(1e-5, 1e-2),
    key=st.floats(0, 1e-6),
    prompt=st.floats(0, 1e-3),
    prefill=st.floats(1e-6, 1e-2),
    prefill_key=st.floats(0, 1e-6),
)


def steps(machine: StepTime, prompts: list[LlmRequest], streams: int, target_s: float) -> Iterator[SchedulerOutput]:
    """The plans until all these prompts are evaluated, beside streams that never end."""
    limits = StepLimits(max_batch_tokens=512, block_size=16)
    scheduler = FIFOScheduler(limits)
    running = [decoding(1000 + number, positions=100) for number in range(streams)]
    while prompts:
        limits.prompt_budget = prompt_budget(machine, decode_work(running), len(prompts), target_s)
        active = running + prompts
        plan = normalize_output(scheduler.schedule(active, frozenset()).as_plan([], []), active, frozenset(), limits)
        assert plan.generation_requests == running, "a stream waits for a prompt"
        yield plan
        for one in running:
            one.num_computed += 1
        for one in plan.context_requests:
            if one.phase is Phase.PENDING:
                one.move(Phase.PREFILLING)
            one.num_computed += plan.chunk_sizes[one.request_id]
        prompts = [one for one in prompts if one.context_remaining]


def cost_of_least(machine: StepTime, plan: SchedulerOutput) -> float:
    """Seconds for the tokens that the first prompt of a step gets in any case."""
    first = plan.context_requests[0]
    return machine.seconds(
        StepWork(
            steps=0,
            prompts=1,
            prefill=LEAST_PROMPT_TOKENS,
            prefill_keys=LEAST_PROMPT_TOKENS * (first.num_computed + LEAST_PROMPT_TOKENS / 2),
        )
    )


@given(MACHINES, st.integers(1, 32), st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_no_step_takes_longer_than_the_target_or_than_the_share_of_a_step_in_which_all_decode(
    machine: StepTime, streams: int, lengths: list[int]
) -> None:
    prompts = [request(number, size) for number, size in enumerate(lengths)]
    for plan in steps(machine, prompts, streams, TARGET_S):
        waiting = sum(one.context_remaining > 0 for one in prompts)
        decodes = decode_work(plan.generation_requests)
        decode_s, prompt_s = machine.seconds(decodes), machine.seconds(prompt_work(plan))
        all_decode_s = machine.seconds(replace(decodes, decodes=streams + waiting))
        allowed = max(TARGET_S - decode_s, STEP_SHARE * all_decode_s - decode_s, cost_of_least(machine, plan))
        assert prompt_s <= allowed * (1 + 1e-9)


@given(MACHINES, st.integers(1, 32), st.integers(1, 8000))
def test_a_prompt_takes_at_most_twice_the_time_of_its_chunks_alone(
    machine: StepTime, streams: int, length: int
) -> None:
    prompts_share = STEP_SHARE - 1
    total_s = alone_s = slack_s = 0.0
    for plan in steps(machine, [request(1, length)], streams, TARGET_S):
        [one] = plan.context_requests
        prompt_s = machine.seconds(prompt_work(plan))
        total_s += machine.seconds(decode_work(plan.generation_requests)) + prompt_s
        alone_s += prompt_s
        # Chunks are whole tokens; the last one is as short as its prompt, and 512 tokens are the most.
        size = plan.chunk_sizes[1]
        cut = size == one.context_remaining or size + streams == 512
        decode_s = machine.seconds(decode_work(plan.generation_requests))
        next_token_s = machine.prefill + machine.prefill_key * (one.num_computed + size + 1)
        slack_s += decode_s if cut else next_token_s / prompts_share
    assert total_s <= (1 + 1 / prompts_share) * alone_s + slack_s + 1e-9


def test_a_long_prompt_beside_seven_streams_moves_on_and_no_gap_exceeds_the_target() -> None:
    """An exact model of 8 billion weights: 31 prompt tokens a second, and 0.25 s for a step of seven."""
    machine = StepTime(base=0.06, decode=0.027, key=1e-6, prefill=0.032, prefill_key=1e-6)
    gaps = [
        machine.seconds(decode_work(plan.generation_requests)) + machine.seconds(prompt_work(plan))
        for plan in steps(machine, [request(1, 8000)], 7, 0.1)
    ]
    alone_s = 8000 * (0.032 + 1e-6 * 4000)
    assert max(gaps) < 0.8  # sixteen seconds with 512 tokens a step
    assert alone_s < sum(gaps) < 2 * alone_s


@pytest.mark.parametrize(
    "machine",
    [
        StepTime(base=0.0030, decode=0.0009, key=1.8e-6, prompt=0.0003, prefill=0.0006, prefill_key=3.2e-7),
        StepTime(base=0.0025, decode=0.0004, key=6e-7, prompt=0.0003, prefill=0.00027, prefill_key=1.4e-7),
        StepTime(base=0.06, decode=0.008, key=5e-6, prompt=0.001, prefill=1 / 78, prefill_key=1e-6),
    ],
    ids=["small-exact", "small-int8", "large-int8"],
)
def test_chunks_of_a_long_prompt_get_smaller_as_their_keys_are_learned(machine: StepTime) -> None:
    """The costs are learned from the steps alone; the machines are measured ones."""
    times = StepTimeModel()
    for work in (StepWork(decodes=1, keys=1), StepWork(prompts=1, prefill=32, prefill_keys=512)):
        times.took(work, machine.seconds(work))
    streams = StepWork(decodes=7, keys=1000)
    for _ in range(50):
        times.took(streams, machine.seconds(streams))
    computed, over = 0, []
    while computed < 9000:
        budget = prompt_budget(times.time, streams, 1, 0.012)
        assert budget is not None
        size = max(budget.num_tokens(budget.seconds, computed), LEAST_PROMPT_TOKENS)
        work = replace(streams, prompts=1, prefill=size, prefill_keys=size * (computed + size / 2))
        times.took(work, machine.seconds(work))
        allowed = max(0.012, STEP_SHARE * machine.seconds(replace(streams, decodes=8)))
        over.append(machine.seconds(work) / allowed)
        computed += size
    assert max(over) < 1.7, "more than 2 where the keys of a prompt were not learned"


def test_seven_prompts_beside_one_stream_take_no_longer_than_one_beside_seven() -> None:
    machine = StepTime(base=0.0078, decode=0.0012, key=0.0, prefill=0.0008, prefill_key=0.0)

    def longest_step(streams: int, prompts: int) -> float:
        return max(
            machine.seconds(decode_work(plan.generation_requests)) + machine.seconds(prompt_work(plan))
            for plan in steps(machine, [request(number, 110) for number in range(prompts)], streams, 0.012)
        )

    assert longest_step(1, 7) == pytest.approx(longest_step(7, 1), rel=0.05)


# Models of 0.135, 0.77 and 8 billion weights on two cores, with exact products and with products of bytes.
KNOWN_MACHINES = {
    "small-exact": StepTime(base=0.0035, decode=0.0006, key=1e-7, prefill=1 / 1800, prefill_key=1e-8),
    "small-int8": StepTime(base=0.0028, decode=0.0003, key=1e-7, prefill=1 / 4100, prefill_key=1e-8),
    "medium-exact": StepTime(base=0.009, decode=0.0032, key=3e-7, prefill=1 / 335, prefill_key=3e-8),
    "medium-int8": StepTime(base=0.0105, decode=0.0008, key=3e-7, prefill=1 / 772, prefill_key=3e-8),
    "large-exact": StepTime(base=0.06, decode=0.027, key=1e-6, prefill=1 / 31, prefill_key=1e-7),
    "large-int8": StepTime(base=0.06, decode=0.008, key=1e-6, prefill=1 / 78, prefill_key=1e-7),
}


@pytest.mark.parametrize("callers", [8, 32])
@pytest.mark.parametrize("machine", KNOWN_MACHINES.values(), ids=KNOWN_MACHINES.keys())
def test_no_gap_of_callers_in_closed_loops_is_longer_than_two_and_a_half_usual_ones(
    machine: StepTime, callers: int
) -> None:
    """Callers that end together begin together: then one decodes while seven prompts wait."""
    bounded = closed_loop(machine, callers=callers, target_s=0.012)
    unbounded = closed_loop(machine, callers=callers, target_s=0.0)
    assert max(bounded.gaps) <= 2.5 * median(bounded.gaps)
    least = 0.95 if callers == 32 else 0.94
    assert bounded.tokens_per_s >= least * unbounded.tokens_per_s


def test_without_streams_or_a_target_chunks_are_as_large_as_max_batch_tokens() -> None:
    machine = StepTime(base=0.01, decode=0.001, key=0.0, prefill=0.01, prefill_key=0.0)
    assert prompt_budget(machine, StepWork(decodes=0), 1, TARGET_S) is None
    assert prompt_budget(machine, StepWork(decodes=4), 1, 0.0) is None
    assert prompt_budget(None, StepWork(decodes=4), 1, TARGET_S) is None
    assert [plan.num_context_tokens for plan in steps(machine, [request(1, 1200)], 0, TARGET_S)] == [512, 512, 176]
    assert [plan.num_context_tokens for plan in steps(machine, [request(1, 1200)], 2, 0.0)] == [510, 510, 180]


def test_how_many_prompts_begin_in_a_step_is_bounded_by_the_same_time() -> None:
    limits = StepLimits(512, 16, prompt_budget=PromptBudget(0.010, prompt=0.002, token=1e-5, key=0.0))
    waiting = [request(number, 1) for number in range(30)]  # all but one token of each is in the cache
    plan = FIFOScheduler(limits).schedule([decoding(100), *waiting], frozenset())
    assert len(plan.context_requests) == 4


def test_a_later_token_of_a_prompt_costs_more_so_fewer_of_them_fit() -> None:
    budget = PromptBudget(0.010, prompt=0.0, token=1e-5, key=1e-8)
    sizes = [budget.num_tokens(budget.seconds, computed) for computed in (0, 1000, 10_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 5 * sizes[2]
    for computed, size in zip((0, 1000, 10_000), sizes, strict=True):
        assert budget.cost(size, computed) <= budget.seconds < budget.cost(size + 2, computed)


def test_a_prompt_that_may_not_be_split_is_evaluated_whole_and_only_as_the_first() -> None:
    limits = StepLimits(512, 16, enable_chunked_context=False, prompt_budget=PromptBudget(0.01, 0.0, 1e-3, 0.0))
    plan = FIFOScheduler(limits).schedule([decoding(1), request(2, 300), request(3, 100)], frozenset())
    assert dict(plan.chunk_sizes) == {2: 300}


def test_the_first_prompt_gets_some_tokens_however_little_time_there_is() -> None:
    limits = StepLimits(512, 16, prompt_budget=PromptBudget(1e-6, prompt=1.0, token=1.0, key=0.0))
    plan = FIFOScheduler(limits).schedule([decoding(1), prefilling(2, 300, 10), request(3, 100)], frozenset())
    assert dict(plan.chunk_sizes) == {2: LEAST_PROMPT_TOKENS}


@pytest.mark.parametrize(("seconds", "num_tokens"), [(0.0005, LEAST_PROMPT_TOKENS), (0.02001, 200), (10.0, 400)])
def test_a_plan_without_chunk_sizes_is_filled_within_the_time(seconds: float, num_tokens: int) -> None:
    limits = StepLimits(512, 16, prompt_budget=PromptBudget(seconds, 0.0, 1e-4, 0.0))
    active = [decoding(1), request(2, 300), request(3, 100)]
    plan = normalize_output((active[1:], active[:1], []), active, frozenset(), limits)
    assert plan.num_context_tokens == num_tokens
