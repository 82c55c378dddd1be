"""SideStream: copies beside the kernels, ordered against them by events."""

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
