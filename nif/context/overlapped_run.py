"""OverlappedRun: a decode run whose next step is under way before a step's tokens are read.

run = ctx.decode_run(entries, samplers, max_steps=64)
try:
    drawn = run.step()     # the step after it has begun
    drawn = run.step()
finally:
    run.close()            # waits for the step under way and undoes it

The device takes a step's input from what it drew itself. The host, one step behind, reserves the blocks for a token
that it does not know and tells the cache when it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from genbatch.nif.batch import Entry
from genbatch.nif.context.ragged_layout import run_layout
from genbatch.nif.errors import DeviceFault
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.kv.reservation import Reservation
from genbatch.nif.runner import Launched, LaunchingRunner
from genbatch.nif.sampling.draw_table import NOT_FINITE, DrawTable
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState

_UNKNOWN = 0  # stands for a token that the device has drawn or will


def can_overlap(states: Sequence[SamplerState]) -> bool:
    """Whether these draws need nothing of the host that it learns only from the step before."""
    # Penalties and constraints follow the output, and log-probabilities are read beside the token.
    return not any(state.edits or state.params.logprobs is not None for state in states)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way, and its blocks."""

    launched: Launched
    reservation: Reservation


class OverlappedRun:
    """Used as `DecodeRun` is, but for its end: `close` before anybody else changes the sequences.

    Args:
        kv: holds the sequences.
        runner: launches the steps.
        batch: an entry of one token each.
        states: how each sequence's next token is chosen; `can_overlap` of them is true.
        max_steps: most steps there will be.
    """

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
        self._layout = run_layout(kv, runner.device, batch, max_steps)
        self._draws = DrawTable([state.params for state in states])
        self._steps_left = max_steps  # to be launched
        self._ahead: _Flight | None = None
        self._fault: Exception | None = None  # why no step could be launched ahead

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return self._ahead is not None

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault]:
        """Evaluates every sequence's newest token and draws the next.

        Args:
            ahead: whether the step after this one may begin, too.

        Raises:
            BatchError, OutOfBlocks: as `Context.eval`; nothing was changed, and the run is over.
            DeviceFault: the device failed, and the context with it.
        """
        if self._fault is not None:
            raise self._fault
        flight = self._ahead or self._launch(self._tokens, None)
        self._ahead = None
        # The tokens that it evaluates have been read by now, and its blocks are filled before anything that is
        # launched later can read them.
        flight.reservation.commit([(token,) for token in self._tokens])
        if ahead and self._steps_left:
            try:
                self._ahead = self._launch([_UNKNOWN] * len(self._tokens), flight.launched)
            except Exception as error:
                self._fault = error  # the next step's to raise: this one's tokens come first
        drawn = _read(flight)
        # A sequence without a token ends with this step; the device takes 0 for it, too.
        self._tokens = [0 if token is None else token for token in drawn]
        return [SampleFault(NOT_FINITE) if token is None else Sampled(token) for token in drawn]

    def close(self) -> None:
        """Waits for the step under way and undoes it; only then do its blocks belong to anybody else.

        Raises:
            DeviceFault: as `step`.
        """
        flight, self._ahead = self._ahead, None
        if flight is not None:
            try:
                _read(flight)
            finally:
                flight.reservation.rollback()

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
        return _Flight(launched, reservation)


def _read(flight: _Flight) -> list[int | None]:
    try:
        return flight.launched.wait()
    except Exception as error:
        raise DeviceFault(f"the device failed in a decode step: {error}") from error
