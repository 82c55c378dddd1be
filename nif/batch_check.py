"""Whether a ragged batch stays inside the pool and the model, decided on the host before any kernel runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.errors import BatchError


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a batch's indices must stay below.

    Args:
        num_blocks: blocks in the pool of each layer group.
        block_size: positions a block holds.
        vocab_size: token ids are below it.
        max_position: positions one sequence may have.
    """

    num_blocks: Sequence[int]
    block_size: int
    vocab_size: int
    max_position: int


def check_batch(batch: RaggedBatch, limits: BatchLimits) -> None:
    """Checks every index of a batch whose tensors are on the CPU.

    Raises:
        BatchError: an index leads outside the pool, the block table, the vocabulary or the batch.
    """
    num_tokens, num_entries = len(batch.input_ids), len(batch.kv_lens)
    starts = batch.query_starts
    query_lens = starts[1:] - starts[:-1]
    if len(starts) != num_entries + 1 or starts[0] != 0 or starts[-1] != num_tokens or (query_lens < 1).any():
        raise BatchError(f"query_starts do not divide {num_tokens} tokens among {num_entries} entries")
    if (batch.kv_lens < query_lens).any():
        raise BatchError("an entry holds fewer positions than it has tokens")
    if int(query_lens.max()) > batch.max_query_len or int(batch.kv_lens.max()) > batch.max_kv_len:
        raise BatchError("max_query_len or max_kv_len is below an entry's length")
    _check_range("token id", batch.input_ids, limits.vocab_size)
    _check_range("position", batch.positions, limits.max_position)
    _check_range("logit row", batch.logit_rows, num_tokens)
    if len(batch.positions) != num_tokens:
        raise BatchError(f"{len(batch.positions)} positions for {num_tokens} tokens")
    for group, (table, slots) in enumerate(zip(batch.block_tables, batch.slots, strict=True)):
        num_blocks = limits.num_blocks[group]
        if table.shape[0] != num_entries or table.shape[1] * limits.block_size < batch.max_kv_len:
            raise BatchError(f"group {group}: a block table {tuple(table.shape)} does not hold the entries' positions")
        if len(slots) != num_tokens:
            raise BatchError(f"group {group}: {len(slots)} slots for {num_tokens} tokens")
        _check_range(f"group {group}: block id", table, num_blocks)
        _check_range(f"group {group}: slot", slots, num_blocks * limits.block_size)


def _check_range(what: str, values: torch.Tensor, limit: int) -> None:
    if values.numel() == 0:
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(values))
    if lowest < 0 or highest >= limit:
        raise BatchError(f"{what} {lowest if lowest < 0 else highest} is outside 0..{limit - 1}")
