"""The interface between Context and whatever executes a forward pass over the paged KV cache."""

from collections.abc import Sequence
from typing import Protocol

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.layer_group import LayerGroup


class Runner(Protocol):
    """Runs a model over ragged batches and owns the KV tensors, whose layout is its private matter.

    A block holds `block_size` positions of every layer of one group. Block ids are per group.
    """

    name: str  # for the banner: which path runs
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
        """The blocks' content as one host tensor [len(blocks), bytes_per_block] uint8."""
        ...

    def write_blocks(self, group: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Puts back what `read_blocks` gave, possibly into other blocks."""
        ...

    def close(self) -> None:
        """Releases the KV pool."""
        ...
