"""Allocator, prefix cache, sequence operations and reservations against a plain model.

The plain model knows each sequence's tokens. Block contents are simulated as what was written to each slot: the
token together with a digest of all tokens before it, as a real key and value depend on them. After every rule, what
is read through a block table must be the sequence's own, at every position that a next token attends to. A recurrent
group has that digest at the end of each block only; its other slots hold a token each. So a next token reads the end
of the block before its own, and all of its own block.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from genbatch.nif.errors import BatchError, OutOfBlocks
from genbatch.nif.kv import block_pool
from genbatch.nif.kv.block_tables import Reservation, RunReservation
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import LayerGroup
from tests.nif.kv.reading import num_evicted

_NUM_SEQUENCES = 4
_BLOCK_SIZE = 3
_GARBAGE = -1
STATE = "state"  # in the place of a window: a recurrent group
_PROMPTS = [[7] * 20, [7] * 5 + [8] * 15, list(range(20))]
_KEYS = [b"", b"tenant"]

_seq_ids = st.integers(0, _NUM_SEQUENCES - 1)
_chunks = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class KVCacheMachine(RuleBasedStateMachine):
    windows: Sequence[int | str | None] = (None,)
    sink_tokens = 0  # of those that have a window
    allow_block_sharing = True

    @initialize(num_blocks=st.integers(4, 16))
    def start(self, num_blocks: int) -> None:
        groups = [
            LayerGroup((index,), window, self.sink_tokens)
            if isinstance(window, int)
            else LayerGroup((index,), recurs=window == STATE)
            for index, window in enumerate(self.windows)
        ]
        self.kv = KVCache(
            groups,
            num_blocks=[num_blocks + index for index in range(len(groups))],
            block_size=_BLOCK_SIZE,
            num_sequences=_NUM_SEQUENCES,
            allow_block_sharing=self.allow_block_sharing,
        )
        self.now = 0.0
        self._clock = patch.object(block_pool, "monotonic", lambda: self.now)
        self._clock.start()
        self.kv.allow_keeping(0.4)
        self.model: list[list[int]] = [[] for _ in range(_NUM_SEQUENCES)]
        self.slots: list[dict[int, int]] = [{} for _ in groups]  # per group, slot -> what was written there
        self.swapped: list[tuple[list[int], list[list[list[int]]]]] = []

    # Steps

    @rule(chunks=st.dictionaries(_seq_ids, _chunks, min_size=1))
    def step(self, chunks: dict[int, list[int]]) -> None:
        self._step(chunks, succeed=True)

    @rule(chunks=st.dictionaries(_seq_ids, _chunks, min_size=1))
    def step_that_fails(self, chunks: dict[int, list[int]]) -> None:
        before = self._snapshot()
        self._step(chunks, succeed=False)
        assert self._snapshot() == before

    @rule(
        chunks=st.dictionaries(_seq_ids, _chunks, min_size=1), kept=st.lists(st.integers(1, 8), min_size=4, max_size=4)
    )
    def step_of_which_less_counts(self, chunks: dict[int, list[int]], kept: list[int]) -> None:
        self._step(chunks, succeed=True, kept={seq_id: tokens[: kept[seq_id]] for seq_id, tokens in chunks.items()})

    @rule(chunks=st.dictionaries(_seq_ids, _chunks, min_size=1), frees=st.booleans(), succeeds=st.booleans())
    def run(self, chunks: dict[int, list[int]], frees: bool, succeeds: bool) -> None:
        """Decode token after token; a sequence leaves after its last one, and is removed beside the next step."""
        reservation, left, num_steps = self.kv.reserve_run(list(chunks)), set[int](), max(map(len, chunks.values()))
        for step in range(num_steps):
            going = {seq_id: tokens[step : step + 1] for seq_id, tokens in chunks.items() if len(tokens) > step}
            if step and len(going) < len(chunks) - len(left):
                reservation.keep(list(going))
            ended = {*chunks} - {*going} - left
            left |= ended
            reserve = partial(self.kv.reserve_step, reservation, [tokens[0] for tokens in going.values()])
            if not self._step(
                going, succeed=succeeds or step < num_steps - 1, reserve=reserve, freed=ended if frees else ()
            ):
                return

    @rule(seq_id=_seq_ids, prompt=st.sampled_from(_PROMPTS), key=st.sampled_from(_KEYS), length=st.integers(1, 20))
    def prefill_after_attaching(self, seq_id: int, prompt: list[int], key: bytes, length: int) -> None:
        tokens = prompt[:length]
        held = self.model[seq_id]
        if held != tokens[: len(held)] or len(held) >= length:
            with pytest.raises(BatchError):
                self.kv.attach_prefix(seq_id, tokens, key)
            return
        cached = self.kv.attach_prefix(seq_id, tokens, key)
        assert len(held) <= cached < length
        if self.kv.prefix_cache is None:
            assert cached == len(held)
        self.model[seq_id] = tokens[:cached]
        self._step({seq_id: tokens[cached:]}, succeed=True)

    @rule(
        prompt=st.sampled_from(_PROMPTS), key=st.sampled_from(_KEYS), length=st.integers(1, 20), ttl=st.integers(1, 5)
    )
    def keep(self, prompt: list[int], key: bytes, length: int, ttl: int) -> None:
        self.kv.keep(prompt[:length], key, float(ttl))

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        assert self.kv.num_kept <= sum(int(0.4 * count) for count in self.kv.num_blocks)

    # Sequences

    @rule(src=_seq_ids, dst=_seq_ids, start=st.integers(0, 30), count=st.integers(0, 30))
    def copy(self, src: int, dst: int, start: int, count: int) -> None:
        p0 = min(start, len(self.model[dst]))
        p1 = min(p0 + count, len(self.model[src]))
        fits = (
            src != dst
            and p0 == len(self.model[dst])
            and p0 <= p1
            and self.model[dst] == self.model[src][:p0]
            and (p0 == p1 or p1 >= self.kv.shortest_prefix(src))
        )
        before = self._snapshot()
        try:
            self.kv.seq_cp(src, dst, p0, p1)
        except BatchError:
            assert not fits
            assert self._snapshot() == before
        else:
            assert fits
            self.model[dst] = self.model[src][:p1]

    @rule(dst=_seq_ids, src=_seq_ids)
    def fork(self, src: int, dst: int) -> None:
        if src != dst:
            self.kv.seq_rm(dst)
            self.kv.seq_cp(src, dst)
            self.model[dst] = list(self.model[src])

    @rule(seq_id=_seq_ids, p0=st.integers(0, 30), p1=st.integers(0, 31))
    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        length = len(self.model[seq_id])
        fits = p0 <= p1 <= length and (
            p0 == p1 or (p1 == length and (p0 == 0 or p0 >= self.kv.shortest_prefix(seq_id)))
        )
        before = self._snapshot()
        try:
            self.kv.seq_rm(seq_id, p0, p1)
        except BatchError:
            assert not fits
            assert self._snapshot() == before
        else:
            assert fits
            if p0 < p1:
                del self.model[seq_id][p0:]

    @rule(seq_id=_seq_ids, drop=st.integers(0, 4))
    def take_back_the_last(self, seq_id: int, drop: int) -> None:
        length = max(0, len(self.model[seq_id]) - drop)
        if length == 0 or length >= self.kv.shortest_prefix(seq_id):
            self.kv.seq_rm(seq_id, length)
            del self.model[seq_id][length:]

    @rule(seq_id=_seq_ids)
    def finish(self, seq_id: int) -> None:
        self.kv.seq_rm(seq_id)
        self.model[seq_id] = []

    # Swapping

    @rule(seq_id=_seq_ids)
    def swap_out(self, seq_id: int) -> None:
        if self.model[seq_id]:
            tokens, blocks = self.kv.export(seq_id)
            assert tokens == self.model[seq_id]
            content = [[self._read(group, block) for block in ids] for group, ids in enumerate(blocks)]
            self.swapped.append((tokens, content))
            self.finish(seq_id)

    @precondition(lambda self: self.swapped)
    @rule(seq_id=_seq_ids, key=st.sampled_from([None, *_KEYS]))
    def swap_in(self, seq_id: int, key: bytes | None) -> None:
        tokens, content = self.swapped[-1]
        before = self._snapshot()
        try:
            blocks = self.kv.import_(seq_id, tokens, key)
        except (BatchError, OutOfBlocks):
            assert self._snapshot() == before
            return
        self.swapped.pop()
        for group, (ids, kept) in enumerate(zip(blocks, content, strict=True)):
            for block, values in zip(ids, kept, strict=True):
                for offset, value in enumerate(values):
                    self.slots[group][block * _BLOCK_SIZE + offset] = value
        self.model[seq_id] = list(tokens)

    # What must hold

    @invariant()
    def tables_pools_and_prefix_cache_agree(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            for group in range(len(self.windows)):
                counts = self.kv.counts(group)
                assert counts.free + counts.used == counts.max
                shown = set()
                for seq_id in range(_NUM_SEQUENCES):
                    evicted, table = num_evicted(self.kv, group, seq_id), self.kv.block_table(group, seq_id)
                    kept = -(-self.kv.groups[group].sink_tokens // _BLOCK_SIZE) if evicted else 0
                    held = [*table[:kept], *table[kept + evicted :]]
                    assert len(held) == self.kv.blocks_held(seq_id)[group]
                    shown.update(held)
                assert len(shown) == counts.used

    @invariant()
    def every_sequence_reads_its_own_positions(self) -> None:
        if not hasattr(self, "kv"):
            return
        for seq_id, tokens in enumerate(self.model):
            assert self.kv.length(seq_id) == len(tokens)
            assert list(self.kv.tokens(seq_id)) == tokens
            for group, window in enumerate(self.windows):
                if window == STATE:
                    first = max(0, len(tokens) // _BLOCK_SIZE * _BLOCK_SIZE - 1)
                else:
                    first = max(0, len(tokens) - window + 1) if isinstance(window, int) else 0
                sinks = min(self.kv.groups[group].sink_tokens, first)
                for p0, p1 in ((0, sinks), (first, len(tokens))):
                    slots = self.kv.slots(group, seq_id, p0, p1)
                    expected = [self._content(group, tokens, position) for position in range(p0, p1)]
                    assert [self.slots[group][slot] for slot in slots] == expected

    def teardown(self) -> None:
        if hasattr(self, "_clock"):
            self._clock.stop()
        if hasattr(self, "kv"):
            for seq_id in range(_NUM_SEQUENCES):
                self.kv.seq_rm(seq_id)
            self.kv.check_integrity()
            assert self.kv.counts().used == 0

    # Helpers

    def _step(
        self,
        chunks: dict[int, list[int]],
        *,
        succeed: bool,
        kept: dict[int, list[int]] | None = None,
        reserve: Callable[[], Reservation | RunReservation] | None = None,
        freed: Collection[int] = (),
    ) -> bool:
        """Returns whether the step had blocks; without `reserve` it is a single one."""
        entries = [(seq_id, tokens, len(self.model[seq_id])) for seq_id, tokens in chunks.items()]
        before = self._snapshot()
        draft, free = self.kv.draft(), self.kv.free_blocks
        fits = all(draft.grow([seq_id], n_past + len(tokens)) for seq_id, tokens, n_past in entries)
        try:
            reservation = self.kv.reserve(entries) if reserve is None else reserve()
        except OutOfBlocks:
            assert not fits
            assert self._snapshot() == before
            return False
        assert fits
        assert draft.taken == tuple(one - other for one, other in zip(free, self.kv.free_blocks, strict=True))
        assert [(seq_id, list(tokens), n_past) for seq_id, tokens, n_past in reservation.steps] == entries
        for seq_id in freed:
            self.finish(seq_id)
        self.kv.check_integrity()
        for group, pairs in enumerate(reservation.copies):
            for source, destination in pairs:
                for offset, value in enumerate(self._read(group, source)):
                    self.slots[group][destination * _BLOCK_SIZE + offset] = value
        for seq_id, tokens, n_past in entries:
            whole = self.model[seq_id] + tokens
            for group in range(len(self.windows)):
                for position, slot in zip(
                    range(n_past, len(whole)), self.kv.slots(group, seq_id, n_past, len(whole)), strict=True
                ):
                    self.slots[group][slot] = self._content(group, whole, position) if succeed else _GARBAGE
        if succeed:
            if isinstance(reservation, Reservation):
                reservation.evaluated = None if kept is None else list(kept.values())
            reservation.commit()
            for seq_id, tokens in (chunks if kept is None else kept).items():
                self.model[seq_id] += tokens
                if kept is not None and len(tokens) < len(chunks[seq_id]):
                    blocks = -(-len(self.model[seq_id]) // _BLOCK_SIZE)
                    assert all(len(self.kv.block_table(g, seq_id)) == blocks for g in range(len(self.windows)))
        else:
            reservation.rollback()
        return True

    def _content(self, group: int, tokens: Sequence[int], position: int) -> int:
        """What a group has at a position, which depends on all tokens up to it, or on that token alone."""
        is_state = self.windows[group] != STATE or (position + 1) % _BLOCK_SIZE == 0
        return hash(tuple(tokens[: position + 1])) if is_state else tokens[position]

    def _read(self, group: int, block: int) -> list[int]:
        return [self.slots[group].get(block * _BLOCK_SIZE + offset, _GARBAGE) for offset in range(_BLOCK_SIZE)]

    def _snapshot(self) -> object:
        """All that callers can see, except what is known of free blocks' content: a failed step may cost that."""
        groups, seq_ids = range(len(self.windows)), range(_NUM_SEQUENCES)
        return (
            [[list(self.kv.block_table(group, seq_id)) for seq_id in seq_ids] for group in groups],
            [[num_evicted(self.kv, group, seq_id) for seq_id in seq_ids] for group in groups],
            [list(self.kv.tokens(seq_id)) for seq_id in seq_ids],
            self.kv.free_blocks,
        )


class UnsharedMachine(KVCacheMachine):
    allow_block_sharing = False


class TwoFullGroupsMachine(KVCacheMachine):
    windows = (None, None)


class MixedWindowsMachine(KVCacheMachine):
    windows = (None, 5, 1)


class WindowedMachine(KVCacheMachine):
    windows = (4,)


class StatesMachine(KVCacheMachine):
    windows = (STATE,)


class AllKindsMachine(KVCacheMachine):
    windows = (None, 5, STATE)
    sink_tokens = 2


class SinksMachine(KVCacheMachine):
    windows = (3, None, 1)
    sink_tokens = 2


@pytest.mark.parametrize(
    "machine",
    [
        *(KVCacheMachine, UnsharedMachine, TwoFullGroupsMachine, MixedWindowsMachine, WindowedMachine, SinksMachine),
        *(StatesMachine, AllKindsMachine),
    ],
)
def test_h07_h11_h12_no_sequence_ever_reads_or_leaks_another_ones_blocks(
    machine: type[KVCacheMachine],
) -> None:
    # A share of what the profile allows, so that a longer one (--hypothesis-profile) lengthens these as well.
    examples = max(1, settings.default.max_examples // 4)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
