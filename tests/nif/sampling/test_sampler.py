"""Sampling against transformers' logits processors and a plain full-sort reference."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from genbatch.nif.runner import Largest
from genbatch.nif.sampling import choice
from genbatch.nif.sampling.choice import choice_bytes, greedy
from genbatch.nif.sampling.sampler import (
    CHUNK,
    SORTED_AT_ONCE,
    Sampled,
    SampleFault,
    SamplerState,
    SamplingParams,
    _chunk_sums,
    _invert_whole,
    _pick,
    token_logprobs,
    uniform,
)
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.validation import RequestLimits, validate_request

NUM_DRAWS = 20_000


def state(prompt: Sequence[int] = (), seed: int = 0, **params: object) -> SamplerState:
    return SamplerState(SamplingParams(seed=seed, **params), prompt)  # type: ignore[arg-type]


def random_logits(rows: int, width: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


def sample(logits: torch.Tensor, *rest: object) -> list[Sampled | SampleFault]:
    return choice.sample(logits.numpy(), *rest)  # type: ignore[arg-type]


def tokens(results: Sequence[Sampled | SampleFault]) -> list[int]:
    assert all(isinstance(result, Sampled) for result in results), results
    return [result.token_id for result in results if isinstance(result, Sampled)]


def draw_many(row: torch.Tensor, one: SamplerState, number: int = NUM_DRAWS) -> Counter[int]:
    """How often each token comes out of one row at `number` positions."""
    return Counter(tokens(sample(row.expand(number, -1), [one] * number, range(number))))


def check_distribution(drawn: Counter[int], probabilities: torch.Tensor) -> None:
    """The drawn tokens are exactly the possible ones, and as frequent as likely (5 standard deviations)."""
    assert set(drawn) == set(probabilities.nonzero()[:, 0].tolist())
    number = drawn.total()
    for token_id, p in enumerate(probabilities.tolist()):
        assert abs(drawn[token_id] - number * p) <= 5 * math.sqrt(number * p * (1 - p)) + 1e-3


WARPERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "hot": ({"temperature": 2.5}, [TemperatureLogitsWarper(2.5)]),
    "top_k": ({"temperature": 1.0, "top_k": 7}, [TopKLogitsWarper(7)]),
    "top_k of all": ({"temperature": 1.0, "top_k": 400}, [TopKLogitsWarper(400)]),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "tiny top_p": ({"temperature": 1.0, "top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min_p": ({"temperature": 1.0, "min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "min_p of 1": ({"temperature": 1.0, "min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "all": (
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.15},
        [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.15)],
    ),
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("width", [30, 64])
def test_draws_follow_the_distribution_of_transformers_warpers(name: str, width: int) -> None:
    params, warpers = WARPERS[name]
    row = random_logits(1, width, seed=width, spread=0.7)
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 0, dtype=torch.int64), row.clone())
    check_distribution(draw_many(row, state(**params)), torch.softmax(expected, -1)[0])


def test_r02_temperature_top_k_and_top_p_shape_the_draw_and_temperature_0_is_greedy() -> None:
    row = random_logits(1, 50, seed=2, spread=0.8)
    params = {"temperature": 0.9, "top_k": 15, "top_p": 0.85}
    warpers = [TemperatureLogitsWarper(0.9), TopKLogitsWarper(15), TopPLogitsWarper(0.85)]
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 0, dtype=torch.int64), row.clone())
    check_distribution(draw_many(row, state(**params)), torch.softmax(expected, -1)[0])
    assert tokens(sample(row, [state(top_k=15, top_p=0.85)], [0])) == [int(row.argmax())]


def test_top_k_keeps_every_tie_with_the_last_kept_token_like_transformers() -> None:
    row = torch.zeros(1, 600)
    row[0, 5] = 1.0
    row[0, 10:310] = 0.5  # more equals than are ranked at first
    expected = TopKLogitsWarper(3)(torch.zeros(1, 0, dtype=torch.int64), row.clone())
    check_distribution(draw_many(row, state(temperature=1.0, top_k=3)), torch.softmax(expected, -1)[0])


def test_top_p_cuts_through_ties_at_the_same_probability_as_transformers_keeping_low_ids() -> None:
    row = torch.zeros(1, 40)
    row[0, 30] = 2.0
    expected = TopPLogitsWarper(0.5)(torch.zeros(1, 0, dtype=torch.int64), row.clone())
    kept = int(expected.isfinite().sum())
    assert set(draw_many(row, state(temperature=1.0, top_p=0.5))) == {30, *range(kept - 1)}


EXTREME = {
    "temperature": [0.0, 5e-324, 1e-46, 1e-38, 0.7, 1e38, 1e39, 1.7e308],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1.0, 5e-324, 0.9],
    "min_p": [0.0, 5e-324, 1.0],
    "repetition_penalty": [1.0, 1e-9, 1e9],
    "presence_penalty": [0.0, -2.0, 2.0],
    "frequency_penalty": [0.0, -2.0, 2.0],
    "logit_bias": [None, {0: 100.0, 5: -100.0}],
    "logprobs": [None, 2],
    "min_tokens": [0, 2],
}


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EXTREME.items()}), st.integers(0, 99))
def test_every_value_that_a_request_may_have_draws_a_token(params: dict[str, object], seed: int) -> None:
    """And every one is what a request may have: the validation says so."""
    validate_request(GenerateRequest(prompt="x", **params), RequestLimits())  # type: ignore[arg-type]
    row = random_logits(1, 70, seed, spread=20.0)
    row[0, 9] = 0.0
    one = state([1, 5, 9], suppress=frozenset({7, 8}), **params)
    one.accept(9)
    [result] = sample(row, [one], [seed])
    assert isinstance(result, Sampled), result


def test_the_coldest_temperature_takes_the_largest_and_the_hottest_any() -> None:
    row = random_logits(1, 5, 3)
    assert set(draw_many(row, state(temperature=1e-46), 50)) == {int(row.argmax())}
    check_distribution(draw_many(row, state(temperature=1e300)), torch.full((5,), 0.2))


def reference_draw(row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The same draw by sorting the whole row in double precision."""
    scaled = row.double() / params.temperature
    ranked, ids = scaled.sort(descending=True, stable=True)
    weights = (ranked - ranked[0]).exp()
    if params.top_k:
        weights[ranked < ranked[min(params.top_k, len(ranked)) - 1]] = 0.0
    before = weights.cumsum(0) - weights
    if params.top_p < 1.0:
        weights[before >= params.top_p * weights.sum()] = 0.0
    weights[weights < params.min_p] = 0.0
    if not params.top_k and params.top_p == 1.0 and not params.min_p:
        ids, order = ids.sort()
        weights = weights[order]
    cumulative = weights.cumsum(0)
    point = uniform(params.seed, position) * cumulative[-1]
    return int(ids[int(torch.searchsorted(cumulative, point, right=True))])


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 127},
        {"top_k": 128},
        {"top_k": 129},
        {"top_k": 4096},
        {"top_k": 8000},
        {"min_p": 0.001},
        {"min_p": 0.3, "top_p": 0.99},
        {"top_p": 0.99, "top_k": 9001},
    ],
)
def test_ranking_few_tokens_draws_what_sorting_the_whole_row_draws(params: dict[str, float], spread: float) -> None:
    logits = random_logits(12, 9001, seed=7, spread=spread)
    states = [state(seed=i, temperature=1.1, **params) for i in range(12)]
    drawn = tokens(sample(logits, states, range(12)))
    assert drawn == [reference_draw(logits[i], s.params, i) for i, s in enumerate(states)]


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    for width in (128, 100):
        logits = random_logits(300, width, seed=width).round()  # many ties
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert tokens(sample(logits, [state()] * 300, range(300))) == expected


def test_repetition_penalty_equals_transformers_on_prompt_and_output() -> None:
    logits = random_logits(400, 60, seed=3, spread=3.0)
    prompt, output = [1, 2, 3, 3, 50], [7, 2, 8, 8, 8]
    one = state(prompt, repetition_penalty=1.8)
    for token_id in output:
        one.accept(token_id)
    seen = torch.tensor([prompt + output]).expand(400, -1)
    expected = RepetitionPenaltyLogitsProcessor(1.8)(seen, logits.clone()).argmax(-1).tolist()
    assert tokens(sample(logits, [one] * 400, range(400))) == expected
    assert expected != logits.argmax(-1).tolist()


def test_penalties_and_bias_change_the_drawn_distribution_as_documented() -> None:
    logits = random_logits(1, 20, seed=4)
    one = state(
        [0, 1, 2],
        temperature=1.0,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.7,
        logit_bias={19: 1.5, 2: -0.5},
    )
    for token_id in (2, 5, 5, 5):
        one.accept(token_id)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[0, 1, 2, 5]]), logits.clone())
    expected[0, 2] -= 0.4 + 0.7 + 0.5
    expected[0, 5] -= 3 * 0.4 + 0.7
    expected[0, 19] += 1.5
    check_distribution(draw_many(logits, one), torch.softmax(expected, -1)[0])


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    one = state([0, 0, 0], frequency_penalty=2.0, presence_penalty=2.0)
    assert tokens(sample(logits, [one], [0])) == [0]
    one.accept(0)
    assert tokens(sample(logits, [one], [1])) == [2]


def test_many_distinct_tokens_are_all_penalised() -> None:
    logits = torch.arange(500.0)[None, :]
    one = state(range(100), frequency_penalty=2000.0)
    for token_id in range(499, 150, -1):
        one.accept(token_id)
    assert tokens(sample(logits, [one], [0])) == [150]


def test_min_tokens_suppresses_the_ending_ids_until_enough_were_generated() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    one = state(min_tokens=2, suppress=frozenset({1, 2}))
    assert tokens(sample(logits, [one], [0])) == [3]
    one.accept(3)
    assert tokens(sample(logits, [one], [1])) == [3]
    one.accept(3)
    assert tokens(sample(logits, [one], [2])) == [1]


def test_suppression_beats_bias() -> None:
    one = state(min_tokens=1, suppress=frozenset({0}), logit_bias={0: 100.0})
    assert tokens(sample(torch.tensor([[0.0, -5.0]]), [one], [0])) == [1]


def test_a_sampler_that_raises_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows keep their tokens: the step is not evaluated again."""
    whole, logits = choice.sample, random_logits(3, 64).numpy()
    states = [state(seed=1, temperature=1.0), state(temperature=1.0, top_k=7), state()]

    def sample(logits: object, states: Sequence[SamplerState], *rest: object) -> object:
        if any(state.params.top_k == 7 for state in states):
            raise ZeroDivisionError("a bad state")
        return whole(logits, states, *rest)  # type: ignore[arg-type]

    good = whole(logits[[0, 2]], [states[0], states[2]], [5, 5])
    monkeypatch.setattr(choice, "sample", sample)
    first, bad, last = choice.choose(logits, None, states, [5, 5, 5])
    assert [first, last] == good
    assert isinstance(bad, SampleFault) and "a bad state" in bad.reason and not bad.by_request


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}])
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * 64])
def test_a_row_without_usable_logits_fails_alone(params: dict[str, float], poison: list[float]) -> None:
    logits = random_logits(3, 64)
    alone = sample(logits, [state(seed=i, **params) for i in range(3)], [5, 6, 7])
    logits[1, : len(poison)] = torch.tensor(poison)
    together = sample(logits, [state(seed=i, **params) for i in range(3)], [5, 6, 7])
    assert isinstance(together[1], SampleFault)
    assert (together[0], together[2]) == (alone[0], alone[2])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_whose_largest_is_no_number_fails_alone(poison: float) -> None:
    found = Largest(np.array([2.0, poison, 3.0], np.float32), np.array([7, 0, 9], np.int32))
    first, second, third = greedy(found)
    assert (first, third) == (Sampled(7), Sampled(9))
    assert isinstance(second, SampleFault)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_suppressed_fails_alone(temperature: float) -> None:
    logits = random_logits(2, 8)
    nothing = state(min_tokens=1, suppress=frozenset(range(8)), temperature=temperature)
    first, second = sample(logits, [nothing, state()], [0, 0])
    assert isinstance(first, SampleFault)
    assert "no token" in first.reason and first.by_request
    assert second == Sampled(int(logits[1].argmax()))


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    row = torch.full((1, 70), -math.inf)
    row[0, [3, 69]] = 0.0
    for params in ({}, {"top_p": 0.99}, {"top_k": 60}, {"min_p": 1e-9}):
        assert set(draw_many(row, state(temperature=5.0, **params), 500)) == {3, 69}


def test_the_smallest_temperature_is_greedy_rather_than_an_overflow() -> None:
    logits = random_logits(20, 64, spread=30.0)
    states = [state(temperature=1e-30, seed=i) for i in range(20)]
    assert tokens(sample(logits, states, range(20))) == logits.argmax(-1).tolist()


def test_sampling_changes_neither_states_nor_logits() -> None:
    logits = random_logits(2, 64)
    before = logits.clone()
    one = state([1, 2], temperature=1.0, top_p=0.9, repetition_penalty=2.0, logit_bias={4: 1.0}, logprobs=3)
    first = sample(logits, [one, one], [0, 1])
    assert sample(logits, [one, one], [0, 1]) == first
    assert torch.equal(logits, before)
    assert one._num_accepted == 0


def test_a_fork_shares_the_past_and_nothing_of_the_future() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(2, -1)
    one = state([3], frequency_penalty=0.75, seed=1)
    one.accept(0)
    twin = one.fork(seed=9)
    assert (twin.params.seed, twin._num_accepted) == (9, 1)
    twin.accept(0)  # the fork brought one of the two that make 0 lose
    assert tokens(sample(logits, [one, twin], [1, 2])) == [0, 1]
    twin.accept(1)
    twin.accept(2)
    assert tokens(sample(logits, [one, twin], [1, 4])) == [0, 0]
    assert (one._num_accepted, twin._num_accepted) == (1, 4)


def test_b29_log_probability_is_log_softmax_of_the_generation_logits_at_the_token() -> None:
    logits = random_logits(6, 333, seed=5, spread=4.0)
    plain = {"logprobs": 4}
    bent = {"logprobs": 1, "temperature": 2.0, "top_k": 5, "logit_bias": {7: 9.0}}
    states = [state(seed=i, **(plain if i % 2 else bent)) for i in range(6)]
    log_probs = torch.log_softmax(logits, -1)
    for i, result in enumerate(sample(logits, states, range(6))):
        assert isinstance(result, Sampled)
        assert result.logprob == pytest.approx(log_probs[i, result.token_id].item(), rel=1e-6)
        values, ids = log_probs[i].topk(4 if i % 2 else 1)
        assert [token_id for token_id, _ in result.top] == ids.tolist()
        assert [logprob for _, logprob in result.top] == pytest.approx(values.tolist(), rel=1e-6)


def test_log_probabilities_come_only_to_those_who_ask() -> None:
    logits = random_logits(3, 64)
    none, chosen, two = sample(logits, [state(), state(logprobs=0), state(logprobs=2)], [0, 0, 0])
    assert isinstance(none, Sampled)
    assert isinstance(chosen, Sampled)
    assert isinstance(two, Sampled)
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()
    assert [token_id for token_id, _ in two.top] == logits[2].topk(2).indices.tolist()


def test_prompt_log_probabilities_rank_ties_by_id() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 40] = 1.0
    first, second = token_logprobs(logits.numpy(), np.array([9, 40]), 3)
    assert [token_id for token_id, _ in first.top] == [0, 1, 2]
    assert first.logprob == pytest.approx(-math.log(50))
    assert [token_id for token_id, _ in second.top] == [40, 0, 1]
    assert second.logprob == second.top[0][1]


def test_uniforms_are_uniform_and_neighbouring_seeds_unrelated() -> None:
    draws = torch.tensor([[uniform(seed, i) for i in range(4000)] for seed in (0, 1, 2**64 - 1)])
    assert ((draws >= 0) & (draws < 1)).all()
    for row in draws:
        share = torch.histc(row, bins=10, min=0, max=1) / 4000
        assert (share - 0.1).abs().max() < 0.03
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.06
    assert abs(torch.corrcoef(torch.stack((draws[0, 1:], draws[1, :-1])))[0, 1]) < 0.06
    increment = 0x9E3779B97F4A7C15  # of splitmix64: such seeds would share one stream
    assert uniform(increment, 0) != uniform(0, 1)


def test_no_rows_give_no_results() -> None:
    assert sample(torch.empty(0, 64), [], []) == []


def test_top_p_of_1_keeps_the_last_token_though_rounding_says_the_row_is_full() -> None:
    """The sum of a row's parts may come out above its whole, which is summed in another order."""
    log_weights, ids = np.zeros((1, 4), np.float32), np.arange(4)[None]
    short = np.array([[3.0]])  # as if rounded; the four weigh 4
    for top_p, drawn in ((1.0, 3), (0.999, 2)):
        limits = np.array([[0.0, top_p, 1e-9]])
        points = np.array([[0.99]])
        assert _pick(log_weights, ids, short, limits, points)[0].tolist() == [drawn]


def test_what_is_ranked_is_enough_only_if_nothing_that_may_be_drawn_is_left_out() -> None:
    """With top_p = 1 that is for min_p to say: a sum that is rounded hides what is lighter than its last digit."""
    log_weights, ids = np.array([[0.0, -12.0]], np.float32), np.arange(2)[None]
    total = np.exp(log_weights).sum(1, keepdims=True, dtype=np.float64) - 1e-9  # as if rounded
    points = np.array([[0.5]])
    for top_p, min_p, enough in ((1.0, 1e-9, False), (1.0, 0.5, True), (0.9, 1e-9, True)):
        limits = np.array([[0.0, top_p, min_p]])
        assert _pick(log_weights, ids, total, limits, points)[1].tolist() == [enough]


@pytest.mark.parametrize("seed", range(4))
def test_a_point_at_either_end_of_a_chunk_draws_a_token_that_has_weight(seed: int) -> None:
    """A chunk's sum is rounded: what is left of the point must not lead out of the chunk, nor onto a weight of 0."""
    weights = random_logits(1, 64 * CHUNK, seed).exp().numpy()
    weights[0, CHUNK - 1 :: CHUNK] = 0.0  # the last of each chunk cannot be drawn
    weights[0, ::CHUNK] = 0.0  # nor the first
    sums = np.cumsum(_chunk_sums(weights), axis=1, dtype=np.float64)[0]
    ends = [float(end / sums[-1]) for end in sums[:-1]]
    points = [point for end in ends for point in (math.nextafter(end, 0.0), end, math.nextafter(end, 1.0))]
    points += [0.0, 1.0 - 2.0**-53]
    drawn = _invert_whole(np.repeat(weights, len(points), axis=0), np.array(points)[:, None])
    assert bool((weights[0, drawn] > 0.0).all())


def test_a_point_below_what_a_chunk_begins_with_draws_its_first_token_that_has_weight() -> None:
    """Half a digit more rounds up to the chunk's end, and taking it off again does not lead back to its beginning."""
    weights = np.zeros((1, 3 * CHUNK), np.float32)
    weights[0, [3, CHUNK + 8, 2 * CHUNK + 8]] = [1.0, 2.0**-52, 2.0**-53]
    assert _invert_whole(weights, np.array([[1.0 - 2.0**-53]])).tolist() == [2 * CHUNK + 8]


def test_what_choosing_takes_grows_with_draws_and_vocabulary_and_is_bounded_for_what_is_sorted() -> None:
    large, small = SORTED_AT_ONCE, 100
    # One row at a time, where a row is all that is sorted, or scored, at once.
    assert choice_bytes(3, 3, large) == large * (3 * 40 + 128)
    # All rows, where they are few and short.
    assert choice_bytes(3, 4, small) == small * (3 * 40 + 3 * 128)
    assert choice_bytes(0, 4, small) == 4 * small * 12
