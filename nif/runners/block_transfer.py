"""BlockTransfer: whole blocks between the pool and the host, beside the steps.

A step waits only until the blocks that leave are gathered, since it may write over them, and until those that come back
are in their places. The way to the host goes on while it runs.

SideStream is where the copies run, ordered against the kernels by events.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A CUDA stream beside the one that computes, which is the current one of the thread that makes this.

    On a CPU it is nothing: there everything is done when it is asked for.

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
        """What is queued within it is queued here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_compute(self) -> None:
        """What is queued here from now on begins after the kernels queued so far."""
        if self._stream is not None and self._compute is not None:
            self._stream.wait_stream(self._compute)

    def hold_up_compute(self) -> None:
        """Kernels queued from now on begin after what is queued here so far."""
        if self._stream is not None and self._compute is not None:
            self._compute.wait_stream(self._stream)

    def finish(self) -> None:
        """Lets the host wait until all that is queued, here and to be computed, is done."""
        for stream in (self._stream, self._compute):
            if stream is not None:
                stream.synchronize()


# Bytes that are gathered at a time, so that swapping a long sequence takes no more of the device's memory than this.
_AT_ONCE = 256 * 2**20


class BlockTransfer:
    """Copies on a stream of their own, one after another.

    Args:
        device: where the pool is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = SideStream(device)

    def read(self, storage: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """The blocks' content as a host tensor [len(blocks), bytes of a block] uint8, pinned if from a GPU.

        It arrives later: `finish` waits for it, and `write` need not.

        Args:
            storage: [num_blocks, elements of a block].
        """
        host = torch.empty((len(blocks), storage[0].nbytes), dtype=torch.uint8, pin_memory=self._on_gpu)
        # guard: blocks leave after the step that wrote them
        self._stream.wait_for_compute()
        with self._stream.open():
            for part in self._parts(storage, len(blocks)):
                gathered = storage[self._ids(blocks[part])].view(torch.uint8)
                # guard: a step waits until what it writes over is gathered
                self._stream.hold_up_compute()
                host[part].copy_(gathered, non_blocking=True)
        return host

    def write(self, storage: torch.Tensor, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Puts back what `read` gave, possibly into other blocks."""
        with self._stream.open():
            for part in self._parts(storage, len(blocks)):
                arrived = content[part].to(self._device, non_blocking=True)
                # guard: blocks come back after who read what was there
                self._stream.wait_for_compute()  # kernels under way may read what these blocks held before
                storage[self._ids(blocks[part])] = arrived.view(storage.dtype)
        # guard: a step waits until its blocks are back
        self._stream.hold_up_compute()

    def finish(self) -> None:
        """Waits until everything is where it should be."""
        self._stream.finish()

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        # Pinned: from other memory the host might wait for what the stream waits for.
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._on_gpu)
        return ids.to(self._device, non_blocking=True)

    @staticmethod
    def _parts(storage: torch.Tensor, count: int) -> list[slice]:
        size = max(1, _AT_ONCE // storage[0].nbytes)
        return [slice(start, start + size) for start in range(0, count, size)]
