"""A row's result depends on the row alone: bit for bit the same in any batch, in any order."""

from functools import cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.sampling.choice import sample
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams

NUM_ROWS = 8
WIDTHS = (5, 64, 1000, 9001)
PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 3, 50, 200, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([None, None, {0: 5.0, 4: -3.0}]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    min_tokens=st.sampled_from([0, 5]),
    suppress=st.just(frozenset({1})),
)


@cache
def logits(width: int) -> np.ndarray:
    """Rows from flat to steep, with ties, and one that fails."""
    rows = torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width))
    rows *= torch.linspace(0.2, 6.0, NUM_ROWS)[:, None]
    rows[2] = rows[2].round()
    rows[5, 3] = float("nan")
    return rows.numpy()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_gives_the_same_alone_and_in_any_batch(data: st.DataObject) -> None:
    rows = logits(data.draw(st.sampled_from(WIDTHS)))
    states = []
    for _ in range(NUM_ROWS):
        state = SamplerState(data.draw(PARAMS), [0, 2, 2])
        for token_id in data.draw(st.lists(st.integers(0, 4), max_size=6)):
            state.accept(token_id)
        states.append(state)
    positions = data.draw(st.lists(st.integers(0, 10**6), min_size=NUM_ROWS, max_size=NUM_ROWS))
    alone = [sample(rows[i : i + 1], [states[i]], [positions[i]])[0] for i in range(NUM_ROWS)]
    picked = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=40))
    batch = sample(rows[picked], [states[i] for i in picked], [positions[i] for i in picked])
    assert batch == [alone[i] for i in picked]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(NUM_ROWS)))
def test_the_order_of_rows_does_not_change_a_draw(order: list[int]) -> None:
    rows = logits(9001)
    states = [SamplerState(SamplingParams(seed=i, temperature=1.0, top_p=0.9), ()) for i in range(NUM_ROWS)]
    expected = sample(rows, states, range(NUM_ROWS))
    permuted = sample(rows[order], [states[i] for i in order], order)
    assert permuted == [expected[i] for i in order]
