"""The table of a run's draws: the parameters as they are, and the uniform numbers of all rows at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.sampling.sampler import NUM_PARAMS, DrawTable, SamplingParams, stream_key, uniform, uniforms

seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63, 2**64 - 1]))
positions = st.integers(0, 2**40)


@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=20))
def test_many_uniforms_are_those_of_one_at_a_time(draws: list[tuple[int, int]]) -> None:
    keys = np.array([stream_key(seed) for seed, _ in draws], np.uint64)
    at = np.array([position for _, position in draws], np.int64)
    assert uniforms(keys, at).tolist() == [uniform(seed, position) for seed, position in draws]


@given(st.lists(st.tuples(seeds, st.sampled_from([0.0, 0.7])), min_size=1, max_size=9), positions)
def test_a_table_holds_each_rows_parameters_and_next_uniform(rows: list[tuple[int, float]], first: int) -> None:
    params = [
        SamplingParams(seed=seed, temperature=temperature, top_k=3 + row, top_p=0.5, min_p=0.25)
        for row, (seed, temperature) in enumerate(rows)
    ]
    table = DrawTable(params)
    for start in (first, first + 1):
        at = [start + 2 * row for row in range(len(rows))]
        expected = [
            [p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, position) if p.temperature else 0.0]
            for p, position in zip(params, at, strict=True)
        ]
        drawn = table.at(at)
        assert drawn.shape == (len(rows), NUM_PARAMS)
        assert drawn.tolist() == expected
