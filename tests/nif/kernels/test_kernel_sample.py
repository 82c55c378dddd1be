"""Sampling on the device against the host's sampler, its twin."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels import sample as sample_kernel
from genbatch.nif.kernels.sample import edit_logits
from genbatch.nif.sampling import choice
from genbatch.nif.sampling.device_draws import row_edits, sample_on_device
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, SamplingParams

# Shrinking a failure under the interpreter takes minutes and hardly helps.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
VOCAB = 60

params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0, 5e-324, 1e39]),
    top_k=st.sampled_from([0, 1, 4, 100]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 1e-9]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    logit_bias=st.sampled_from([None, {0: 2.0, 7: -3.0}]),
    logprobs=st.sampled_from([None, 0, 2]),
    min_tokens=st.sampled_from([0, 5]),
    suppress=st.just(frozenset({7, 8})),
)


def state_of(params):
    state = SamplerState(params, [1, 2, 7])
    for token in (2, 9, 9):
        state.accept(token)
    return state


def logits_of(rows, seed, device, vocab=VOCAB):
    """Coarse values, so that many tokens tie."""
    drawn = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.mul(2).round().div(2).to(device)


def assert_same(actual, expected):
    assert [result.token_id for result in actual] == [result.token_id for result in expected]
    for left, right in zip(actual, expected, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert [token for token, _ in left.top] == [token for token, _ in right.top]
        assert [value for _, value in left.top] == pytest.approx([value for _, value in right.top], abs=1e-4)


@settings(max_examples=12, deadline=None, phases=PHASES)
@given(st.lists(params, min_size=1, max_size=2), st.integers(0, 2**16), st.integers(0, 10**6))
def test_device_draws_equal_the_hosts(device, rows, seed, position):
    logits = logits_of(len(rows), seed, device)
    states = [state_of(row) for row in rows]
    positions = [position + row for row in range(len(rows))]
    assert_same(sample_on_device(logits, states, positions), choice.sample(logits.cpu().numpy(), states, positions))


@pytest.mark.parametrize("truncated", [True, False])
def test_a_vocabulary_in_several_chunks_draws_as_the_host_does(device, monkeypatch, truncated):
    monkeypatch.setattr(sample_kernel, "_CHUNK", 16)
    logits = logits_of(3, 5, device)
    logits[:, 20:40] = -100.0  # a whole chunk of tokens whose weight is 0
    limits = {"top_k": 9, "top_p": 0.8} if truncated else {}
    states = [SamplerState(SamplingParams(seed=seed, temperature=1.0, **limits), []) for seed in range(3)]
    assert_same(sample_on_device(logits, states, [4, 5, 6]), choice.sample(logits.cpu().numpy(), states, [4, 5, 6]))


@pytest.mark.parametrize("room", [2, 2048])
@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 3}, {"top_k": 40, "top_p": 0.8, "min_p": 0.05}],
    ids="+".join,
)
def test_a_search_of_candidates_and_one_of_the_whole_row_give_the_hosts_tokens(device, monkeypatch, limits, room):
    monkeypatch.setattr(sample_kernel, "_CHUNK", 16)  # four chunks in two pieces
    monkeypatch.setattr(sample_kernel, "_ROOM", room)
    logits = logits_of(4, 17, device)
    states = [
        SamplerState(SamplingParams(seed=seed, temperature=temperature, **limits), [])
        for seed, temperature in enumerate((0.3, 1.0, 4.0, 0.0))
    ]
    assert_same(sample_on_device(logits, states, [3] * 4), choice.sample(logits.cpu().numpy(), states, [3] * 4))


def test_only_the_tokens_that_may_be_kept_are_gathered(device, monkeypatch):
    monkeypatch.setattr(sample_kernel, "_CHUNK", 16)
    kept = {}
    launch = sample_kernel._gather_kernel

    class Spy:
        def __getitem__(self, grid):
            def run(near, ids, *arguments, **options):
                near.fill_(float("nan"))
                launch[grid](near, ids, *arguments, **options)
                kept["logits"] = near.clone()

            return run

    monkeypatch.setattr(sample_kernel, "_gather_kernel", Spy())
    logits = torch.zeros((2, 100), device=device)
    logits[0, 70:73] = 30.0  # beside them the others weigh nothing
    params = torch.tensor([[1.0, 0, 0.9, 0, 0.5], [0.0, 0, 1.0, 0, 0.5]], dtype=torch.float64, device=device)
    assert sample_kernel.draw_tokens(logits, params).tolist() == [71, 0]
    assert kept["logits"][0, :3].tolist() == [30.0] * 3 and kept["logits"][0, 3:].isnan().all()
    assert kept["logits"][1].isnan().all()  # a greedy row has none


def test_a_draw_depends_neither_on_its_row_nor_on_the_batch(device):
    logits = logits_of(3, 8, device)
    states = [SamplerState(SamplingParams(seed=s, temperature=2.0, top_p=0.95), []) for s in (11, 12, 13)]
    together = sample_on_device(logits, states, [7, 8, 9])
    order = [2, 0, 1]
    shuffled = sample_on_device(logits[order], [states[i] for i in order], [(7, 8, 9)[i] for i in order])
    alone = [sample_on_device(logits[i : i + 1], [states[i]], [7 + i])[0] for i in range(3)]
    assert together == alone == [shuffled[order.index(i)] for i in range(3)]


def test_rows_without_a_number_to_draw_from_fault_alone(device):
    logits = logits_of(4, 1, device)
    logits[0, 5] = float("nan")
    logits[1, 5] = float("inf")
    greedy = SamplingParams(seed=0)
    nothing_left = SamplingParams(seed=0, suppress=frozenset(range(VOCAB)), min_tokens=1)
    states = [SamplerState(p, []) for p in (greedy, greedy, nothing_left, greedy)]
    results = sample_on_device(logits, states, [0] * 4)
    assert results == choice.sample(logits.cpu().numpy(), states, [0] * 4)
    assert [type(result) for result in results] == [SampleFault] * 3 + [Sampled]


def test_an_edit_outside_the_vocabulary_changes_no_neighbour(device):
    logits = torch.zeros((2, 8), device=device)
    states = [
        SamplerState(SamplingParams(seed=0, logit_bias={9: 5.0}), []),
        SamplerState(SamplingParams(seed=0), []),
    ]
    assert edit_logits(logits, [row_edits(state) for state in states]).eq(0).all()
