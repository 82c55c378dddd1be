"""Arrival times: their rate is kept, and burstiness spreads them.

The workloads: the same from the same seeds, the lengths they are defined by, and no prompt twice.
"""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.clients.bench.workloads import (
    CaseOptions,
    LoadOptions,
    ScriptedLoad,
    Workload,
    arrival_times,
    cases_of,
    chat,
    fixed_batch,
    long_prefill,
    shared_prompt,
)


def spread(burstiness: float) -> float:
    """Standard deviation of the gaps, relative to their mean."""
    gaps = [later - earlier for earlier, later in pairwise(arrival_times(4000, 1.0, burstiness=burstiness, seed=1))]
    return pstdev(gaps) / fmean(gaps)


@given(st.integers(1, 200), st.floats(0.01, 1000), st.floats(0.1, 10), st.integers(0, 2**32))
def test_arrivals_ascend_and_take_what_the_rate_says(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness=burstiness, seed=seed)
    assert len(times) == count
    assert all(earlier <= later for earlier, later in pairwise([0.0, *times]))
    assert times[-1] == pytest.approx(count / rate)


def test_the_gaps_of_a_poisson_process_are_exponential() -> None:
    assert spread(1.0) == pytest.approx(1.0, rel=0.1)


def test_the_gaps_vary_by_the_root_of_the_burstiness() -> None:
    assert spread(4.0) == pytest.approx(0.5, rel=0.1)
    assert spread(0.25) == pytest.approx(2.0, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


def test_the_seed_decides() -> None:
    assert arrival_times(5, 2.0, seed=1) == arrival_times(5, 2.0, seed=1) != arrival_times(5, 2.0, seed=2)


OPTIONS = LoadOptions(vocab_size=49152)


def lengths(load: ScriptedLoad) -> list[tuple[int, int]]:
    return [(len(one.prompt), one.max_tokens) for one in load.requests]


def all_loads(options: LoadOptions) -> list[ScriptedLoad]:
    return [case.load for workload in Workload for case in cases_of(workload, options, CaseOptions())]


def test_the_same_seeds_make_the_same_loads() -> None:
    assert all_loads(OPTIONS) == all_loads(LoadOptions(vocab_size=49152))


def test_w2_is_the_load_that_was_measured_before() -> None:
    # Figures of different days are of the same work only as long as this holds.
    load = chat(OPTIONS)
    assert lengths(load)[:4] == [(171, 257), (71, 55), (177, 68), (255, 139)]
    assert load.requests[0].prompt[:4] == (36671, 23261, 45038, 2470)


def test_another_salt_changes_the_tokens_and_nothing_else() -> None:
    for first, second in zip(all_loads(OPTIONS), all_loads(replace(OPTIONS, salt=1)), strict=True):
        assert lengths(first) == lengths(second)
        assert all(a.prompt != b.prompt for a, b in zip(first.requests, second.requests, strict=True))


def test_another_seed_changes_the_lengths_too() -> None:
    assert lengths(chat(OPTIONS)) != lengths(chat(replace(OPTIONS, seed=1)))


def test_no_load_begins_a_prompt_as_another_one_does() -> None:
    # What one load left in the prefix cache must not make the next one faster; W3's own prefix is its point.
    loads = [load for load in all_loads(OPTIONS) if "shared" not in load.name]
    loads.append(shared_prompt(OPTIONS, sharing=False))
    beginnings = [one.prompt[:8] for load in loads for one in load.requests if len(one.prompt) >= 8]
    assert len(set(beginnings)) == len(beginnings)


def test_w2_lengths_are_lognormal_as_defined() -> None:
    many = chat(replace(OPTIONS, num_prompts=4000))
    inputs, outputs = zip(*lengths(many), strict=True)
    assert median(inputs) == pytest.approx(150, rel=0.08)
    assert median(outputs) == pytest.approx(180, rel=0.08)
    # Below the cap the logarithm is normal: its lower half tells sigma.
    for values, middle, sigma in ((inputs, 150, 1.0), (outputs, 180, 0.8)):
        below = [math.log(value / middle) for value in values if value <= middle]
        assert pstdev([*below, *(-value for value in below)]) == pytest.approx(sigma, rel=0.08)
    assert (max(inputs), max(outputs)) == (1024, 512)
    assert min(inputs) >= 1
    assert min(outputs) >= 1


def test_w2_has_64_requests_and_more_begin_with_the_same() -> None:
    assert len(chat(OPTIONS).requests) == 64
    assert lengths(chat(replace(OPTIONS, num_prompts=80)))[:64] == lengths(chat(OPTIONS))


def test_w3_is_w2_after_512_tokens_that_are_shared_or_not() -> None:
    on, off = shared_prompt(OPTIONS), shared_prompt(OPTIONS, sharing=False)
    assert lengths(on) == lengths(off) == [(prompt + 512, answer) for prompt, answer in lengths(chat(OPTIONS))]
    assert len({one.prompt[:512] for one in on.requests}) == 1
    assert len({one.prompt[:512] for one in off.requests}) == 64
    assert len({one.prompt[512:520] for one in on.requests if len(one.prompt) >= 520}) > 60


def test_w4_is_w2_at_shares_of_the_capacity() -> None:
    cases = cases_of(Workload.W4, OPTIONS, CaseOptions(), capacity=2.0)
    assert [case.request_rate for case in cases] == [0.6, 1.2, 1.8]
    assert all(lengths(case.load) == lengths(chat(OPTIONS)) for case in cases)


def test_w5_is_each_batch_at_each_context() -> None:
    cases = cases_of(Workload.W5, OPTIONS, CaseOptions())
    assert [(case.batch, case.context) for case in cases] == [(b, c) for c in (128, 1024) for b in (1, 8, 16, 32)]
    for case in cases:
        assert {len(one.prompt) for one in case.load.requests} == {case.context}
        assert len(case.load.requests) == case.batch


def test_w5_answers_outlast_the_prefill_of_the_last_prompt_by_64_tokens() -> None:
    # 32 x 1024 tokens are 64 steps of 512, in which the first request decodes already.
    assert fixed_batch(OPTIONS, 32, 1024).requests[0].max_tokens == 64 + 64


def test_w5_after_a_shared_prefix_has_it_in_every_prompt() -> None:
    load = fixed_batch(OPTIONS, 4, 128, shared_prefix=512)
    assert len({one.prompt[:512] for one in load.requests}) == 1
    assert len({one.prompt[512:] for one in load.requests}) == 4


def test_w6_ends_with_a_long_prompt_that_waits_for_the_others() -> None:
    *others, last = long_prefill(OPTIONS).requests
    assert len(last.prompt) == 8000
    assert len(last.prompt) + last.max_tokens <= 8192
    assert 0 < last.after_tokens < min(one.max_tokens for one in others)
    assert {one.after_tokens for one in others} == {0}


@given(st.floats(0.01, 2.0), st.integers(2, 60000), st.sampled_from(list(Workload)))
def test_every_load_can_be_asked_for_at_any_scale_and_vocabulary(
    scale: float, vocab_size: int, workload: Workload
) -> None:
    options = LoadOptions(vocab_size=vocab_size, scale=scale, num_prompts=3)
    for case in cases_of(workload, options, CaseOptions(batches=(2,), contexts=(16,))):
        for one in case.load.requests:
            assert one.max_tokens >= 1
            assert len(one.prompt) >= 1
            assert 0 <= min(one.prompt) <= max(one.prompt) < vocab_size


def test_the_room_a_load_needs_is_that_of_its_longest_requests() -> None:
    load = chat(OPTIONS)
    needs = sorted(prompt + answer for prompt, answer in lengths(load))
    assert load.positions_of(3) == sum(needs[-3:])
    assert load.positions_of(1) == load.max_positions == needs[-1]
    assert load.positions_of(1000) == sum(needs)
