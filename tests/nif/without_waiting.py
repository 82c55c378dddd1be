"""Says of a piece of code that it never waits for the device."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """While open, an operation that waits for the GPU raises."""
    with warnings.catch_warnings():
        # torch says once, whatever the mode, that the mode is a prototype; here warnings are errors.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
