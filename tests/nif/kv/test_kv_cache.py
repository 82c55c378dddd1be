"""Which block holds which positions of which sequence, and what a step may change about that."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.errors import BatchError, OptionError, OutOfBlocks
from genbatch.nif.kv import block_tables
from genbatch.nif.kv.block_pool import BlockPool, prefix_key
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import LayerGroup
from tests.nif.kv.reading import num_evicted

_FULL = LayerGroup((0,))


def _cache(
    num_blocks: int = 16,
    *,
    windows: Sequence[int | None] = (None,),
    sink_tokens: int = 0,
    block_size: int = 4,
    num_sequences: int = 4,
    allow_block_sharing: bool = True,
    max_per_sequence: int | None = None,
) -> KVCache:
    return KVCache(
        [LayerGroup((index,), window, 0 if window is None else sink_tokens) for index, window in enumerate(windows)],
        num_blocks=[num_blocks] * len(windows),
        block_size=block_size,
        num_sequences=num_sequences,
        allow_block_sharing=allow_block_sharing,
        max_per_sequence=max_per_sequence,
    )


def _write(kv: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """One step, as a prefill would do it."""
    kv.reserve([(seq_id, tokens, kv.length(seq_id))]).commit()
    kv.check_integrity()


# Steps


def test_positions_fill_blocks_in_order() -> None:
    kv = _cache()
    _write(kv, 1, range(6))
    assert list(kv.block_table(0, 1)) == [0, 1]
    assert kv.slots(0, 1, 2, 6) == [2, 3, 4, 5]
    _write(kv, 1, [6, 7, 8])
    assert (kv.length(1), len(kv.block_table(0, 1)), list(kv.tokens(1))) == (9, 3, list(range(9)))


def test_nothing_is_held_before_the_commit() -> None:
    kv = _cache()
    reservation = kv.reserve([(0, [1, 2], 0)])
    assert (kv.length(0), len(kv.block_table(0, 0))) == (0, 1)
    kv.check_integrity()
    reservation.commit()
    assert kv.length(0) == 2


def test_rollback_leaves_everything_as_it_was() -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    kv.seq_cp(0, 1)
    tables = [list(kv.block_table(0, seq_id)) for seq_id in range(3)]
    free = kv.free_blocks
    reservation = kv.reserve([(0, [9] * 7, 6), (1, [8], 6), (2, [5], 0)])
    assert reservation.copies == [[(1, 2), (1, 5)]]
    kv.check_integrity()
    reservation.rollback()
    assert [list(kv.block_table(0, seq_id)) for seq_id in range(3)] == tables
    assert (kv.free_blocks, [kv.length(seq_id) for seq_id in range(3)]) == (free, [6, 6, 0])
    kv.check_integrity()
    assert kv.reserve([(0, [9] * 7, 6), (1, [8], 6), (2, [5], 0)]).copies == reservation.copies


def test_a_reservation_ends_once() -> None:
    kv = _cache()
    reservation = kv.reserve([(0, [1], 0)])
    with pytest.raises(AssertionError, match="neither committed nor rolled back"):
        kv.reserve([(1, [1], 0)])
    with pytest.raises(AssertionError, match="a step is in progress"):
        kv.seq_rm(0)
    reservation.commit()
    with pytest.raises(AssertionError, match="ends once"):
        reservation.rollback()
    assert kv.length(0) == 1


def test_h09_a_step_that_one_group_cannot_hold_allocates_nothing_in_any() -> None:
    kv = KVCache([_FULL, LayerGroup((1,), 100)], num_blocks=[8, 2], block_size=4, num_sequences=2)
    _write(kv, 0, range(4))
    with pytest.raises(OutOfBlocks) as caught:
        kv.reserve([(0, [1], 4), (1, [1], 0)])
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert kv.free_blocks == (7, 1)
    assert [len(kv.block_table(group, seq_id)) for group in (0, 1) for seq_id in (0, 1)] == [1, 0, 1, 0]
    kv.check_integrity()


def test_h09_a_draft_looks_at_every_group() -> None:
    kv = KVCache([_FULL, LayerGroup((1,), 8)], num_blocks=[8, 3], block_size=4, num_sequences=2)
    _write(kv, 0, range(8))
    empty = kv.beginning(range(100, 120), b"", [])
    assert kv.draft().reach_from(empty) == 4  # the first group has six blocks left, the window one
    assert kv.draft().begin(empty, 4)
    assert not kv.draft().begin(empty, 5)
    assert kv.draft().reach(0) == 12


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([(4, [1], 0)], "sequence 4 is outside 0..3"),
        ([(-1, [1], 0)], "sequence -1 is outside 0..3"),
        ([(0, [1], 1)], "sequence 0 holds 2 positions, n_past says 1"),
        ([(0, [1], 3)], "sequence 0 holds 2 positions, n_past says 3"),
        ([(0, [], 2)], "sequence 0: an entry without tokens"),
        ([(0, [1], 2), (0, [1], 2)], "a sequence appears twice"),
        ([(1, [1] * 13, 0)], "sequence 1: 13 positions are more than max_per_sequence = 12"),
    ],
)
def test_an_entry_that_contradicts_the_cache_is_named(entries: list[tuple[int, list[int], int]], reason: str) -> None:
    kv = _cache(max_per_sequence=12)
    _write(kv, 0, [5, 6])
    with pytest.raises(BatchError, match=reason):
        kv.reserve([(2, [1] * 8, 0), *entries])
    assert kv.free_blocks == (15,)
    kv.check_integrity()


def test_a09_the_position_after_the_cap_is_refused() -> None:
    kv = _cache(max_per_sequence=8)
    _write(kv, 0, range(7))
    _write(kv, 0, [7])
    with pytest.raises(BatchError, match="max_per_sequence = 8"):
        kv.reserve([(0, [8], 8)])
    with pytest.raises(BatchError, match="max_per_sequence = 8"):
        kv.attach_prefix(1, range(9))
    assert kv.length(0) == 8


@pytest.mark.parametrize(
    ("options", "named"),
    [({"block_size": 0}, "block_size"), ({"num_sequences": 0}, "num_sequences"), ({"max_per_sequence": 0}, "max_per")],
)
def test_an_option_below_one_is_named(options: dict[str, int], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        _cache(**options)  # type: ignore[arg-type]


# Copies


def test_a_copy_shares_whole_blocks_and_copies_the_last_on_write() -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    kv.seq_cp(0, 1, 0, 6)
    assert list(kv.block_table(0, 1)) == [0, 1]
    assert kv.counts().used == 2
    reservation = kv.reserve([(1, [7], 6)])
    assert reservation.copies == [[(1, 2)]]
    reservation.commit()
    assert (list(kv.block_table(0, 0)), list(kv.block_table(0, 1))) == ([0, 1], [0, 2])
    assert kv.reserve([(0, [8], 6)]).copies == [[]]  # its own again


def test_a_copy_may_end_inside_a_block_that_the_source_has_filled() -> None:
    kv = _cache()
    _write(kv, 0, range(8))
    kv.seq_cp(0, 1, 0, 6)
    reservation = kv.reserve([(1, [9], 6)])
    assert reservation.copies == [[(1, 2)]]
    reservation.commit()
    assert list(kv.tokens(1)) == [0, 1, 2, 3, 4, 5, 9]


def test_a_copy_may_continue_what_the_target_holds() -> None:
    kv = _cache()
    _write(kv, 0, range(10))
    _write(kv, 1, range(6))
    kv.seq_cp(0, 1, 6, 10)
    assert list(kv.tokens(1)) == list(range(10))
    assert list(kv.block_table(0, 1)) == [3, 1, 2]  # its first block, and the source's from the partly filled one on
    kv.check_integrity()


@pytest.mark.parametrize(
    ("src", "dst", "p0", "p1", "reason"),
    [
        (0, 0, 0, 2, "onto itself"),
        (0, 9, 0, 2, "sequence 9 is outside"),
        (0, 2, 0, 7, r"positions \[0, 7\) are not within its 6"),
        (0, 2, 1, 3, "sequence 2 holds 0 positions, the copy starts at 1"),
        (0, 1, 0, 3, "sequence 1 holds 2 positions, the copy starts at 0"),
        (0, 1, 2, 3, "sequences 0 and 1 differ before 2"),
    ],
)
def test_a_copy_that_does_not_fit_is_named(src: int, dst: int, p0: int, p1: int, reason: str) -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    _write(kv, 1, [7, 8])
    with pytest.raises(BatchError, match=reason):
        kv.seq_cp(src, dst, p0, p1)
    assert kv.counts().used == 3
    kv.check_integrity()


def test_h11_the_surviving_sharer_keeps_the_blocks() -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    kv.seq_cp(0, 1)
    kv.seq_rm(0)
    assert list(kv.block_table(0, 1)) == [0, 1]
    assert kv.counts().used == 2
    kv.seq_rm(1)
    assert kv.counts().used == 0
    kv.check_integrity()


# Removal


def test_the_tail_can_be_removed_and_written_again() -> None:
    kv = _cache()
    _write(kv, 0, range(10))
    kv.seq_rm(0, 5)
    assert (list(kv.tokens(0)), len(kv.block_table(0, 0))) == ([0, 1, 2, 3, 4], 2)
    _write(kv, 0, [9, 9, 9])
    # A copy was written to, so both contents are known.
    assert kv.attach_prefix(1, [*range(8), 1]) == 8
    assert kv.attach_prefix(2, [0, 1, 2, 3, 4, 9, 9, 9, 1]) == 8


def test_a_block_that_is_written_again_without_room_for_a_copy_is_known_for_its_new_content_only() -> None:
    kv = _cache(3)
    _write(kv, 0, range(10))
    kv.seq_rm(0, 5)
    _write(kv, 1, [7])
    _write(kv, 0, [9, 9, 9])
    kv.seq_rm(1)
    assert kv.attach_prefix(1, [*range(8), 1]) == 4
    assert kv.attach_prefix(2, [0, 1, 2, 3, 4, 9, 9, 9, 1]) == 8


@pytest.mark.parametrize(
    ("p0", "p1", "reason"),
    [
        (2, 4, "leaves a hole"),
        (0, 4, "leaves a hole"),
        (3, 7, "not within its 6"),
        (-1, 6, "not within"),
        (4, 3, "not within"),
    ],
)
def test_a_removal_that_does_not_fit_is_named(p0: int, p1: int, reason: str) -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    with pytest.raises(BatchError, match=reason):
        kv.seq_rm(0, p0, p1)
    assert kv.length(0) == 6


def test_removing_nothing_changes_nothing() -> None:
    kv = _cache()
    kv.seq_rm(0)
    _write(kv, 0, range(6))
    kv.seq_rm(0, 3, 3)
    kv.seq_rm(0, 6)
    assert kv.length(0) == 6


# The prefix cache


def test_h11_a_prompt_seen_before_reuses_its_whole_blocks() -> None:
    kv = _cache()
    _write(kv, 0, range(10))
    assert kv.attach_prefix(1, [*range(10), 99]) == 8
    assert list(kv.block_table(0, 1)) == list(kv.block_table(0, 0))[:2]
    assert kv.prefix_cache is not None
    assert (kv.prefix_cache.num_query_tokens, kv.prefix_cache.num_hit_tokens) == (8, 8)


def test_h11_the_last_token_of_a_prompt_is_always_evaluated() -> None:
    kv = _cache()
    _write(kv, 0, range(8))
    assert kv.attach_prefix(1, range(8)) == 4
    assert kv.attach_prefix(2, range(9)) == 8


@pytest.mark.parametrize("windows", [(None,), (None, 3), (6,)])
def test_h11_of_a_prompt_seen_before_only_the_last_token_is_evaluated(windows: tuple[int | None, ...]) -> None:
    kv = _cache(windows=windows)
    assert kv.attach_prefix(0, range(11)) == 0
    _write(kv, 0, range(11))
    kv.seq_rm(0)  # before a token of an answer
    for seq_id, answer in ((1, [50]), (2, [60, 61, 62, 63, 64])):
        assert kv.attach_prefix(seq_id, range(11)) == 10
        _write(kv, seq_id, [10, *answer])
        kv.check_integrity()
    _write(kv, 1, [51, 52])
    kv.seq_rm(1)
    kv.seq_rm(2)
    assert kv.beginning(range(11), b"", []).length == kv.attach_prefix(3, range(11)) == 10
    assert kv.attach_prefix(1, [*range(10), 99]) == 10
    kv.seq_rm(1)
    assert kv.attach_prefix(1, [*range(9), 99, 99]) == 8  # another tail
    assert kv.attach_prefix(2, range(11), b"tenant") == 0


def test_h11_each_of_two_answers_to_one_prompt_can_be_continued() -> None:
    kv = _cache()
    for answer in (range(50, 56), range(60, 66)):
        kv.attach_prefix(0, range(6))
        _write(kv, 0, [*range(6), *answer][kv.length(0) :])
        kv.seq_rm(0)
    for answer in (range(50, 56), range(60, 66)):
        assert kv.attach_prefix(0, [*range(6), *answer, 7]) == 12
        kv.seq_rm(0)


def test_a_tail_that_is_written_over_is_not_found() -> None:
    kv = _cache(3)
    kv.attach_prefix(0, range(8))
    _write(kv, 0, range(8))
    kv.seq_rm(0, 5)
    _write(kv, 1, [7])
    _write(kv, 0, [9])
    kv.seq_rm(1)
    assert kv.attach_prefix(1, range(8)) == 4
    kv.check_integrity()


def test_h11_sharing_can_be_turned_off() -> None:
    kv = _cache(allow_block_sharing=False)
    _write(kv, 0, range(8))
    assert kv.attach_prefix(1, range(9)) == 0
    kv.seq_rm(0)
    assert kv.counts().initialized == 0
    assert kv.prefix_cache is None


def test_h11_a_prompt_continues_where_a_finished_sequence_left_its_window() -> None:
    kv = _cache(windows=(None, 8))
    _write(kv, 0, range(30))
    kv.seq_rm(0)
    assert kv.attach_prefix(1, range(40)) == 28
    assert num_evicted(kv, 1, 1) == 5  # what 28 does not attend to is not taken out of the cache
    kv.check_integrity()


def test_h11_the_window_at_a_prompts_end_outlives_what_a_long_answer_and_other_prompts_pass() -> None:
    kv = KVCache([LayerGroup((0,)), LayerGroup((1,), 8)], num_blocks=[99, 14], block_size=4, num_sequences=2)
    kv.attach_prefix(0, range(24))
    for start in range(0, 64, 8):
        _write(kv, 0, range(start, start + 8))
    kv.seq_rm(0)
    for start in range(0, 64, 8):
        _write(kv, 1, range(100 + start, 108 + start))
    kv.seq_rm(1)
    for end in (24, 64, 64):  # of the prompt, and of the answer
        assert kv.attach_prefix(0, [*range(end), 99]) == end
        kv.seq_rm(0)
    assert kv.attach_prefix(0, [*range(44), 99]) == 24  # in the midst of the answer nobody kept the window


def test_h11_tenants_do_not_find_each_others_blocks() -> None:
    kv = _cache()
    assert kv.attach_prefix(0, range(9), prefix_key("one")) == 0
    _write(kv, 0, range(9))
    assert kv.attach_prefix(1, range(9), prefix_key("two")) == 0
    assert kv.attach_prefix(2, range(9)) == 0
    assert kv.attach_prefix(3, range(9), prefix_key("one")) == 8


def test_h11_what_a_tenant_adds_to_a_shared_prompt_stays_its_own() -> None:
    kv = _cache(32, num_sequences=6)
    _write(kv, 0, range(6))  # a system prompt, of nobody
    prompt = [*range(6), 50, 51, 52, 53, 54, 55, 56]
    for seq_id in (1, 2, 3):
        kv.seq_cp(0, seq_id)
    assert kv.attach_prefix(1, prompt, b"one") == 6
    _write(kv, 1, prompt[6:])
    assert kv.attach_prefix(2, prompt, b"two") == 6
    assert kv.attach_prefix(3, prompt, b"one") == 12  # beyond the partly filled block of the system prompt
    kv.check_integrity()
    kv.seq_cp(1, 4)  # a fork is its tenant's too
    _write(kv, 4, [60, 61, 62, 63])
    assert kv.attach_prefix(5, [*prompt, 60, 61, 62, 63], b"") == 4


def test_h12_blocks_are_reused_after_their_sequence_finished() -> None:
    kv = _cache()
    _write(kv, 0, range(10))
    kv.seq_rm(0)
    counts = kv.counts()
    assert (counts.used, counts.free, counts.initialized) == (0, 16, 2)
    assert kv.attach_prefix(1, range(10)) == 8
    assert list(kv.block_table(0, 1)) == [0, 1]
    assert kv.counts().used == 2


def test_h12_pressure_discards_the_least_recent_sequence_from_its_end() -> None:
    kv = _cache(6)
    _write(kv, 0, [1] * 8)
    _write(kv, 1, [2] * 8)
    kv.seq_rm(0)
    kv.seq_rm(1)
    _write(kv, 2, [3] * 12)  # two blocks were never used; one more has to be discarded
    kv.seq_rm(2, 0)
    assert kv.attach_prefix(3, [1] * 9) == 4  # the second block of the sequence that ended first is gone
    kv.seq_rm(3)
    assert kv.attach_prefix(3, [2] * 9) == 8


class _MostRecentFirst(BlockPool):
    """What demotion was once: the block released last goes first."""

    def allocate(self, count: int) -> list[int]:
        self._initialized = dict.fromkeys(reversed(self._initialized))
        taken = super().allocate(count)
        self._initialized = dict.fromkeys(reversed(self._initialized))
        return taken


def _shares_found(groups: int = 4, beginnings: int = 8, prompts: int = 300) -> list[float]:
    """Of a group of users after another, each with beginnings of its own: how much of these is found."""
    rng = random.Random(0)
    kv = KVCache([_FULL], num_blocks=[256], block_size=16, num_sequences=1)
    shares = []
    for _ in range(groups):
        known = [[rng.randrange(1000) for _ in range(320)] for _ in range(beginnings)]
        found = 0
        for _ in range(prompts):
            tokens = rng.choice(known) + [rng.randrange(1000) for _ in range(rng.randint(16, 64))]
            held = kv.attach_prefix(0, tokens)
            found += held
            kv.reserve([(0, tokens[held:], held)]).commit()
            kv.seq_rm(0)
        shares.append(found / (prompts * 320))
    kv.check_integrity()
    return shares


def test_h12_the_prefix_cache_follows_the_prompts_in_fashion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of ADR 8, which tells the two orders of demotion apart."""
    assert min(_shares_found()) > 0.9
    monkeypatch.setattr(block_tables, "BlockPool", _MostRecentFirst)
    first, *others = _shares_found()
    assert max(others) < 0.15 < first / 1.5, "what the first group left is kept for good"


def test_a_block_matched_by_two_is_freed_by_the_last() -> None:
    kv = _cache()
    _write(kv, 0, range(5))
    kv.seq_rm(0)
    kv.attach_prefix(1, range(5))
    kv.attach_prefix(2, range(5))
    kv.seq_rm(1)
    assert kv.counts().used == 1
    kv.seq_rm(2)
    assert kv.counts().used == 0


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([], "no tokens"), ([5, 7, 9], "does not begin with"), ([5, 6], "nothing is left to evaluate")],
)
def test_a_prompt_that_does_not_fit_is_named(tokens: list[int], reason: str) -> None:
    kv = _cache()
    _write(kv, 0, [5, 6])
    with pytest.raises(BatchError, match=reason):
        kv.attach_prefix(0, tokens)
    assert kv.length(0) == 2


# Windows


def test_h07_a_windowed_group_drops_blocks_behind_its_window_and_keeps_positions() -> None:
    kv = _cache(windows=(None, 6))
    for token in range(20):
        _write(kv, 0, [token])
    assert len(kv.block_table(0, 0)) == len(kv.block_table(1, 0)) == 5
    assert (num_evicted(kv, 0, 0), num_evicted(kv, 1, 0)) == (0, 3)
    assert list(kv.block_table(1, 0))[:3] == [0, 0, 0]
    assert (kv.counts(0).used, kv.counts(1).used) == (5, 2)
    assert kv.slots(0, 0, 0, 1) == [0]
    with pytest.raises(BatchError, match=r"not all in 12\.\.19"):
        kv.slots(1, 0, 11, 13)


def test_h07_eviction_waits_for_the_commit() -> None:
    kv = _cache(windows=(4,))
    _write(kv, 0, range(6))
    reservation = kv.reserve([(0, [6], 6)])
    assert num_evicted(kv, 0, 0) == 0
    reservation.rollback()
    assert num_evicted(kv, 0, 0) == 0
    _write(kv, 0, [6])
    assert num_evicted(kv, 0, 0) == 1


def test_h07_a_sequence_cannot_end_where_its_window_is_gone() -> None:
    kv = _cache(windows=(None, 6))
    for token in range(20):
        _write(kv, 0, [token])
    assert kv.shortest_prefix(0) == 17
    for refused in (lambda: kv.seq_rm(0, 16), lambda: kv.seq_cp(0, 1, 0, 16)):
        with pytest.raises(BatchError, match="cannot end at 16"):
            refused()
    kv.seq_cp(0, 1, 0, 17)
    kv.seq_rm(0, 17)
    assert num_evicted(kv, 1, 1) == 3
    kv.check_integrity()


def test_b21_a_window_as_long_as_the_sequence_drops_nothing() -> None:
    kv = _cache(windows=(20,))
    _write(kv, 0, range(20))
    assert num_evicted(kv, 0, 0) == 0


def test_b21_the_blocks_of_sinks_stay_and_what_lies_between_goes() -> None:
    """Sinks of 6 positions in blocks of 4: two blocks stay, and then those of the last 5 positions."""
    kv = _cache(windows=(5,), sink_tokens=6)
    most = kv.most_held(40)
    held = []
    for token in range(40):
        reservation = kv.reserve([(0, [token], token)])
        held.append(kv.blocks_held(0)[0])  # before anything is given back
        reservation.commit()
        kv.check_integrity()
    assert (max(held),) == most == (2 + 2,)
    assert (num_evicted(kv, 0, 0), kv.blocks_held(0)) == (7, (3,))  # the last token saw positions 35 to 39
    first = list(kv.block_table(0, 0))[:2]
    assert kv.slots(0, 0, 0, 6) == [4 * first[0] + i for i in range(4)] + [4 * first[1] + i for i in range(2)]
    with pytest.raises(BatchError, match=r"not all in 36\.\.39"):
        kv.slots(0, 0, 7, 9)
    tokens, [blocks] = kv.export(0)
    assert blocks == [*first, kv.block_table(0, 0)[9]]
    assert kv.beginning_from_host(40).fresh == (3,)
    assert [len(ids) for ids in kv.import_(1, tokens)] == [3]
    kv.check_integrity()
    assert kv.held_only_by((1,)) == (3,)


@pytest.mark.parametrize("end", [3, 9, 14])
def test_b21_a_beginning_can_be_shared_within_its_sinks_and_behind_them(end: int) -> None:
    """Nothing has gone yet, as the window begins within the sinks."""
    kv = _cache(windows=(8, None), sink_tokens=9)
    _write(kv, 0, range(20))
    kv.seq_cp(0, 1, 0, end)
    kv.check_integrity()
    assert len(kv.block_table(0, 1)) == len(kv.block_table(1, 1)) == -(-end // 4)
    assert list(kv.block_table(0, 1)) == list(kv.block_table(0, 0))[: -(-end // 4)]
    for token in range(end, 30):
        _write(kv, 1, [100 + token])
    shared = end // 4  # whole blocks; the next one was written to, and so copied
    assert list(kv.block_table(0, 1))[:shared] == list(kv.block_table(0, 0))[:shared]
    assert not set(kv.block_table(1, 1)[shared:]) & set(kv.block_table(1, 0)[shared:])
    assert len(kv.slots(0, 1, 0, 9)) == 9


# Counts and estimates


def test_b11_free_and_used_blocks_make_up_the_maximum_at_every_tick() -> None:
    kv = _cache(windows=(None, 6))
    for tick in range(20):
        reservation = kv.reserve([(seq_id, [tick], tick) for seq_id in range(3)])
        for group in (0, 1, None):
            counts = kv.counts(group)
            assert counts.free + counts.used == counts.max == (32 if group is None else 16)
        reservation.commit()
        if tick == 10:
            kv.seq_rm(1)
            break
    assert kv.counts(0).used == 6


_lengths = st.integers(1, 40)


@given(
    prompt_len=_lengths,
    max_new_tokens=_lengths,
    window=st.integers(1, 20),
    block_size=st.integers(1, 7),
    sink_tokens=st.integers(0, 9),
)
def test_s06_the_estimate_equals_the_allocation_at_full_length(
    prompt_len: int, max_new_tokens: int, window: int, block_size: int, sink_tokens: int
) -> None:
    kv = _cache(100, windows=(None, window), block_size=block_size, sink_tokens=sink_tokens)
    estimate = kv.most_held(prompt_len + max_new_tokens - 1)
    most = [0, 0]
    for position in range(prompt_len + max_new_tokens - 1):
        reservation = kv.reserve([(0, [0], position)])
        most = [max(most[group], kv.counts(group).used) for group in (0, 1)]
        assert kv.still_to_take(0, prompt_len + max_new_tokens - 1)[0] == estimate[0] - kv.counts(0).used
        reservation.commit()
    assert tuple(most) == estimate
    assert kv.counts(0).used == estimate[0]
    assert kv.free_blocks[1] >= 100 - estimate[1]


def test_s06_a_prefilled_chunk_and_a_shared_tail_count_towards_what_is_still_needed() -> None:
    kv = _cache()
    _write(kv, 0, range(6))
    kv.seq_cp(0, 1)
    before = kv.free_blocks
    assert kv.still_to_take(1, 6) == (0,)
    assert kv.still_to_take(1, 10) == (2,)
    _write(kv, 1, [0] * 4)
    assert before[0] - kv.free_blocks[0] == 2


# Save and restore


def test_h16_a_sequence_comes_back_with_its_tokens_and_needs_no_evaluation() -> None:
    kv = _cache(windows=(None, 6))
    for token in range(14):
        _write(kv, 0, [token])
    tokens, blocks = kv.export(0)
    assert [len(ids) for ids in blocks] == [4, 2]
    kv.seq_rm(0)
    filled = kv.import_(2, tokens, b"")
    assert [len(ids) for ids in filled] == [4, 2]
    assert (list(kv.tokens(2)), num_evicted(kv, 1, 2)) == (tokens, 2)
    assert [list(kv.block_table(group, 2))[-2:] for group in (0, 1)] == [ids[-2:] for ids in filled]
    kv.check_integrity()
    _write(kv, 2, [14])


def test_h16_a_restore_that_does_not_fit_changes_nothing() -> None:
    kv = _cache(4)
    _write(kv, 0, range(8))
    with pytest.raises(OutOfBlocks):
        kv.import_(1, range(12))
    with pytest.raises(BatchError, match="holds 8 positions already"):
        kv.import_(0, range(9))
    assert (kv.length(1), kv.free_blocks) == (0, (2,))
    kv.check_integrity()


def test_content_from_outside_never_reaches_another_sequence() -> None:
    kv = _cache(32, num_sequences=6)
    kv.attach_prefix(0, range(9), b"tenant")
    _write(kv, 0, range(8))  # computed here, so that only what was built on foreign content can be missing below
    kv.import_(1, range(8))
    kv.seq_cp(1, 2)
    kv.attach_prefix(3, range(5), b"tenant")
    kv.seq_cp(1, 3, 4, 8)
    for seq_id in (1, 2, 3):
        whole = [*range(8), *[seq_id] * 4]
        assert kv.attach_prefix(seq_id, whole, b"tenant") == 8
        _write(kv, seq_id, whole[8:])
        assert kv.attach_prefix(4, [*whole, 1], b"tenant") == 8
        kv.seq_rm(4)
    kv.seq_rm(1)
    _write(kv, 1, range(5))  # its next user is an ordinary one
    assert kv.attach_prefix(5, range(5)) == 4


# Runs


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3)])
@pytest.mark.parametrize("held", [0, 3, 4, 7])
def test_a_run_of_steps_caches_evicts_and_takes_blocks_as_single_steps_do(
    windows: tuple[int | None, ...], held: int
) -> None:
    """After each step: the blocks, those behind the window, and what a prompt with the same tokens finds cached."""
    singly, in_a_run = (_cache(windows=windows, num_blocks=24) for _ in range(2))
    for kv in (singly, in_a_run):
        for seq_id in (0, 1):
            kv.attach_prefix(seq_id, [*range(seq_id, seq_id + held + 1)])
            if held:
                _write(kv, seq_id, range(seq_id, seq_id + held))
    run = in_a_run.reserve_run([0, 1])
    for step in range(held, held + 14):
        tokens = [step, step + 1]
        singly.reserve([(seq_id, [token], step) for seq_id, token in enumerate(tokens)]).commit()
        in_a_run.reserve_step(run, tokens).commit()
        in_a_run.check_integrity()
        for seq_id in (0, 1):
            prompt = [*range(seq_id, seq_id + step + 2)]
            known = [
                (kv.attach_prefix(2, prompt), list(kv.block_table(0, 2)), kv.seq_rm(2)) for kv in (singly, in_a_run)
            ]
            assert known[0] == known[1]
            held_blocks = [
                [(num_evicted(kv, group, seq_id), list(kv.block_table(group, seq_id))) for group in range(len(windows))]
                for kv in (singly, in_a_run)
            ]
            assert held_blocks[0] == held_blocks[1]


def test_a_run_ends_at_the_most_positions_of_a_sequence_and_changes_nothing() -> None:
    kv = _cache(max_per_sequence=6)
    _write(kv, 0, range(4))
    _write(kv, 1, range(3))
    run = kv.reserve_run([0, 1])
    for step in range(2):
        kv.reserve_step(run, [step, step]).commit()
    free = kv.free_blocks
    for _ in range(2):
        with pytest.raises(BatchError, match="max_per_sequence = 6"):
            kv.reserve_step(run, [9, 9])
    assert (kv.length(0), kv.length(1), kv.free_blocks) == (6, 5, free)
    run.keep([1])  # the other may go on
    kv.reserve_step(run, [9]).commit()
    assert list(kv.tokens(1)) == [0, 1, 2, 0, 1, 9]


def test_a_run_without_blocks_goes_on_when_there_are_some() -> None:
    kv = _cache(num_blocks=2)
    _write(kv, 0, range(3))
    _write(kv, 1, range(2))
    run = kv.reserve_run([0])
    kv.reserve_step(run, [3]).commit()
    with pytest.raises(OutOfBlocks):
        kv.reserve_step(run, [4])
    kv.seq_rm(1)
    kv.reserve_step(run, [4]).commit()
    assert list(kv.tokens(0)) == [0, 1, 2, 3, 4]
    kv.check_integrity()
