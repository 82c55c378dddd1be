"""The interface between Context and whatever executes a forward pass over the paged KV cache."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.largest import Largest
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.lora import LoraAdapter


class Runner(Protocol):
    """Runs a model over ragged batches and owns the KV tensors, whose layout is its private matter.

    A block holds `block_size` positions of every layer of one group. Block ids are per group.
    """

    name: str  # for the banner: which path runs
    quantize: str  # the value of the option that took effect
    device: torch.device
    vocab_size: int  # width of the logits
    groups: tuple[LayerGroup, ...]

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Bytes of KV that one block of `group` takes."""
        ...

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Makes the KV pool: `num_blocks[g]` blocks for group g. Called once, before any forward."""
        ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Writes the batch's keys and values to its slots and returns logits [R, vocab_size] float32."""
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination) within the pool: copy on write, beam forks."""
        ...

    def read_blocks(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """The blocks' content as one host tensor [len(blocks), bytes_per_block] uint8; see `BackgroundCopies`."""
        ...

    def write_blocks(self, group: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Puts back what `read_blocks` gave, possibly into other blocks."""
        ...

    def close(self) -> None:
        """Releases the KV pool."""
        ...


@runtime_checkable
class ChoosingRunner(Protocol):
    """A runner that finds each row's largest logit as it computes them, so that they need not be written and read."""

    def forward_largest(self, batch: RaggedBatch, *, with_logits: bool) -> tuple[torch.Tensor | None, Largest]:
        """As `forward`: the logits, None if they are not wanted, and each row's largest."""
        ...


@runtime_checkable
class InvariantRunner(Protocol):
    """A runner whose logits are the same, bit for bit, whether a sequence's tokens come one by one or together."""

    rows_are_invariant: Literal[True]


@runtime_checkable
class StateRunner(Protocol):
    """A runner that also gives the hidden states that embeddings are made of."""

    def forward_states(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and the hidden states of `batch.state_rows`, [S, hidden] float32."""
        ...


class Launched(Protocol):
    """A decode step that the device has been told to make."""

    def wait(self) -> list[int | None]:
        """The token drawn in each row, None where the row's logits are not finite; to be called once.

        Raises:
            Exception: the device failed.
        """
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner that begins a decode step, draws included, without waiting for the device."""

    def launch(self, batch: RaggedBatch, draws: torch.Tensor, after: Launched | None) -> Launched:
        """Begins a step; at most one other may be under way.

        Args:
            batch: one token an entry, each with its row of logits. It may be changed once this returns.
            draws: [R, 5] float64 on the CPU, how each row's next token is drawn; see `DrawTable`.
            after: the step launched before this one, over the same rows: its tokens are this step's input, and
                those in `batch` are not read. None takes those in `batch`.

        Raises:
            BatchError: an index leads outside the pool or the model; nothing was written.
        """
        ...


@runtime_checkable
class AdaptingRunner(Protocol):
    """A runner that computes adapters: each row's own, several in one forward."""

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Makes it ready for batches that name it; may be called while a step runs, from another thread."""
        ...

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """Gives its memory back; no batch names it from now on, and no step that does is under way."""
        ...


@runtime_checkable
class HoldsMemory(Protocol):
    """A runner that takes memory of its own beside the pool and a step's activations."""

    def own_bytes(self, num_sequences: int, block_size: int) -> int:
        """How many bytes, for steps of at most so many decodes."""
        ...


@runtime_checkable
class KnowsStep(Protocol):
    """A runner that knows what its steps' buffers take; of the others it is reckoned from the model's shape."""

    def step_bytes(self, num_tokens: int, num_sequences: int) -> int:
        """Bytes of a step, where the logits of every token are wanted; those logits are not among them."""
        ...


@runtime_checkable
class BackgroundCopies(Protocol):
    """A runner whose `read_blocks` returns before the content has arrived; `write_blocks` may be given it at once."""

    def finish_copies(self) -> None:
        """Waits until all that `read_blocks` returned holds its content."""
        ...
