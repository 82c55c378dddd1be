"""BlockTransfer: copies whole blocks between the pool and the host while steps run.

A step waits until outgoing blocks are gathered, because the step may overwrite these blocks. A step also waits until
incoming blocks are in the pool. The copy to the host runs in parallel with the step.

The copies run on a SideStream, and events order the copies against the kernels.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A CUDA stream for copies. The compute stream is the current stream of the thread that creates the SideStream.

    On a CPU a SideStream does nothing, because every operation is complete when it returns.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._compute = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open(self) -> AbstractContextManager[object]:
        """Queue the operations of this `with` block on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_compute(self) -> None:
        """Make later operations of this stream wait for the kernels queued so far."""
        if self._stream is not None and self._compute is not None:
            self._stream.wait_stream(self._compute)

    def hold_up_compute(self) -> None:
        """Make later kernels wait for the operations queued on this stream so far."""
        if self._stream is not None and self._compute is not None:
            self._compute.wait_stream(self._stream)

    def finish(self) -> None:
        """Block the host until this stream and the compute stream are idle."""
        for stream in (self._stream, self._compute):
            if stream is not None:
                stream.synchronize()


# Bytes of one gather: this limits the device memory that swapping a long sequence takes.
_MAX_GATHERED_BYTES = 256 * 2**20


class BlockTransfer:
    """Copies blocks on a side stream, one copy after another.

    Args:
        device: the pool's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = SideStream(device)

    def read(self, storage: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Copy the blocks' content to a host tensor [len(blocks), bytes of a block] uint8, pinned if from a GPU.

        The content arrives later. `finish` waits for it; a `write` of the tensor is ordered behind the copy anyway.

        Args:
            storage: [num_blocks, elements of a block].
        """
        host = torch.empty((len(blocks), storage[0].nbytes), dtype=torch.uint8, pin_memory=self._on_gpu)
        # guard: blocks leave after the step that wrote them
        self._stream.wait_for_compute()
        with self._stream.open():
            for part in self._parts(storage, len(blocks)):
                gathered = storage[self._ids(blocks[part])].view(torch.uint8)
                # guard: a step waits until the blocks that it overwrites are gathered
                self._stream.hold_up_compute()
                host[part].copy_(gathered, non_blocking=True)
        return host

    def write(self, storage: torch.Tensor, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Write a tensor that `read` returned into blocks, which may be other blocks than before."""
        with self._stream.open():
            for part in self._parts(storage, len(blocks)):
                arrived = content[part].to(self._device, non_blocking=True)
                # guard: blocks come back after earlier reads of their place
                self._stream.wait_for_compute()  # kernels under way may read what these blocks held before
                storage[self._ids(blocks[part])] = arrived.view(storage.dtype)
        # guard: a step waits until its blocks are back
        self._stream.hold_up_compute()

    def finish(self) -> None:
        """Wait until every copy is complete."""
        self._stream.finish()

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        # Pin the memory: a copy from unpinned memory could block the host until the stream is ready.
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._on_gpu)
        return ids.to(self._device, non_blocking=True)

    @staticmethod
    def _parts(storage: torch.Tensor, count: int) -> list[slice]:
        size = max(1, _MAX_GATHERED_BYTES // storage[0].nbytes)
        return [slice(start, start + size) for start in range(0, count, size)]
