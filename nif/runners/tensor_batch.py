"""TensorBatch: a step's arrays as tensors, for the runners that compute in torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genbatch.nif.runner import RaggedBatch, Rows


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """The arrays of a RaggedBatch as tensors, all on one device.

    B entries, T tokens in all, G layer groups.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_starts: torch.Tensor  # [B + 1] int32
    kv_lens: torch.Tensor  # [B] int32
    slots: tuple[torch.Tensor, ...]  # per group [T] int64
    block_tables: tuple[torch.Tensor, ...]  # per group [B, max_blocks] int32
    logit_rows: torch.Tensor  # [R] int64
    max_query_len: int
    max_kv_len: int
    state_rows: torch.Tensor | None = None  # [S] int64
    adapters: torch.Tensor | None = None  # [T] int64, always on the CPU


def tensors(batch: RaggedBatch) -> TensorBatch:
    """Return the batch as tensors on the CPU, which share the arrays' memory."""
    return TensorBatch(
        input_ids=torch.from_numpy(batch.input_ids),
        positions=torch.from_numpy(batch.positions),
        query_starts=torch.from_numpy(batch.query_starts),
        kv_lens=torch.from_numpy(batch.kv_lens),
        slots=tuple(map(torch.from_numpy, batch.slots)),
        block_tables=tuple(map(torch.from_numpy, batch.block_tables)),
        logit_rows=torch.from_numpy(batch.logit_rows),
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
        state_rows=None if batch.state_rows is None else torch.from_numpy(batch.state_rows),
        adapters=None if batch.adapters is None else torch.from_numpy(batch.adapters),
    )


def to_device(batch: TensorBatch, device: torch.device) -> TensorBatch:
    """Return the batch with its tensors on the device; the adapters stay on the CPU."""
    if device.type == "cpu":
        return batch

    def there(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(part.to(device, non_blocking=True) for part in parts)

    input_ids, positions, query_starts, kv_lens, logit_rows = there(
        (batch.input_ids, batch.positions, batch.query_starts, batch.kv_lens, batch.logit_rows)
    )
    return TensorBatch(
        input_ids=input_ids,
        positions=positions,
        query_starts=query_starts,
        kv_lens=kv_lens,
        slots=there(batch.slots),
        block_tables=there(batch.block_tables),
        logit_rows=logit_rows,
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
        state_rows=None if batch.state_rows is None else there((batch.state_rows,))[0],
        adapters=batch.adapters,
    )


def rows_of(tensor: torch.Tensor) -> Rows:
    """Return rows of logits or states as a runner gives them: an array if they are on the host."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
