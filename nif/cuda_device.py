"""The CUDA device of a model: which one is taken, and a guard for what works on the current device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from genbatch.nif.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])


def choose_device(n_gpu_layers: int, main_gpu: int) -> torch.device:
    """The device that a model is loaded to.

    Raises:
        OptionError: there is no GPU of this number.
    """
    if n_gpu_layers == 0 or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if main_gpu >= count:
        raise OptionError("main_gpu", f"{main_gpu} is not a GPU of this machine: it has {count}, numbered from 0")
    return torch.device("cuda", main_gpu)


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the calling thread's current one while it is open; nothing on a CPU.

    Triton launches kernels, events are recorded and graphs are captured on the current device. Each
    thread has a current device of its own, which is device 0 at first.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array's content on the device. The host does not wait: a GPU reads it from pinned memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return torch.empty(array.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def runs_on_device(method: F) -> F:
    """Runs a method in inference mode, on the device that the object's `placed_at` returns."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(), on_device(self.placed_at()):
            return method(self, *args, **kwargs)

    return cast("F", guarded)
