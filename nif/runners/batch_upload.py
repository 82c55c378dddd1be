"""Moves a step's index tensors to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.runners.decode_step import DecodeStep

_ALIGNMENT = 16  # bytes; lets kernels use their widest loads
_NUM_STAGES = 2  # one is filled while the copy from the other may still be under way


@dataclass(slots=True)
class _Stage:
    host: torch.Tensor  # [bytes] uint8, pinned where the device is a GPU
    copied: torch.cuda.Event | None = None  # the last copy out of it


class BatchUpload:
    """Packs batches into staging memory and copies them to the device.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stages = [_Stage(self._new_host(4096)) for _ in range(_NUM_STAGES)]
        self._next = 0

    def upload(self, batch: RaggedBatch) -> RaggedBatch:
        """Returns a batch of tensors on the CPU with its tensors on the device."""
        return _rebuilt(batch, self._send(_tensors(batch), None))

    def upload_step(self, step: DecodeStep, into: torch.Tensor) -> DecodeStep:
        """Returns a step of tensors on the CPU with its tensors on the device; copied on the current stream.

        Args:
            into: [bytes] uint8 on the device, at least `packed_size(step)`. Steps of equal shapes land at equal
                addresses in it, which is what a captured graph reads.
        """
        draws, *parts = self._send(_step_tensors(step), into)
        return DecodeStep(_rebuilt(step.batch, parts), draws)

    def _send(self, parts: Sequence[torch.Tensor], into: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensors on the device, `into` one buffer; None allocates it."""
        offsets, size = _offsets(parts)
        stage = self._stages[self._next]
        self._next = (self._next + 1) % _NUM_STAGES
        if stage.copied is not None:
            stage.copied.synchronize()
        if len(stage.host) < size:
            stage.host = self._new_host(2 * size)
        for part, offset in zip(parts, offsets, strict=True):
            _view(stage.host, offset, part).copy_(part)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device) if into is None else into
        buffer[:size].copy_(stage.host[:size], non_blocking=True)
        if self._on_gpu:
            stage.copied = stage.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            stage.copied.record()
        return [_view(buffer, offset, part) for part, offset in zip(parts, offsets, strict=True)]

    def _new_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)


def packed_size(step: DecodeStep) -> int:
    """Bytes that `BatchUpload.upload_step` takes for the step."""
    return _offsets(_step_tensors(step))[1]


def _step_tensors(step: DecodeStep) -> list[torch.Tensor]:
    return [step.draws, *_tensors(step.batch)]


def _tensors(batch: RaggedBatch) -> list[torch.Tensor]:
    return [
        batch.input_ids,
        batch.positions,
        batch.query_starts,
        batch.kv_lens,
        batch.logit_rows,
        *batch.slots,
        *batch.block_tables,
    ]


def _rebuilt(batch: RaggedBatch, parts: Sequence[torch.Tensor]) -> RaggedBatch:
    num_groups = len(batch.slots)
    input_ids, positions, query_starts, kv_lens, logit_rows = parts[:5]
    return RaggedBatch(
        input_ids=input_ids,
        positions=positions,
        query_starts=query_starts,
        kv_lens=kv_lens,
        slots=tuple(parts[5 : 5 + num_groups]),
        block_tables=tuple(parts[5 + num_groups :]),
        logit_rows=logit_rows,
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
        adapters=batch.adapters,
    )


def _offsets(parts: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, and the bytes of all."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
