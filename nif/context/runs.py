"""Runs: the entries of a step as a ragged batch for the runners, and decode steps without a plan between them.

    batch = lay_out(entries, kv)                  # one step
    layout = run_layout(kv, entries, max_steps)   # a run of decode steps over the same sequences
    batch = layout.next(tokens)

A DecodeRun runs one step after another. An OverlappedRun (overlapped_run.py) launches each step before it reads the
step before.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from genbatch.nif.kv.block_tables import Reservation, RunReservation
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Entry, Largest, Logits, RaggedBatch, Rows
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState


def num_logits(entry: Entry) -> int:
    """Return the number of rows of logits that an entry needs."""
    if entry.logits is Logits.ALL:
        return len(entry.tokens)
    return 1 if entry.logits is Logits.LAST else 0


def num_states(entry: Entry) -> int:
    """Return the number of rows of hidden states that an entry needs."""
    if entry.logits is Logits.EVERY_STATE:
        return len(entry.tokens)
    return 1 if entry.logits is Logits.LAST_STATE else 0


def lay_out(batch: Sequence[Entry], kv: KVCache) -> RaggedBatch:
    """Lay out the entries as a ragged batch. The caller has reserved their blocks."""
    size = len(batch)
    counts = np.fromiter([len(entry.tokens) for entry in batch], np.int64, size)
    n_past = np.fromiter([entry.n_past for entry in batch], np.int64, size)
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    owner = np.repeat(np.arange(size), counts)  # [T] the entry each token belongs to
    positions = np.arange(total) - np.repeat(starts[:-1] - n_past, counts)
    kv_lens = n_past + counts
    longest, block_size = int(kv_lens.max()), kv.block_size
    column, offset = np.divmod(positions, block_size)
    tables, slots = [], []
    for group in range(len(kv.groups)):
        table = block_tables(kv, group, [entry.seq_id for entry in batch], -(-longest // block_size))
        tables.append(table)
        slots.append(table[owner, column].astype(np.int64) * block_size + offset)
    tokens = np.fromiter([token for entry in batch for token in entry.tokens], np.int64, total)
    return RaggedBatch(
        input_ids=tokens,
        positions=positions,
        query_starts=starts.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        slots=tuple(slots),
        block_tables=tuple(tables),
        logit_rows=_logit_rows(batch, starts),
        max_query_len=int(counts.max()),
        max_kv_len=longest,
        state_rows=_state_rows(batch, starts) if any(map(num_states, batch)) else None,
        adapters=owned[owner] if (owned := adapters_of(batch)) is not None else None,
    )


def adapters_of(batch: Sequence[Entry]) -> np.ndarray | None:
    """Return each entry's adapter handle, [B] int64; None if no entry has an adapter."""
    if not any(entry.adapter for entry in batch):
        return None
    return np.fromiter([entry.adapter for entry in batch], np.int64, len(batch))


def block_tables(kv: KVCache, group: int, seq_ids: Sequence[int], width: int) -> np.ndarray:
    """Return the sequences' block tables as rows, [len(seq_ids), width] int32, padded with 0."""
    table = np.zeros((len(seq_ids), width), np.int32)
    for row, seq_id in enumerate(seq_ids):
        blocks = kv.block_table(group, seq_id)
        table[row, : len(blocks)] = np.frombuffer(blocks, np.int32)
    return table


def _logit_rows(batch: Sequence[Entry], starts: np.ndarray) -> np.ndarray:
    rows: list[int] = []
    last, every = Logits.LAST, Logits.ALL
    for entry, first, end in zip(batch, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if entry.logits is last:
            rows.append(end - 1)
        elif entry.logits is every:
            rows.extend(range(first, end))
    return np.array(rows, np.int64)


def _state_rows(batch: Sequence[Entry], starts: np.ndarray) -> np.ndarray:
    rows: list[int] = []
    for entry, end in zip(batch, starts[1:].tolist(), strict=True):
        rows.extend(range(end - num_states(entry), end))
    return np.array(rows, np.int64)


def run_layout(kv: KVCache, batch: Sequence[Entry], max_steps: int) -> "DecodeLayout | FreshLayout":
    """Choose the layout for a run of decode steps that begins with these entries; see `DecodeLayout`."""
    # Lay out each step anew for groups with a window, which drop whole blocks.
    if all(group.window is None for group in kv.groups):
        return DecodeLayout(kv, batch, max_steps)
    return FreshLayout(kv, batch)


class FreshLayout:
    """Lays out each step of a run anew; the arguments are those of `DecodeLayout`."""

    def __init__(self, kv: KVCache, batch: Sequence[Entry]) -> None:
        self._kv = kv
        self._batch = batch
        self._done = 0  # steps

    def next(self, tokens: Sequence[int]) -> RaggedBatch:
        """Lay out the next step's batch, with each sequence's input token, after its blocks were reserved."""
        batch = [
            Entry(first.seq_id, (token,), first.n_past + self._done, adapter=first.adapter)
            for first, token in zip(self._batch, tokens, strict=True)
        ]
        self._done += 1
        return lay_out(batch, self._kv)

    def keep(self, places: list[int]) -> None:
        """Lay out the following steps for the sequences at these places only."""
        self._batch = [self._batch[place] for place in places]


class DecodeLayout:
    """Keeps one batch for a run of decode steps and changes it in place; only for groups without a window.

    Args:
        kv: holds the block tables.
        batch: the first step's entries, of one token each.
        max_steps: most steps of the run.
    """

    def __init__(self, kv: KVCache, batch: Sequence[Entry], max_steps: int) -> None:
        self._kv = kv
        self._seq_ids = seq_ids = [entry.seq_id for entry in batch]
        n_past = [entry.n_past for entry in batch]
        self._adapters = adapters_of(batch)
        size = len(seq_ids)
        self._tokens: npt.NDArray[np.int64] = np.empty(size, np.int64)
        self._positions: npt.NDArray[np.int64] = np.array(n_past, np.int64) - 1
        self._kv_lens: npt.NDArray[np.int32] = np.array(n_past, np.int32)
        width = -(-(int(self._kv_lens.max()) + max_steps) // kv.block_size)
        self._tables = [np.zeros((size, width), np.int32) for _ in kv.groups]
        self._slots = [np.zeros(size, np.int64) for _ in kv.groups]
        self._begun = False
        self._fix()

    def next(self, tokens: Sequence[int]) -> RaggedBatch:
        """Change the batch in place for the next step, and return it; see `FreshLayout`."""
        self._tokens[:] = tokens
        self._positions += 1
        self._kv_lens += 1
        if self._begun:
            for slots in self._slots:
                slots += 1
            self._enter_blocks()
        else:
            self._begun = True
            self._fill()
        longest = int(self._kv_lens.max())
        return RaggedBatch(**self._fixed, max_query_len=1, max_kv_len=longest)  # type: ignore[arg-type]

    def keep(self, places: list[int]) -> None:
        """See `FreshLayout`."""
        self._seq_ids = [self._seq_ids[place] for place in places]
        self._tokens, self._positions = self._tokens[places], self._positions[places]
        self._kv_lens = self._kv_lens[places]
        self._tables = [table[places] for table in self._tables]
        self._slots = [slots[places] for slots in self._slots]
        if self._adapters is not None:
            self._adapters = self._adapters[places]
        self._fix()

    def _fix(self) -> None:
        size = len(self._seq_ids)
        self._fixed = {
            "input_ids": self._tokens,
            "positions": self._positions,
            "query_starts": np.arange(size + 1, dtype=np.int32),
            "kv_lens": self._kv_lens,
            "slots": tuple(self._slots),
            "block_tables": tuple(self._tables),
            "logit_rows": np.arange(size),
            "adapters": self._adapters,
        }

    def _fill(self) -> None:
        column, offset = np.divmod(self._positions, self._kv.block_size)
        rows = np.arange(len(self._seq_ids))
        for group, (table, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            table[:] = block_tables(self._kv, group, self._seq_ids, table.shape[1])
            slots[:] = table[rows, column].astype(np.int64) * self._kv.block_size + offset

    def _enter_blocks(self) -> None:
        """Enter the new block of each sequence that has just reached a block's first position."""
        block_size = self._kv.block_size
        for row in np.flatnonzero(self._positions % block_size == 0).tolist():
            column = int(self._positions[row]) // block_size
            for group, (table, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
                block = self._kv.block_table(group, self._seq_ids[row])[column]
                table[row, column] = block
                slots[row] = block * block_size


T = TypeVar("T")
# Takes rows of logits, the largest of each row, and rows of hidden states if an entry asks for states.
Read: TypeAlias = Callable[..., T]


class Forward(Protocol):
    """Make the layout of reserved blocks, run the forward, and return `read`'s result.

    `read` gets the rows of logits, and each row's largest logit if the runner computes it. The reservation is committed
    after `read`. If `read` raises, the reservation is rolled back.
    """

    def __call__(
        self,
        reservation: Reservation | RunReservation,
        layout: Callable[[], RaggedBatch],
        read: "Read[T]",
        *,
        with_logits: bool,
    ) -> T: ...


class RunRows:
    """The rows of a run. A row leaves after its last token, or when the caller says so; the others go on.

    Args:
        batch: each row's first entry.
        num_draws: the most tokens that each row may draw.
        remove: removes a sequence from the context and frees its blocks.
    """

    def __init__(self, batch: Sequence[Entry], num_draws: Sequence[int], remove: Callable[[int], None]) -> None:
        self.live = list(range(len(batch)))  # rows of the next step
        self.seq_ids = [entry.seq_id for entry in batch]  # of the live rows, as are `n_past`
        self.n_past = [entry.n_past for entry in batch]
        self.positions = self.n_past  # of the draws of the step that was read last
        self._freed: list[int] = []
        self._remove = remove
        self._all_ids = self.seq_ids
        self._num_draws = num_draws
        self._next_end = min(num_draws)  # steps after which the next row leaves
        self._leaving: set[int] = set()
        self._holding: set[int] = set()  # rows that have left and still hold blocks

    def leave(self, row: int) -> None:
        """Take a row out of the following steps. A launched step may still have a draw of it."""
        self._leaving.add(row)

    def take_freed(self) -> list[int]:
        """Return the rows that were freed since the last call, and hold no blocks any more."""
        freed, self._freed = self._freed, []
        return freed

    def narrow(self, num_steps: int) -> list[int] | None:
        """Let rows leave after `num_steps` steps; return the places of those that stay, None if all of them stay."""
        if num_steps < self._next_end and not self._leaving:
            return None
        size = len(self.live)
        places = [
            place
            for place, row in enumerate(self.live)
            if self._num_draws[row] > num_steps and row not in self._leaving
        ]
        self._leaving.clear()
        if len(places) == size:
            return None
        stay = [self.live[place] for place in places]
        self._holding |= {*self.live} - {*stay}
        self.live = stay
        self.seq_ids = [self.seq_ids[place] for place in places]
        self.n_past = [self.n_past[place] for place in places]
        self._next_end = min((self._num_draws[row] for row in stay), default=0)
        return places

    def free(self) -> None:
        """Free the blocks of the rows that have left. No step under way may have such a row."""
        for row in sorted(self._holding):
            self._remove(self._all_ids[row])
        self._freed += sorted(self._holding)
        self._holding.clear()


class DecodeRun:
    """Runs decode steps one after another. `OverlappedRun` has the same methods and launches one step ahead.

    No other code may change these sequences before `close`. A sequence leaves the run after its last token, or by
    `rows.leave`. The run then frees its blocks, and goes on with the others.

    Args:
        kv: holds the sequences.
        batch: an entry of one token each.
        states: each sequence's sampler; after `step` the caller updates it with the drawn token.
        forward: see Forward.
        max_steps: most steps of this run.
        rows: its rows, one for each entry.
    """

    verifies: ClassVar[Literal[True]] = True  # checks drafted tokens

    def __init__(
        self,
        kv: KVCache,
        batch: Sequence[Entry],
        states: Sequence[SamplerState],
        forward: Forward,
        max_steps: int,
        rows: RunRows,
    ) -> None:
        assert all(len(entry.tokens) == 1 for entry in batch)
        self._kv = kv
        self._batch = batch
        self._states = states
        self._forward = forward
        self._steps_left = max_steps
        self._num_steps = 0
        self.rows = rows
        self._tokens = [entry.tokens[0] for entry in batch]  # of the live rows
        self._layout: DecodeLayout | FreshLayout | None = None
        self._reservation: RunReservation | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether no step is left to read."""
        return not (self._steps_left and self.rows.live)

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault | None]:
        """Evaluate every sequence's newest token and draw the next; a sequence that has left has no draw.

        Args:
            ahead: whether the next step may begin, too; a DecodeRun ignores it.

        Raises:
            BatchError, OutOfBlocks: as `Context.eval`; nothing was changed, and the run is over.
        """
        self._narrow()
        live = self.rows.live
        drawn: list[Sampled | SampleFault | None] = [None] * len(self._batch)
        if live:
            states = [self._states[row] for row in live]
            positions = [n + 1 for n in self.rows.n_past]
            if self._reservation is None:
                self._reservation = self._kv.reserve_run(self.rows.seq_ids)
            draws = self._forward(
                self._kv.reserve_step(self._reservation, self._tokens),
                self._lay_out,
                lambda rows, largest: choose(rows, largest, states, positions),
                with_logits=any(state.reads_logits for state in states),
            )
            self.rows.n_past = self.rows.positions = positions
            self._tokens = [next_input(draw) for draw in draws]
            self._steps_left -= 1
            self._num_steps += 1
            for row, draw in zip(live, draws, strict=True):
                drawn[row] = draw
            self._narrow()
        self.rows.free()
        return drawn

    def has_room(self, drafts: Sequence[Sequence[int]]) -> bool:
        """Whether the pool has enough blocks to verify these drafts."""
        paper = self._kv.draft()
        ends = [n + 1 + len(draft) for n, draft in zip(self.rows.n_past, drafts, strict=True)]
        return all(paper.grow([seq_id], end) for seq_id, end in zip(self.rows.seq_ids, ends, strict=True))

    def verify(self, drafts: Sequence[Sequence[int]]) -> list[list[Sampled | SampleFault]]:
        """Verify drafted tokens in one step; the draws equal those of single steps.

        Each draft is evaluated behind its sequence's newest token. A token is drawn at each position, up to the first
        mismatch with the draft. The KV of the rejected tokens is dropped. The samplers accept the drawn tokens here,
        since a penalty or a grammar needs each token before it can draw the next one. No sequence may leave such a run.

        Args:
            drafts: each sequence's guessed next tokens; a draft may be empty. `has_room` must hold for the drafts.

        Returns:
            Each sequence's draws: the right part of its draft, and one more token; fewer if a mask becomes slow.

        Raises:
            BatchError, OutOfBlocks: as `step`.
        """
        rows = self.rows
        batch = [
            Entry(first.seq_id, (token, *draft), n, Logits.ALL, first.adapter)
            for first, token, n, draft in zip(self._batch, self._tokens, rows.n_past, drafts, strict=True)
        ]
        reservation = self._kv.reserve([(entry.seq_id, entry.tokens, entry.n_past) for entry in batch])

        def read(rows: Rows | None, largest: Largest | None) -> list[list[Sampled | SampleFault]]:
            drawn = self._draw_in_turn(rows, largest, drafts)
            reservation.evaluated = [entry.tokens[: len(draws)] for entry, draws in zip(batch, drawn, strict=True)]
            return drawn

        with_logits = any(state.reads_logits for state in self._states)
        drawn = self._forward(reservation, lambda: lay_out(batch, self._kv), read, with_logits=with_logits)
        rows.positions = [n + 1 for n in rows.n_past]
        rows.n_past = [n + len(draws) for n, draws in zip(rows.n_past, drawn, strict=True)]
        self._tokens = [next_input(draws[-1]) for draws in drawn]
        self._steps_left -= 1
        self._layout = self._reservation = None  # the sequences have not moved on by one position each
        return drawn

    def close(self) -> None:
        """End the run. Call this before other code changes the sequences."""

    def _draw_in_turn(
        self, rows: Rows | None, largest: Largest | None, drafts: Sequence[Sequence[int]]
    ) -> list[list[Sampled | SampleFault]]:
        """Draw at the first position of every sequence, then at the second where the draft was right, and so on."""
        firsts = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))  # each sequence's first row
        draws: list[list[Sampled | SampleFault]] = [[] for _ in drafts]
        going = list(range(len(drafts)))
        for place in count():
            at = [firsts[index] + place for index in going]
            try:
                drawn = choose(
                    None if rows is None else rows[at],
                    None if largest is None else largest.rows(at),
                    [self._states[index] for index in going],
                    [self.rows.n_past[index] + 1 + place for index in going],
                )
            except Exception:
                if place == 0:
                    raise
                break  # The draws so far count. The next step meets this error at its first position.
            for index, draw in zip(going, drawn, strict=True):
                draws[index].append(draw)
                if isinstance(draw, Sampled):
                    # guard: a sampler knows the draft so far
                    self._states[index].accept(draw.token_id)
            going = [index for index in going if _is_right(draws[index], drafts[index])]
            # Another thread makes a slow mask, while the other sequences decode on.
            going = [index for index in going if not self._states[index].is_slow]
            if not going:
                break
        return draws

    def _lay_out(self) -> RaggedBatch:
        if self._layout is None:
            firsts = (self._batch[row] for row in self.rows.live)
            batch = [
                Entry(first.seq_id, (token,), n, adapter=first.adapter)
                for first, token, n in zip(firsts, self._tokens, self.rows.n_past, strict=True)
            ]
            self._layout = run_layout(self._kv, batch, self._steps_left)
        return self._layout.next(self._tokens)

    def _narrow(self) -> None:
        """Let the rows leave that have no further step."""
        places = self.rows.narrow(self._num_steps)
        if places is not None:
            self._tokens = [self._tokens[place] for place in places]
            if self._layout is not None and self._reservation is not None:
                self._layout.keep(places)
                self._reservation.keep(self.rows.seq_ids)


def next_input(draw: Sampled | SampleFault) -> int:
    """Return the next step's input token; 0 for a fault, as that sequence ends with this step."""
    return draw.token_id if isinstance(draw, Sampled) else 0


def _is_right(draws: Sequence[Sampled | SampleFault], draft: Sequence[int]) -> bool:
    """Whether the newest draw equals its drafted token, so that the logits of the next position count."""
    newest = draws[-1]
    # guard: draws after a wrong draft do not count
    return len(draws) <= len(draft) and isinstance(newest, Sampled) and newest.token_id == draft[len(draws) - 1]
