"""Rules by token ids: the allowed tokens, and sequences that an output never contains."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.sampling.constraints import TokenRules

TOKENS = st.integers(0, 69)  # three words of a mask


def allowed_by(rules: TokenRules) -> set[int]:
    rules.prepare()
    rules.prepare()  # a second call does nothing
    words = rules.allowed.view(np.uint32).tolist()
    return {32 * word + bit for word, bits in enumerate(words) for bit in range(32) if bits >> bit & 1}


@given(
    allowed=st.none() | st.sets(TOKENS, min_size=1),
    bad=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4),
    output=st.lists(st.integers(0, 3), max_size=8),
    inner=st.none() | st.sets(TOKENS, min_size=1),
)
def test_a_token_may_follow_if_it_is_allowed_and_completes_no_bad_sequence(
    allowed: set[int] | None, bad: list[tuple[int, ...]], output: list[int], inner: set[int] | None
) -> None:
    within = None if inner is None else TokenRules(inner, [], 3)
    rules = TokenRules(allowed, bad, 3, within)
    for place in range(len(output) + 1):
        expected = set(range(96)) if allowed is None else set(allowed)
        if inner is not None:
            expected &= inner
        for token_id in range(96):
            written = (*output[:place], token_id)
            if any(written[-len(sequence) :] == sequence for sequence in bad):
                expected.discard(token_id)
        assert allowed_by(rules) == expected
        assert (rules.fault is None) is bool(expected)
        if place < len(output):
            rules.accept(output[place])


def test_a_fork_knows_the_tokens_so_far_and_changes_nothing() -> None:
    rules = TokenRules(range(10), [(3, 4)], 3, TokenRules(range(8), [(5, 6)], 3))
    for token_id in (5, 3):
        rules.accept(token_id)
    fork = rules.fork()
    assert allowed_by(fork) == set(range(8)) - {4}
    fork.accept(5)
    assert allowed_by(fork) == set(range(8)) - {6}
    assert allowed_by(rules) == set(range(8)) - {4}
