"""How many replicas a load wants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.fleet.routing import FleetLoad, RouterError, ScaleRule, wanted_replicas

RULE = ScaleRule(min_replicas=0, max_replicas=10, tokens_per_replica=1000)


def load(open: int = 0, tokens: int = 0, without: int = 0) -> FleetLoad:
    return FleetLoad(replicas=1, slots=8, open=open, tokens_waiting=tokens, without_replica=without)


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        (load(), 0),
        (load(without=1), 1),
        (load(open=1), 1),
        (load(open=6), 1),
        (load(open=7), 2),
        (load(tokens=1001), 2),
        (load(open=7, tokens=5500), 6),
        (load(open=1000), 10),
    ],
)
def test_slots_and_tokens_that_wait_want_replicas(what: FleetLoad, wanted: int) -> None:
    assert wanted_replicas(RULE, what) == wanted


@given(st.integers(0, 500), st.integers(0, 100_000), st.integers(0, 9))
def test_more_load_never_wants_fewer(open: int, tokens: int, without: int) -> None:
    wanted = wanted_replicas(RULE, load(open, tokens, without))
    assert 0 <= wanted <= 10
    assert wanted_replicas(RULE, load(open + 1, tokens, without)) >= wanted
    assert wanted_replicas(RULE, load(open, tokens + 500, without)) >= wanted
    fixed = ScaleRule(min_replicas=3, max_replicas=3)
    assert wanted_replicas(fixed, load(open, tokens, without)) == 3


@pytest.mark.parametrize(("low", "high"), [(-1, 2), (3, 2), (0, 0)])
def test_a_range_without_a_replica_is_refused(low: int, high: int) -> None:
    with pytest.raises(RouterError, match="not a range"):
        ScaleRule(min_replicas=low, max_replicas=high)
