"""Runs of decode steps without a scheduler between the steps: `DecodeRun` is serial, `OverlappedRun` launches ahead.

A RunLayout lays out the entries of a step as a ragged batch for the runners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from genbatch.nif.errors import DeviceFault
from genbatch.nif.kv.block_tables import Reservation
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import (
    Entry,
    Largest,
    Launched,
    LaunchingRunner,
    Logits,
    RaggedBatch,
    Redrawn,
    Rows,
    num_states,
)
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.draw import NOT_FINITE, DrawTable
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState


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
        adapters = adapters_of(batch)
        size = len(seq_ids)
        self._tokens = np.empty(size, np.int64)
        self._positions = np.array(n_past, np.int64) - 1
        self._kv_lens = np.array(n_past, np.int32)
        self._longest = int(self._kv_lens.max())
        width = -(-(self._longest + max_steps) // kv.block_size)
        self._tables = [np.zeros((size, width), np.int32) for _ in kv.groups]
        self._slots = [np.zeros(size, np.int64) for _ in kv.groups]
        self._begun = False
        self._fixed = {
            "input_ids": self._tokens,
            "positions": self._positions,
            "query_starts": np.arange(size + 1, dtype=np.int32),
            "kv_lens": self._kv_lens,
            "slots": tuple(self._slots),
            "block_tables": tuple(self._tables),
            "logit_rows": np.arange(size),
            "adapters": adapters,
        }

    def next(self, tokens: Sequence[int]) -> RaggedBatch:
        """Update the batch for the next step, after its blocks were reserved."""
        self._tokens[:] = tokens
        self._positions += 1
        self._kv_lens += 1
        self._longest += 1
        if self._begun:
            for slots in self._slots:
                slots += 1
            self._enter_blocks()
        else:
            self._begun = True
            self._fill()
        return RaggedBatch(**self._fixed, max_query_len=1, max_kv_len=self._longest)  # type: ignore[arg-type]

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


T = TypeVar("T")
Kept: TypeAlias = Callable[[T], Sequence[Sequence[int]]]  # maps `read`'s result to each entry's tokens to commit
Steps = Sequence[tuple[int, Sequence[int], int]]  # seq_id, tokens, n_past
# Takes rows of logits, the largest of each row, and rows of hidden states if an entry asks for states.
Read: TypeAlias = Callable[..., T]


class Forward(Protocol):
    """Reserve blocks, make the layout, run the forward, and return `read`'s result.

    `read` gets the rows of logits, and each row's largest logit if the runner computes it. The positions are committed
    after `read`: all of them, or those that `kept` returns. If `read` raises, nothing is committed.
    """

    def __call__(
        self,
        steps: Steps,
        layout: Callable[[], RaggedBatch],
        read: "Read[T]",
        *,
        with_logits: bool,
        kept: "Kept[T] | None" = None,
    ) -> T: ...


class DecodeRun:
    """Runs decode steps one after another. `OverlappedRun` has the same methods and launches one step ahead.

    No other code may change these sequences before `close`.

    Args:
        kv: holds the sequences.
        batch: an entry of one token each.
        states: each sequence's sampler; after `step` the caller updates it with the drawn token.
        forward: see Forward.
        max_steps: most steps of this run.
    """

    verifies: ClassVar[Literal[True]] = True  # checks drafted tokens

    def __init__(
        self,
        kv: KVCache,
        batch: Sequence[Entry],
        states: Sequence[SamplerState],
        forward: Forward,
        max_steps: int,
    ) -> None:
        assert all(len(entry.tokens) == 1 for entry in batch)
        self._kv = kv
        self._batch = batch
        self._states = states
        self._forward = forward
        self._steps_left = max_steps
        self._seq_ids = [entry.seq_id for entry in batch]
        self._tokens = [entry.tokens[0] for entry in batch]
        self._n_past = [entry.n_past for entry in batch]
        self._layout: RunLayout | None = run_layout(kv, batch, max_steps)

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return False

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault]:
        """Evaluate every sequence's newest token and draw the next.

        Args:
            ahead: whether the next step may begin, too; a DecodeRun ignores it.

        Raises:
            BatchError, OutOfBlocks: as `Context.eval`; nothing was changed, and the run is over.
        """
        steps = [
            (seq_id, (token,), n) for seq_id, token, n in zip(self._seq_ids, self._tokens, self._n_past, strict=True)
        ]
        reads = any(state.reads_logits for state in self._states)
        positions = [n + 1 for n in self._n_past]
        drawn = self._forward(
            steps,
            self._lay_out,
            lambda rows, largest: choose(rows, largest, self._states, positions),
            with_logits=reads,
        )
        self._n_past = positions
        self._tokens = [_input(draw) for draw in drawn]
        self._steps_left -= 1
        return drawn

    def has_room(self, drafts: Sequence[Sequence[int]]) -> bool:
        """Whether the pool has enough blocks to verify these drafts."""
        paper = self._kv.draft()
        ends = [n + 1 + len(draft) for n, draft in zip(self._n_past, drafts, strict=True)]
        return all(paper.grow([seq_id], end) for seq_id, end in zip(self._seq_ids, ends, strict=True))

    def verify(self, drafts: Sequence[Sequence[int]]) -> list[list[Sampled | SampleFault]]:
        """Verify drafted tokens in one step; the draws equal those of single steps.

        Each draft is evaluated behind its sequence's newest token. A token is drawn at each position, up to the first
        mismatch with the draft. The KV of the rejected tokens is dropped. The samplers accept the drawn tokens here,
        since a penalty or a grammar needs each token before it can draw the next one.

        Args:
            drafts: each sequence's guessed next tokens; a draft may be empty. `has_room` must hold for the drafts.

        Returns:
            Each sequence's draws: the right part of its draft, and one more token; fewer if a mask becomes slow.

        Raises:
            BatchError, OutOfBlocks: as `step`.
        """
        batch = [
            Entry(first.seq_id, (token, *draft), n, Logits.ALL, first.adapter)
            for first, token, n, draft in zip(self._batch, self._tokens, self._n_past, drafts, strict=True)
        ]
        drawn = self._forward(
            [(entry.seq_id, entry.tokens, entry.n_past) for entry in batch],
            lambda: lay_out(batch, self._kv),
            lambda rows, largest: self._draw_in_turn(rows, largest, drafts),
            with_logits=any(state.reads_logits for state in self._states),
            kept=lambda drawn: [entry.tokens[: len(draws)] for entry, draws in zip(batch, drawn, strict=True)],
        )
        self._n_past = [n + len(draws) for n, draws in zip(self._n_past, drawn, strict=True)]
        self._tokens = [_input(draws[-1]) for draws in drawn]
        self._steps_left -= 1
        self._layout = None  # the sequences have not moved on by one position each
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
                    [self._n_past[index] + 1 + place for index in going],
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
            batch = [
                Entry(first.seq_id, (token,), n, adapter=first.adapter)
                for first, token, n in zip(self._batch, self._tokens, self._n_past, strict=True)
            ]
            self._layout = run_layout(self._kv, batch, self._steps_left)
        return self._layout.next(self._tokens)


def _input(draw: Sampled | SampleFault) -> int:
    """Return the next step's input token; 0 for a fault, as that sequence ends with this step."""
    return draw.token_id if isinstance(draw, Sampled) else 0


def _is_right(draws: Sequence[Sampled | SampleFault], draft: Sequence[int]) -> bool:
    """Whether the newest draw equals its drafted token, so that the logits of the next position count."""
    newest = draws[-1]
    # guard: draws after a wrong draft do not count
    return len(draws) <= len(draft) and isinstance(newest, Sampled) and newest.token_id == draft[len(draws) - 1]


def _depends(state: SamplerState) -> bool:
    """Whether the next draw depends on the output so far, or is to be scored."""
    return state.edits or state.params.logprobs is not None


_UNKNOWN = 0  # a placeholder: the device fills in the token that it draws


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step, the reservation of its blocks, and the positions that its draws are of."""

    launched: Launched
    reservation: Reservation
    positions: list[int]


class OverlappedRun:
    """Runs decode steps and launches each step before the previous one is read. It has DecodeRun's methods.

    Call `close` before other code changes the sequences.

    A penalty, a constraint or a log-probability depends on the tokens so far. Such rows are drawn again: a step's
    forward runs while the host reads the tokens of the step before, and the host then launches these rows' draws.

        host      launch N+1   wait for N   redraw N+1   launch N+2   wait for N+1   ...
        device    [forward N+1             ][redraw    ][forward N+2              ]

    Args:
        kv: holds the sequences.
        runner: launches the steps.
        batch: an entry of one token each.
        states: each sequence's sampler; the caller updates it with each accepted token before the next step.
        max_steps: most steps of this run.
    """

    verifies: ClassVar[Literal[False]] = False

    def __init__(
        self,
        kv: KVCache,
        runner: LaunchingRunner,
        batch: Sequence[Entry],
        states: Sequence[SamplerState],
        max_steps: int,
    ) -> None:
        assert all(len(entry.tokens) == 1 for entry in batch)
        self._kv = kv
        self._runner = runner
        self._seq_ids = [entry.seq_id for entry in batch]
        self._tokens = [entry.tokens[0] for entry in batch]  # input of the step to be read next
        self._n_past = [entry.n_past for entry in batch]  # of the step to be launched next
        self._layout = run_layout(kv, batch, max_steps)
        self._states = states
        self._draws = DrawTable([state.params for state in states])
        # A row may leave these, when it has its `min_tokens`; none joins them.
        self._dependent = [row for row, state in enumerate(states) if _depends(state)]
        self._steps_left = max_steps  # to be launched
        self._ahead: _Flight | None = None
        self._fault: Exception | None = None  # why no step could be launched ahead

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return self._ahead is not None

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault]:
        """Evaluate every sequence's newest token and draw the next.

        Args:
            ahead: whether the next step may be launched, too.

        Raises:
            BatchError, OutOfBlocks: as `Context.eval`; nothing was changed, and the run is over.
            DeviceFault: the device failed, and the context with it.
        """
        if self._fault is not None:
            raise self._fault
        flight = self._ahead or self._launch(self._tokens, None)
        self._ahead = None
        # Commit now: the host knows this step's input tokens, and the device fills the blocks before any later launch
        # can read them.
        flight.reservation.commit([(token,) for token in self._tokens])
        # Before the next step is launched: it reads these rows' tokens.
        redrawn = self._redraw(flight)
        if ahead and self._steps_left:
            try:
                self._ahead = self._launch([_UNKNOWN] * len(self._tokens), flight.launched)
            except Exception as error:
                self._fault = error  # raised by the next call, as this step's tokens must be returned first
        tokens = _read(flight)
        drawn: list[Sampled | SampleFault] = [
            SampleFault(NOT_FINITE) if token is None else Sampled(token) for token in tokens
        ]
        for rows, results in redrawn:
            for row, result in zip(rows, results(), strict=True):
                drawn[row] = result
        # A sequence without a token ends with this step; the device also uses 0 for it.
        self._tokens = [_input(draw) for draw in drawn]
        return drawn

    def close(self) -> None:
        """Wait for the step under way and roll it back, so that other sequences may take its blocks.

        Raises:
            DeviceFault: as `step`.
        """
        flight, self._ahead = self._ahead, None
        if flight is not None:
            try:
                _read(flight)
            finally:
                # guard: the step under way is undone
                flight.reservation.rollback()

    def _redraw(self, flight: _Flight) -> "list[tuple[list[int], Callable[[], list[Sampled | SampleFault]]]]":
        """Launch the draws of the rows that need the host; returns these rows, and functions that read them."""
        rows = self._dependent = [row for row in self._dependent if _depends(self._states[row])]
        if not rows:
            return []
        try:
            return [(rows, self._redrawn(flight, rows).results)]
        except Exception:
            # guard: a sampler's fault is its row's, in an overlapped step too
            return [([row], self._redrawn_alone(flight, row)) for row in rows]

    def _redrawn(self, flight: _Flight, rows: list[int]) -> Redrawn:
        states = [self._states[row] for row in rows]
        return flight.launched.redraw(rows, states, [flight.positions[row] for row in rows])

    def _redrawn_alone(self, flight: _Flight, row: int) -> "Callable[[], list[Sampled | SampleFault]]":
        try:
            return self._redrawn(flight, [row]).results
        except Exception as error:
            fault = SampleFault(f"choosing a token failed: {error!r}")
            return lambda: [fault]

    def _launch(self, tokens: Sequence[int], after: Launched | None) -> _Flight:
        steps = [
            (seq_id, (token,), n_past)
            for seq_id, token, n_past in zip(self._seq_ids, tokens, self._n_past, strict=True)
        ]
        reservation = self._kv.reserve(steps)
        positions = [n_past + 1 for n_past in self._n_past]
        try:
            for group, pairs in enumerate(reservation.copies):
                if pairs:
                    self._runner.copy_blocks(group, pairs)
            launched = self._runner.launch(self._layout.next(tokens), self._draws.at(positions), after)
        except BaseException:
            reservation.rollback()
            raise
        self._n_past = positions
        self._steps_left -= 1
        return _Flight(launched, reservation, positions)


def _read(flight: _Flight) -> list[int | None]:
    try:
        return flight.launched.wait()
    except Exception as error:
        raise DeviceFault(f"the device failed in a decode step: {error}") from error
