"""Runs of decode steps without a scheduler between the steps: `DecodeRun` is serial, `OverlappedRun` launches ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

import torch

from genbatch.nif.context.ragged_layout import RunLayout, lay_out, run_layout
from genbatch.nif.errors import DeviceFault
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.kv.reservation import Reservation
from genbatch.nif.runner import Entry, Largest, Launched, LaunchingRunner, Logits, RaggedBatch
from genbatch.nif.sampling.choosing import choose
from genbatch.nif.sampling.draw import NOT_FINITE, DrawTable, SamplingParams
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState

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


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sequence to draft for.

    Args:
        key: tells the sequence from all others.
        tokens: its prompt and its output so far.
        params: how its tokens are drawn.
    """

    key: int
    tokens: list[int]
    params: SamplingParams


class Drafter(Protocol):
    """Guesses the next tokens of a run's sequences; `DraftModel` implements it."""

    forward_s: float  # the measured seconds of a forward that drafts one token for each sequence
    seconds: float  # spent on drafts, in all

    def chance(self, key: int) -> float:
        """Return the estimated probability that a drafted token of this sequence is right."""
        ...

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        """Draft up to `lengths[i]` tokens for each sequence."""
        ...

    def verified(self, key: int, num_drafted: int, num_right: int) -> None:
        """Learn from a step: how many of the drafted tokens were right."""
        ...

    def close(self) -> None:
        """Release the drafter's memory."""
        ...


class DecodeRun:
    """Runs decode steps one after another. `OverlappedRun` has the same methods and launches one step ahead.

    No other code may change these sequences before `close`.

    Args:
        kv: holds the sequences.
        device: the device for the batch's tensors.
        batch: an entry of one token each.
        states: each sequence's sampler; the caller updates it with each accepted token before the next step.
        forward: see Forward.
        max_steps: most steps of this run.
    """

    verifies: ClassVar[Literal[True]] = True  # checks drafted tokens

    def __init__(
        self,
        kv: KVCache,
        device: torch.device,
        batch: Sequence[Entry],
        states: Sequence[SamplerState],
        forward: Forward,
        max_steps: int,
    ) -> None:
        assert all(len(entry.tokens) == 1 for entry in batch)
        self._kv = kv
        self._device = device
        self._batch = batch
        self._states = states
        self._forward = forward
        self._steps_left = max_steps
        self._seq_ids = [entry.seq_id for entry in batch]
        self._tokens = [entry.tokens[0] for entry in batch]
        self._n_past = [entry.n_past for entry in batch]
        self._layout: RunLayout | None = run_layout(kv, device, batch, max_steps)

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

        Each draft is evaluated behind its sequence's newest token, and a token is drawn at each position. The draws up
        to the first mismatch with the draft are kept. The KV of the rejected tokens is dropped.

        Args:
            drafts: each sequence's guessed next tokens; a draft may be empty. `has_room` must hold for the drafts, and
                no sampler of a sequence with a draft may edit the logits.

        Returns:
            Each sequence's draws: the right part of its draft, and one more token.

        Raises:
            BatchError, OutOfBlocks: as `step`.
        """
        batch = [
            Entry(first.seq_id, (token, *draft), n, Logits.ALL, first.adapter)
            for first, token, n, draft in zip(self._batch, self._tokens, self._n_past, drafts, strict=True)
        ]
        states = [state for state, entry in zip(self._states, batch, strict=True) for _ in entry.tokens]
        positions = [entry.n_past + 1 + place for entry in batch for place in range(len(entry.tokens))]

        def read(rows: torch.Tensor | None, largest: Largest | None) -> list[list[Sampled | SampleFault]]:
            draws = iter(choose(rows, largest, states, positions))
            return [_that_count(draft, list(islice(draws, len(draft) + 1))) for draft in drafts]

        drawn = self._forward(
            [(entry.seq_id, entry.tokens, entry.n_past) for entry in batch],
            lambda: lay_out(batch, self._kv, self._device),
            read,
            with_logits=any(state.reads_logits for state in states),
            kept=lambda drawn: [entry.tokens[: len(draws)] for entry, draws in zip(batch, drawn, strict=True)],
        )
        self._n_past = [n + len(draws) for n, draws in zip(self._n_past, drawn, strict=True)]
        self._tokens = [_input(draws[-1]) for draws in drawn]
        self._steps_left -= 1
        self._layout = None  # the sequences have not moved on by one position each
        return drawn

    def close(self) -> None:
        """End the run. Call this before other code changes the sequences."""

    def _lay_out(self) -> RaggedBatch:
        if self._layout is None:
            batch = [
                Entry(first.seq_id, (token,), n, adapter=first.adapter)
                for first, token, n in zip(self._batch, self._tokens, self._n_past, strict=True)
            ]
            self._layout = run_layout(self._kv, self._device, batch, self._steps_left)
        return self._layout.next(self._tokens)


def _input(draw: Sampled | SampleFault) -> int:
    """Return the next step's input token; 0 for a fault, as that sequence ends with this step."""
    return draw.token_id if isinstance(draw, Sampled) else 0


def _that_count(draft: Sequence[int], draws: list[Sampled | SampleFault]) -> list[Sampled | SampleFault]:
    """Return the draws up to the first that differs from the draft: later draws follow a wrong token."""
    for place, token in enumerate(draft):
        draw = draws[place]
        # guard: draws after a wrong draft do not count
        if not isinstance(draw, Sampled) or draw.token_id != token:
            return draws[: place + 1]
    return draws


_UNKNOWN = 0  # a placeholder: the device fills in the token that it draws


def can_overlap(states: Sequence[SamplerState]) -> bool:
    """Whether the next step's draws can be set up before the host has read this step's tokens."""
    # Penalties and constraints depend on the tokens so far, and log-probabilities need the logits on the host.
    return not any(state.edits or state.params.logprobs is not None for state in states)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step and the reservation of its blocks."""

    launched: Launched
    reservation: Reservation


class OverlappedRun:
    """Runs decode steps and launches each step before the previous one is read. It has DecodeRun's methods.

    Call `close` before other code changes the sequences.

    Args:
        kv: holds the sequences.
        runner: launches the steps.
        batch: an entry of one token each.
        states: each sequence's sampler; `can_overlap(states)` must hold.
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
        if ahead and self._steps_left:
            try:
                self._ahead = self._launch([_UNKNOWN] * len(self._tokens), flight.launched)
            except Exception as error:
                self._fault = error  # raised by the next call, as this step's tokens must be returned first
        drawn = _read(flight)
        # A sequence without a token ends with this step; the device also uses 0 for it.
        self._tokens = [0 if token is None else token for token in drawn]
        return [SampleFault(NOT_FINITE) if token is None else Sampled(token) for token in drawn]

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
