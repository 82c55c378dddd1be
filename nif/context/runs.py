"""Runs of decode steps without a scheduler between the steps: `DecodeRun` is serial, `OverlappedRun` launches ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

from genbatch.nif.context.layout import RunLayout, lay_out, run_layout
from genbatch.nif.errors import DeviceFault
from genbatch.nif.kv.block_tables import Reservation, RunReservation
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
)
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.sampler import NOT_FINITE, DrawTable, Sampled, SampleFault, SamplerState

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
        self.freed: list[int] = []  # rows that hold no blocks any more
        self._remove = remove
        self._all_ids = self.seq_ids
        self._num_draws = num_draws
        self._next_end = min(num_draws)  # steps after which the next row leaves
        self._leaving: set[int] = set()
        self._holding: set[int] = set()  # rows that have left and still hold blocks

    def leave(self, row: int) -> None:
        """Take a row out of the following steps."""
        self._leaving.add(row)

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
        self.freed += sorted(self._holding)
        self._holding.clear()


class DecodeRun:
    """Runs decode steps one after another. `OverlappedRun` has the same methods and launches one step ahead.

    No other code may change these sequences before `close`. A sequence leaves the run after its last token, or by
    `leave`. The run then frees its blocks, and goes on with the others.

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
        self._layout: RunLayout | None = None
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
            self._tokens = [_input(draw) for draw in draws]
            self._steps_left -= 1
            self._num_steps += 1
            for row, draw in zip(live, draws, strict=True):
                drawn[row] = draw
            self._narrow()
        self.rows.free()
        return drawn

    def leave(self, row: int) -> None:
        """Take a sequence out of the following steps; `freed` has its row once it holds no blocks."""
        self.rows.leave(row)

    def freed(self) -> list[int]:
        """Return the rows of the batch whose sequences were freed since the last call."""
        freed, self.rows.freed = self.rows.freed, []
        return freed

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
        self._tokens = [_input(draws[-1]) for draws in drawn]
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
    """A launched step, its rows of the run, and the positions of their draws."""

    launched: Launched
    rows: list[int]
    positions: list[int]


class OverlappedRun:
    """Runs decode steps and launches each step before the previous one is read. It has DecodeRun's methods.

    Call `close` before other code changes the sequences.

    A penalty, a constraint or a log-probability depends on the tokens so far. Such rows are drawn again: a step's
    forward runs while the host reads the tokens of the step before, and the host then launches these rows' draws.

        host      launch N+1   wait for N   redraw N+1   launch N+2   wait for N+1   ...
        device    [forward N+1             ][redraw    ][forward N+2              ]

    A sequence that leaves may have a row in steps that are launched already. Its blocks are freed when they were read.

    Args:
        kv: holds the sequences.
        runner: launches the steps.
        batch: an entry of one token each.
        states: each sequence's sampler; the caller updates it with each accepted token before the next step.
        max_steps: most steps of this run.
        rows: its rows, one for each entry.
    """

    verifies: ClassVar[Literal[False]] = False

    def __init__(
        self,
        kv: KVCache,
        runner: LaunchingRunner,
        batch: Sequence[Entry],
        states: Sequence[SamplerState],
        max_steps: int,
        rows: RunRows,
    ) -> None:
        assert all(len(entry.tokens) == 1 for entry in batch)
        self._kv = kv
        self._runner = runner
        self.rows = rows  # of the step to be launched next
        self._tokens = [entry.tokens[0] for entry in batch]  # every row's input of the step to be read next
        self._layout = run_layout(kv, batch, max_steps)
        self._reservation = kv.reserve_run(rows.seq_ids)
        self._states = states
        self._draws = DrawTable([state.params for state in states])
        # A row may leave these, when it has its `min_tokens`; none joins them.
        self._dependent = [row for row, state in enumerate(states) if _depends(state)]
        self._steps_left = max_steps  # to be launched
        self._num_launched = 0
        self._ahead: _Flight | None = None
        self._fault: Exception | None = None  # why no step could be launched ahead

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return self._ahead is not None

    @property
    def is_over(self) -> bool:
        """Whether no step is left to read."""
        return self._ahead is None and self._fault is None and not (self._steps_left and self.rows.live)

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault | None]:
        """Evaluate every sequence's newest token and draw the next; a sequence that has left has no draw.

        Args:
            ahead: whether the next step may be launched, too.

        Raises:
            BatchError, OutOfBlocks: as `Context.eval`; nothing was changed, and the run is over.
            DeviceFault: the device failed, and the context with it.
        """
        if self._fault is not None:
            raise self._fault
        drawn: list[Sampled | SampleFault | None] = [None] * len(self._tokens)
        flight = self._ahead or self._launch(None)
        self._ahead = None
        if flight is None:
            self.rows.free()
            return drawn
        # Commit now: the host knows this step's input tokens, and the device fills the blocks before any later launch
        # can read them.
        self._reservation.tokens = [self._tokens[row] for row in flight.rows]
        self._reservation.commit()
        # Before the next step is launched: it reads these rows' tokens.
        redrawn = self._redraw(flight)
        if ahead and self._steps_left:
            try:
                self._ahead = self._launch(flight)
            except Exception as error:
                self._fault = error  # raised by the next call, as this step's tokens must be returned first
        self.rows.positions = flight.positions
        tokens = self._tokens
        for row, token in zip(flight.rows, _read(flight), strict=True):
            drawn[row] = SampleFault(NOT_FINITE) if token is None else Sampled(token)
            # A sequence without a token ends with this step; the device also uses 0 for it.
            tokens[row] = token or 0
        for rows, results in redrawn:
            for row, result in zip(rows, results(), strict=True):
                drawn[row] = result
                tokens[row] = _input(result)
        # The last step of a row that has left was read, and the step under way was launched without the row.
        self.rows.free()
        return drawn

    def leave(self, row: int) -> None:
        """See `DecodeRun.leave`; a step under way still has a draw of this row."""
        self.rows.leave(row)

    def freed(self) -> list[int]:
        """See `DecodeRun.freed`."""
        freed, self.rows.freed = self.rows.freed, []
        return freed

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
                self._reservation.rollback()

    def _redraw(self, flight: _Flight) -> "list[tuple[list[int], Callable[[], list[Sampled | SampleFault]]]]":
        """Launch the draws of the rows that need the host; returns these rows, and functions that read them."""
        if not self._dependent:
            return []
        places = {row: place for place, row in enumerate(flight.rows)}
        rows = self._dependent = [row for row in self._dependent if row in places and _depends(self._states[row])]
        if not rows:
            return []
        try:
            return [(rows, self._redrawn(flight, rows, places).results)]
        except Exception:
            # guard: a sampler's fault is its row's, in an overlapped step too
            return [([row], self._redrawn_alone(flight, row, places)) for row in rows]

    def _redrawn(self, flight: _Flight, rows: list[int], places: dict[int, int]) -> Redrawn:
        states, at = [self._states[row] for row in rows], [places[row] for row in rows]
        return flight.launched.redraw(at, states, [flight.positions[place] for place in at])

    def _redrawn_alone(
        self, flight: _Flight, row: int, places: dict[int, int]
    ) -> "Callable[[], list[Sampled | SampleFault]]":
        try:
            return self._redrawn(flight, [row], places).results
        except Exception as error:
            fault = SampleFault(f"choosing a token failed: {error!r}")
            return lambda: [fault]

    def _launch(self, after: _Flight | None) -> _Flight | None:
        """Launch the next step, behind the step `after` or with tokens that the host knows; None if no row is left."""
        rows = self.rows
        places = rows.narrow(self._num_launched)
        if not rows.live:
            return None
        if places is not None:
            self._layout.keep(places)
            self._draws.keep(places)
            self._reservation.keep(rows.seq_ids)
        tokens = [_UNKNOWN] * len(rows.live) if after is not None else [self._tokens[row] for row in rows.live]
        reservation = self._kv.reserve_step(self._reservation, tokens)
        positions = [n_past + 1 for n_past in rows.n_past]
        try:
            for group, pairs in enumerate(reservation.copies):
                if pairs:
                    self._runner.copy_blocks(group, pairs)
            launched = self._runner.launch(
                self._layout.next(tokens),
                self._draws.at(positions),
                None if after is None else after.launched,
                None if after is None else places,
            )
        except BaseException:
            reservation.rollback()
            raise
        rows.n_past = positions
        self._steps_left -= 1
        self._num_launched += 1
        return _Flight(launched, rows.live, positions)


def _read(flight: _Flight) -> list[int | None]:
    try:
        return flight.launched.wait()
    except Exception as error:
        raise DeviceFault(f"the device failed in a decode step: {error}") from error
