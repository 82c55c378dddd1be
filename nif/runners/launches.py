"""Launches: decode steps begun one behind another; a step's tokens are read while the next one runs.

    compute    [ step N ][tokens out][ step N+1        ][tokens out]
    copies          [batch N+1 in]           [batch N+2 in]
    host       launch N+1, wait for N's tokens, launch N+2, ...

Each step has one of two pairs of buffers, so that the host fills one while the device may still read the other.
"""

import dataclasses
from collections.abc import Callable

import torch

from genbatch.nif.kernels.sample import NONE
from genbatch.nif.runner import Launched
from genbatch.nif.runners.batch_upload import BatchUpload, packed_size
from genbatch.nif.runners.cuda_graphs import DecodeGraphs
from genbatch.nif.runners.decode_step import DecodeStep
from genbatch.nif.runners.side_stream import SideStream

_NUM_PAIRS = 2


class Launches:
    """Begins decode steps.

    Args:
        device: where the kernels run.
        drawn: [most rows] int64 on the device, where `decode` leaves the tokens.
        upload: the way there.
        decode: one step on the device.
        graphs: of such steps; None runs each one eagerly.
    """

    def __init__(
        self,
        device: torch.device,
        drawn: torch.Tensor,
        upload: BatchUpload,
        decode: Callable[[DecodeStep], torch.Tensor],
        graphs: DecodeGraphs | None,
    ) -> None:
        self._drawn = drawn
        self._upload = upload
        self._decode = decode
        self._graphs = graphs
        self._copies = SideStream(device)
        self._pairs = [_BufferPair(device, len(drawn)) for _ in range(_NUM_PAIRS)]
        self._turn = 0
        self._latest: LaunchedStep | None = None

    def launch(self, step: DecodeStep, after: Launched | None) -> "LaunchedStep":
        """Begins a step whose tensors are on the CPU; see `LaunchingRunner.launch`."""
        assert after is None or after is self._latest, "only the last step's tokens are still on the device"
        pair = self._pairs[self._turn]
        assert pair.holds is None or pair.holds.is_read, "two steps are under way"
        rows = len(step.draws)
        if after is not None:
            ids = torch.full_like(step.batch.input_ids, -1)
            step = dataclasses.replace(step, batch=dataclasses.replace(step.batch, input_ids=ids))
        captured = None if self._graphs is None else self._graphs.find(step)
        graph = None
        if captured is not None:
            graph, step = captured
        size = packed_size(step)
        try:
            with self._copies.open():
                # Allocated on the stream that writes it: memory of the computing stream may be what the step under
                # way has given back and still uses.
                inputs = pair.inputs_of(size)
                arrived = self._upload.upload_step(step, into=inputs)
            self._copies.hold_up_compute()
            if graph is not None:
                graph.inputs.copy_(inputs[:size])
                graph.replay()
            else:
                self._decode(arrived)
        except BaseException:
            self._copies.finish()  # kernels that were begun may still read these buffers
            raise
        self._latest = pair.holds = LaunchedStep(self._drawn[:rows], pair.tokens[:rows])
        self._turn = (self._turn + 1) % _NUM_PAIRS
        return self._latest

    def finish(self) -> None:
        """Waits for every step that has begun: the buffers are in use until then."""
        self._copies.finish()


class LaunchedStep:
    """A step that has begun. Implements `Launched`.

    Args:
        drawn: [R] int64 on the device, the step's tokens once it has run; the next step may write there.
        tokens: [R] int64 on the host, pinned where the device is a GPU, to be filled.
    """

    def __init__(self, drawn: torch.Tensor, tokens: torch.Tensor) -> None:
        # Queued with the kernels: it is over before the next step's draws.
        tokens.copy_(drawn, non_blocking=True)
        self._tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        if drawn.device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        self.is_read = False

    def wait(self) -> list[int | None]:
        """The token drawn in each row, None where the row's logits are not finite; to be called once."""
        assert not self.is_read, "its buffers may be another step's by now"
        self.is_read = True
        if self._arrived is not None:
            self._arrived.synchronize()
        return [None if token == NONE else token for token in self._tokens.tolist()]


class _BufferPair:
    """A step's input on the device and its tokens on the host; the other two sides are `BatchUpload`'s and `drawn`."""

    def __init__(self, device: torch.device, most_rows: int) -> None:
        self.tokens = torch.empty(most_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.holds: LaunchedStep | None = None
        self._inputs = torch.empty(0, dtype=torch.uint8, device=device)

    def inputs_of(self, size: int) -> torch.Tensor:
        """[at least `size`] bytes on the device; a larger buffer belongs to the current stream."""
        if len(self._inputs) < size:
            self._inputs = torch.empty(2 * size, dtype=torch.uint8, device=self._inputs.device)
        return self._inputs
