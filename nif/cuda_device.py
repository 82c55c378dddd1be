"""The device of a model: which one is taken, and a guard for what works on the current CUDA device.

A native engine runs without torch, which takes a second to import. So this file imports torch only where a GPU, or a
model in torch, needs it.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from genbatch.nif.errors import OptionError

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU or a GPU, in torch's words.

    Args:
        type: "cpu" or "cuda".
        index: the GPU's number; None for a CPU.
    """

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device("cpu")


@cache
def has_gpu() -> bool:
    """Return whether torch can use a GPU. Without a driver for one this is known without importing torch."""
    if sys.platform == "linux" and not Path("/dev/kfd").exists():  # AMD's driver, whose GPUs torch calls CUDA's too
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()


def choose_device(n_gpu_layers: int, main_gpu: int) -> Device:
    """Return the device that a model is loaded to.

    Raises:
        OptionError: there is no GPU of this number.
    """
    if n_gpu_layers == 0 or not has_gpu():
        return CPU
    import torch

    count = torch.cuda.device_count()
    if main_gpu >= count:
        raise OptionError("main_gpu", f"{main_gpu} is not a GPU of this machine: it has {count}, numbered from 0")
    return Device("cuda", main_gpu)


def memory_of(device: Device) -> int:
    """Return the bytes of a GPU's memory; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    import torch

    total: int = torch.cuda.get_device_properties(str(device)).total_memory
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the host or of a GPU ran out."""
    torch = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def empty_cache() -> None:
    """Return the GPU memory that torch keeps for later tensors; nothing without a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_device(device: "torch.device") -> AbstractContextManager[object]:
    """Make `device` the calling thread's current device during the body; do nothing on a CPU.

    Triton launches kernels, events are recorded and graphs are captured on the current device. Each
    thread has a current device of its own, which is device 0 at first.
    """
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def sent(array: np.ndarray, device: "torch.device") -> "torch.Tensor":
    """Return the array's content on the device. The host does not wait: a GPU reads it from pinned memory."""
    import torch

    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return torch.empty(array.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def runs_on_device(method: F) -> F:
    """Run a method in inference mode, on the device that the object's `placed_at` returns."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.inference_mode(), on_device(self.placed_at()):
            return method(self, *args, **kwargs)

    return cast("F", guarded)
