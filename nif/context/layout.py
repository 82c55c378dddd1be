"""Layouts: the entries of a step as a ragged batch for the runners, one step or a run of steps.

batch = lay_out(entries, kv)                  # one step
layout = run_layout(kv, entries, max_steps)   # a run of decode steps over the same sequences
batch = layout.next(tokens)
layout.keep(places)                           # some sequences have left
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Entry, Logits, RaggedBatch


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


class RunLayout(Protocol):
    """Lays out the steps of a run, one after another."""

    def next(self, tokens: Sequence[int]) -> RaggedBatch:
        """Return the next step's batch, after its blocks were reserved. The previous batch may change in place.

        Args:
            tokens: each sequence's input token.
        """
        ...

    def keep(self, places: list[int]) -> None:
        """Lay out the following steps for the sequences at these places only."""
        ...


def run_layout(kv: KVCache, batch: Sequence[Entry], max_steps: int) -> RunLayout:
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
        """Lay out the next step's batch, after its blocks were reserved."""
        batch = [
            Entry(first.seq_id, (token,), first.n_past + self._done, adapter=first.adapter)
            for first, token in zip(self._batch, tokens, strict=True)
        ]
        self._done += 1
        return lay_out(batch, self._kv)

    def keep(self, places: list[int]) -> None:
        """See `RunLayout`."""
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
        """Update the batch for the next step, after its blocks were reserved."""
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
        """See `RunLayout`."""
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
