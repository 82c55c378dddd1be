"""DecodeRun: step after step over the same sequences, each with the token that the step before drew for it.

run = ctx.decode_run(entries, samplers, max_steps=64)
drawn = run.step()
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch

from genbatch.nif.batch import Entry, RaggedBatch
from genbatch.nif.context.ragged_layout import run_layout
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.sampling.choose import choose
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState

T = TypeVar("T")
Steps = Sequence[tuple[int, Sequence[int], int]]  # seq_id, tokens, n_past
# Rows of logits, the largest in each, and after these, where any are wanted, rows of hidden states.
Read: TypeAlias = Callable[..., T]


class Forward(Protocol):
    """Evaluates entries whose layout is made once their blocks are there.

    Returns what `read` makes of the rows of logits, and of what is largest in each where the runner finds it by the
    way. Only then do the positions count: if it raises, nothing was evaluated.
    """

    def __call__(self, steps: Steps, layout: Callable[[], RaggedBatch], read: "Read[T]", *, with_logits: bool) -> T: ...


class DecodeRun:
    """Each step waits for the one before; `OverlappedRun` is used in the same way, and does not.

    Nobody else may change these sequences while a run goes on.

    Args:
        kv: holds the sequences.
        device: where batches are wanted.
        batch: an entry of one token each.
        states: how each sequence's next token is chosen; whoever accepts a token tells its state before the next step.
        forward: see Forward.
        max_steps: most steps there will be.
    """

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
        self._states = states
        self._forward = forward
        self._seq_ids = [entry.seq_id for entry in batch]
        self._tokens = [entry.tokens[0] for entry in batch]
        self._n_past = [entry.n_past for entry in batch]
        self._layout = run_layout(kv, device, batch, max_steps)

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way between two calls of `step`."""
        return False

    def step(self, *, ahead: bool = True) -> list[Sampled | SampleFault]:
        """Evaluates every sequence's newest token and draws the next.

        Args:
            ahead: whether the step after this one may begin, too; here none ever does.

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
        # A sequence without a token ends with this step; what the run would evaluate for it means nothing.
        self._tokens = [draw.token_id if isinstance(draw, Sampled) else 0 for draw in drawn]
        return drawn

    def close(self) -> None:
        """Ends the run; to be called before anybody else changes the sequences."""

    def _lay_out(self) -> RaggedBatch:
        return self._layout.next(self._tokens)
