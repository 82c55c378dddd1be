"""OverlappedRun: a run of decode steps on a device, with each step launched before the step before it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from genbatch.nif.context.runs import RunRows, next_input, run_layout
from genbatch.nif.errors import DeviceFault
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Entry, Launched, LaunchingRunner, Redrawn
from genbatch.nif.sampling.sampler import NOT_FINITE, DrawTable, Sampled, SampleFault, SamplerState


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
                tokens[row] = next_input(result)
        # The last step of a row that has left was read, and the step under way was launched without the row.
        self.rows.free()
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
            # guard: a sampler's fault fails its row alone, in an overlapped step too
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
