"""Arrival times: their rate is kept, and burstiness spreads them."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.clients.bench.arrivals import arrival_times


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
