"""A step takes what its draft says: for what goes on, for beams, for beginnings, and for returns from the host.

A plan is drafted entry by entry, as the Batcher does it. What fits is carried out on the cache; of what does not fit,
a copy of the cache shows that there is no room for it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ge, sub

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.kv_cache import Beginning, KVCache, StepDraft
from genbatch.nif.runner import LayerGroup

NUM_SEQUENCES = 5
BLOCK_SIZE = 3
PROMPTS = [[7] * 20, [7] * 5 + [8] * 15, list(range(20))]
KEYS = [b"", b"tenant"]

seq_ids = st.integers(0, NUM_SEQUENCES - 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of a plan: one sequence or, if they go on, several beams.

    Args:
        size: tokens that the step evaluates of each.
        tokens: of one that begins: its prompt, or what was kept of it.
        key: whose blocks it finds.
        source, num_shared: whose first positions it shares.
        is_kept: whether it comes back from the host.
    """

    seq_ids: tuple[int, ...]
    size: int
    tokens: Sequence[int] = ()
    key: bytes = b""
    source: int | None = None
    num_shared: int = 0
    is_kept: bool = False
    beginning: Beginning | None = field(default=None, compare=False)

    def is_drafted(self, kv: KVCache, draft: StepDraft) -> bool:
        """Adds it to a draft; whether it fits."""
        if self.beginning is not None:
            length = self.beginning.length + self.size
            reaches = length <= draft.reach_from(self.beginning)
            fits = draft.begin(self.beginning, length)
        else:
            length = kv.length(self.seq_ids[0]) + self.size
            reaches = length <= draft.reach(self.seq_ids[0])
            fits = draft.grow(self.seq_ids, length)
            reaches = fits if len(self.seq_ids) > 1 else reaches
        assert fits == reaches
        return fits

    def begin(self, kv: KVCache) -> bool:
        """Gives its sequence what it begins with; whether that is what was drafted."""
        if self.beginning is None:
            return True
        [seq_id] = self.seq_ids
        if self.is_kept:
            kv.import_(seq_id, self.tokens, self.key)
        else:
            if self.source is not None:
                kv.seq_cp(self.source, seq_id, 0, self.num_shared)
            kv.attach_prefix(seq_id, self.tokens, self.key)
        return kv.length(seq_id) == self.beginning.length

    def evaluated(self, kv: KVCache) -> list[tuple[int, list[int], int]]:
        """What `reserve` takes; a prompt's own tokens, so that others find its blocks."""
        rest = list(self.tokens[kv.length(self.seq_ids[0]) :]) + [1] * self.size
        return [(seq_id, rest[: self.size], kv.length(seq_id)) for seq_id in self.seq_ids]


class PlannedSteps(RuleBasedStateMachine):
    windows: Sequence[int | None] = (None,)
    sink_tokens = 0

    @initialize(num_blocks=st.integers(4, 20))
    def start(self, num_blocks: int) -> None:
        self.kv = KVCache(
            [LayerGroup((index,), window, self.sink_tokens) for index, window in enumerate(self.windows)],
            num_blocks=[num_blocks + index for index in range(len(self.windows))],
            block_size=BLOCK_SIZE,
            num_sequences=NUM_SEQUENCES,
        )
        self.kept: list[list[int]] = []

    @rule(
        order=st.permutations(range(NUM_SEQUENCES)),
        sizes=st.lists(st.integers(1, 8), min_size=NUM_SEQUENCES, max_size=NUM_SEQUENCES),
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=NUM_SEQUENCES, max_size=NUM_SEQUENCES),
        length=st.integers(2, 20),
        key=st.sampled_from(KEYS),
        has_beams=st.booleans(),
        comes_back=st.booleans(),
    )
    def step(
        self,
        order: list[int],
        sizes: list[int],
        prompts: list[list[int]],
        length: int,
        key: bytes,
        has_beams: bool,
        comes_back: bool,
    ) -> None:
        kv = self.kv
        draft, free = kv.draft(), kv.free_blocks
        plan: list[Entry] = []
        done: set[int] = set()
        for seq_id, size, prompt in zip(order, sizes, prompts, strict=True):
            if seq_id in done:
                continue  # with another beam
            if kv.length(seq_id):
                alike = [other for other in order if kv.length(other) == kv.length(seq_id) and other not in done]
                beams = alike if has_beams else [seq_id]
                entry = Entry(tuple(beams), 1 if len(beams) > 1 else size)
            elif comes_back and self.kept:
                comes_back = False
                tokens = self.kept[-1]
                entry = Entry((seq_id,), size, tokens, key, is_kept=True, beginning=kv.beginning_from_host(len(tokens)))
            else:
                entry = self._begins(seq_id, size, prompt[:length], key)
            done.update(entry.seq_ids)
            if entry.is_drafted(kv, draft):
                plan.append(entry)
            else:
                self._assert_no_room([*plan, entry])
        as_drafted = [entry.begin(kv) for entry in plan]
        # A return may get the blocks that another was about to find again: that one evaluates them, and holds less.
        assert all(as_drafted) or any(entry.is_kept for entry in plan)
        self.kept = [tokens for tokens in self.kept if not any(entry.tokens is tokens for entry in plan)]
        reservation = kv.reserve([one for entry in plan for one in entry.evaluated(kv)])
        left = tuple(map(sub, free, draft.taken))
        assert kv.free_blocks == left if all(as_drafted) else all(map(ge, kv.free_blocks, left))
        reservation.commit()
        kv.check_integrity()

    @rule(ended=st.sets(seq_ids, min_size=1))
    def finish(self, ended: set[int]) -> None:
        for seq_id in ended:
            self.kv.seq_rm(seq_id)

    @rule(seq_id=seq_ids)
    def pause(self, seq_id: int) -> None:
        if self.kv.length(seq_id):
            tokens, _ = self.kv.export(seq_id)
            self.kept.append(tokens)
            self.kv.seq_rm(seq_id)

    @rule(src=seq_ids, dst=seq_ids)
    def fork(self, src: int, dst: int) -> None:
        if src != dst:
            self.kv.seq_rm(dst)
            self.kv.seq_cp(src, dst)

    def _begins(self, seq_id: int, size: int, tokens: list[int], key: bytes) -> Entry:
        """One that shares as much as it can of what another holds, and then looks for more."""
        kv, source, most = self.kv, None, 0
        for other in range(NUM_SEQUENCES):
            held = kv.tokens(other)
            same = next((i for i, pair in enumerate(zip(held, tokens, strict=False)) if pair[0] != pair[1]), None)
            common = min(len(held), len(tokens) - 1, len(tokens) if same is None else same)
            if common > most and common >= kv.shortest_prefix(other):
                source, most = other, common
        beginning = kv.beginning(tokens, key, [], source=source, num_shared=most)
        size = min(size, len(tokens) - beginning.length)
        return Entry((seq_id,), size, tokens, key, source, most, beginning=beginning)

    def _assert_no_room(self, plan: list[Entry]) -> None:
        kv = copy.deepcopy(self.kv)
        try:
            as_drafted = [entry.begin(kv) for entry in plan]
            kv.reserve([one for entry in plan for one in entry.evaluated(kv)])
        except OutOfBlocks:
            return
        assert not all(as_drafted), "it was refused, and there is room for it"


class PlannedWindows(PlannedSteps):
    windows = (None, 5)


class PlannedShortWindows(PlannedSteps):
    windows = (4,)


class PlannedSinks(PlannedSteps):
    windows = (3,)
    sink_tokens = 2


@pytest.mark.parametrize("machine", [PlannedSteps, PlannedWindows, PlannedShortWindows, PlannedSinks])
def test_a_step_takes_what_was_drafted_for_it(machine: type[PlannedSteps]) -> None:
    examples = max(1, settings.default.max_examples // 4)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))


@pytest.mark.parametrize("grows_first", [True, False])
def test_a_last_block_that_several_hold_costs_each_who_writes_one_copy_and_no_more(grows_first: bool) -> None:
    """Sequences 0 and 1 share theirs; 0 goes on while 2 begins with it. 1 keeps the original."""
    kv = KVCache([LayerGroup((0,))], num_blocks=[8], block_size=BLOCK_SIZE, num_sequences=NUM_SEQUENCES)
    prompt = list(range(BLOCK_SIZE + 1))
    kv.reserve([(0, prompt, 0)]).commit()
    kv.seq_cp(0, 1)
    free = kv.free_blocks
    beginning = kv.beginning([*prompt, 7], b"", [], source=0, num_shared=len(prompt), finds=False)
    draft = kv.draft()
    steps = [lambda: draft.grow([0], len(prompt) + 1), lambda: draft.begin(beginning, len(prompt) + 1)]
    assert all(step() for step in (steps if grows_first else reversed(steps)))
    kv.seq_cp(0, 2)
    kv.reserve([(0, [5], len(prompt)), (2, [7], len(prompt))])
    assert draft.taken == (free[0] - kv.free_blocks[0],) == (2,)
