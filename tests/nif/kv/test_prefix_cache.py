"""Blocks are found by what they contain, after what, and for whom."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.kv import block_pool
from genbatch.nif.kv.block_pool import PrefixCache, prefix_key, root_hash
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import LayerGroup


def _filled(tokens: Sequence[int], key: bytes, block_size: int = 4) -> PrefixCache:
    cache = PrefixCache(block_size)
    names: list[bytes] = []
    cache.extend_hashes(names, tokens, key)
    for block, name in enumerate(names):
        assert cache.insert(0, name, block)
    return cache


def _groups(*windows: int | None, sink_tokens: int = 0) -> list[LayerGroup]:
    return [LayerGroup((i,), window, sink_tokens if window else 0) for i, window in enumerate(windows)]


def test_match_returns_the_longest_run_of_whole_blocks() -> None:
    cache = _filled(range(11), b"")
    assert cache.match(range(11), b"").blocks == [(0,), (1,)]
    assert cache.match([*range(8), 99, 99, 99, 99], b"").blocks == [(0,), (1,)]
    assert cache.match([*range(7), 99], b"").blocks == [(0,)]
    assert cache.match([99, *range(1, 8)], b"").blocks == []


def test_h11_the_same_tokens_after_other_tokens_do_not_match() -> None:
    cache = _filled([1, 1, 1, 1, 2, 2, 2, 2], b"")
    assert cache.match([3, 3, 3, 3, 2, 2, 2, 2], b"").blocks == []
    assert cache.match([2, 2, 2, 2], b"").blocks == []


def test_h11_keys_keep_tenants_and_adapters_apart() -> None:
    cache = _filled(range(8), prefix_key("a", "b"))
    assert cache.match(range(8), prefix_key("a", "b")).blocks
    for tenant, adapter in (("a", ""), ("", "b"), ("ab", ""), ("", "ab"), ("b", "a")):
        assert not cache.match(range(8), prefix_key(tenant, adapter)).blocks


def test_a_key_cannot_pose_as_the_middle_of_another_chain() -> None:
    cache = PrefixCache(4)
    names: list[bytes] = []
    cache.extend_hashes(names, range(8), b"victim")
    forged = root_hash(b"victim") + b"".join(token.to_bytes(8, "little") for token in range(4))
    assert root_hash(forged) != names[0]


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_different_owners_have_different_keys(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (prefix_key(*one) == prefix_key(*other)) == (one == other)


def test_h11_counters_tell_queries_and_hits() -> None:
    cache = _filled(range(8), b"")
    cache.match(range(12), b"")
    cache.match([5] * 12, b"")
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (24, 8)


def test_blocks_already_held_are_not_looked_up() -> None:
    cache = _filled(range(12), b"")
    names: list[bytes] = []
    cache.extend_hashes(names, range(4), b"")
    match = cache.match(range(12), b"", first_names=names, max_blocks=2)
    assert match.blocks == [(1,)]
    assert cache.num_hit_tokens == 4


def test_a_block_that_one_group_lost_ends_the_run() -> None:
    cache = PrefixCache(2, _groups(None, None))
    names: list[bytes] = []
    cache.extend_hashes(names, range(4), b"")
    for index, name in enumerate(names):
        cache.insert(0, name, index)
        cache.insert(1, name, 10 + index)
    assert cache.match(range(4), b"").blocks == [(0, 10), (1, 11)]
    cache.forget(1, names[1])
    assert cache.match(range(4), b"").blocks == [(0, 10)]
    assert len(cache) == 1


def test_the_first_block_known_for_a_content_stays() -> None:
    cache = _filled(range(4), b"")
    names: list[bytes] = []
    cache.extend_hashes(names, range(4), b"")
    assert not cache.insert(0, names[0], 7)
    assert cache.match(range(4), b"").blocks == [(0,)]


def test_a_waiting_prompt_is_named_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _filled(range(64), b"")
    named = 0
    name_of = PrefixCache._name

    def count(cache: PrefixCache, *args: Any) -> bytes:
        nonlocal named
        named += 1
        return name_of(cache, *args)

    monkeypatch.setattr(PrefixCache, "_name", count)
    names: list[bytes] = []
    for _ in range(5):
        assert cache.known_run(range(64), b"", names, 0, 15) == 15
    assert named == 15


def test_a_window_needs_its_own_blocks_before_the_end_of_a_hit_and_no_others() -> None:
    cache = PrefixCache(2, _groups(None, 3))
    names: list[bytes] = []
    cache.extend_hashes(names, range(12), b"")
    for index, name in enumerate(names):
        cache.insert(0, name, index)
        if index != 3:
            cache.insert(1, name, 10 + index)
    # After 12 positions the window begins in block 5, after 10 in block 4; block 3 is in nobody's way.
    assert cache.match(range(12), b"").blocks == [(i, 10 + i if i != 3 else 0) for i in range(6)]
    assert list(cache.entries(names, 0, 6, 12)) == [*((0, i) for i in range(6)), (1, 15)]
    assert cache.match(range(8), b"").blocks == [(0, 10), (1, 11), (2, 12)]  # after 8 it begins in block 3
    cache.forget(0, names[4])
    assert len(cache.match(range(12), b"").blocks) == 3


def test_a_hit_needs_the_sinks_of_a_window() -> None:
    cache = PrefixCache(2, _groups(3, sink_tokens=2))
    names: list[bytes] = []
    cache.extend_hashes(names, range(12), b"")
    for index, name in enumerate(names):
        cache.insert(0, name, index)
    cache.forget(0, names[2])
    assert len(cache.match(range(12), b"").blocks) == 6
    cache.forget(0, names[0])
    assert cache.match(range(12), b"").blocks == []


def _of_three_kinds() -> tuple[PrefixCache, list[bytes]]:
    """Four blocks of a group that attends to all positions, of a window, and of states."""
    groups = [LayerGroup((0,)), LayerGroup((1,), 6), LayerGroup((2,), 4, recurs=True).sized(4)]
    cache, names = PrefixCache(4, groups), list[bytes]()
    cache.extend_hashes(names, range(16), b"")
    for group in range(3):
        for block, name in enumerate(names):
            cache.insert(group, name, block)
    return cache, names


@pytest.mark.parametrize(("group", "cause"), list(enumerate(("evicted", "window", "no_snapshot"))))
def test_tokens_that_are_evaluated_again_are_counted_by_cause(group: int, cause: str) -> None:
    cache, names = _of_three_kinds()
    for name in names[2:]:
        cache.forget(group, name)
    assert len(cache.match([*range(16), 99, 99, 99, 99], b"").blocks) == 2
    assert {name: count for name, count in cache.num_recomputed.items() if count} == {cause: 8}


def test_what_an_owner_never_had_is_counted_as_new() -> None:
    cache, names = _of_three_kinds()
    cache.match(range(16), b"another")
    cache.match(range(100, 116), b"")
    for group in range(3):
        for name in names:
            cache.forget(group, name)
            cache.insert(group, name, 0)
    assert len(cache.match(range(16), b"").blocks) == 4
    assert not any(cache.num_recomputed.values())


def test_blocks_after_another_beginning_are_counted_as_a_volatile_line() -> None:
    cache, _ = _of_three_kinds()
    assert cache.match([7, 7, 7, 7, *range(4, 12), 99, 99, 99, 99], b"").blocks == []
    assert cache.num_recomputed["volatile_line"] == 8


class Prompts:
    """Prompts of two blocks each, which come to a cache of eight blocks and go."""

    def __init__(self, share: float, *windows: int | None) -> None:
        groups = _groups(*(windows or (None,)))
        self.kv = KVCache(groups, num_blocks=[8] * len(groups), block_size=4, num_sequences=1)
        self.kv.allow_keeping(share)

    def comes(self, number: int, key: bytes = b"") -> int:
        """Evaluate a prompt; returns how many of its tokens were cached."""
        prompt = [number] * 9
        cached = self.kv.attach_prefix(0, prompt, key)
        self.kv.reserve([(0, prompt[cached:], cached)]).commit()
        self.kv.seq_rm(0)
        self.kv.check_integrity()
        return cached

    def keep(self, number: int, ttl_s: float, key: bytes = b"") -> None:
        self.kv.keep([number] * 9, key, ttl_s)


def test_a_prompt_that_is_kept_outlives_newer_ones_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(block_pool, "monotonic", lambda: now)
    prompts = Prompts(0.5)
    for number in (1, 2):
        prompts.comes(number)
    prompts.keep(1, 10.0)
    assert prompts.comes(1) == 8 and prompts.kv.num_kept == 2
    for number in range(10, 20):
        assert prompts.comes(number) == 0
    assert prompts.comes(2) == 0 and prompts.comes(1) == 8
    now = 10.0
    assert prompts.kv.num_kept == 0
    for number in range(10, 20):
        prompts.comes(number)
    assert prompts.comes(1) == 0


def test_what_is_kept_refuses_no_sequence_its_memory() -> None:
    prompts = Prompts(1.0)
    for number in range(3):
        prompts.keep(number, 10.0)
        prompts.comes(number)
    assert prompts.kv.num_kept == 6
    prompts.kv.reserve([(0, [99] * 32, 0)]).commit()  # all blocks
    assert prompts.kv.num_kept == 0


def test_the_operator_bounds_what_is_kept_and_the_oldest_goes_first() -> None:
    prompts = Prompts(0.5)
    for number in range(3):
        prompts.keep(number, 10.0)
        prompts.comes(number)
    assert prompts.kv.num_kept == 4
    for number in range(10, 20):
        prompts.comes(number)
    assert [prompts.comes(number) for number in (2, 1)] == [8, 8] and prompts.comes(0) == 0
    off = Prompts(0.0)
    off.keep(1, 10.0)
    off.comes(1)
    assert off.kv.num_kept == 0


def test_a_prompt_is_kept_for_its_owner_alone_and_for_the_longest_time_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(block_pool, "monotonic", lambda: now)
    prompts = Prompts(0.5)
    prompts.keep(1, 10.0, b"one")
    prompts.keep(1, 5.0, b"one")
    prompts.comes(1, b"other")
    assert prompts.kv.num_kept == 0
    prompts.comes(1, b"one")
    now = 6.0
    assert prompts.kv.num_kept == 2


def test_what_fell_behind_a_window_is_not_kept() -> None:
    prompts = Prompts(1.0, None, 5)
    prompts.keep(1, 10.0)
    prompts.kv.reserve([(0, [1] * 30, 0)]).commit()
    prompts.kv.seq_rm(0)
    assert prompts.kv.num_kept == 2  # of the group that attends to all positions; the prompt was not attached
