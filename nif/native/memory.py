"""Memory that C reads and torch writes: page-aligned, zeroed, on huge pages where the system has them."""

import ctypes
import weakref

import torch


class NativeMemory:
    """One allocation, released with the object or by `close`.

    Args:
        library: what `native_library` returned.
        size: bytes.

    Raises:
        MemoryError: the system refused.
    """

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        address = library.memory_allocate(size)
        if not address:
            raise MemoryError(f"cannot allocate {size} bytes")
        self.address: int = address
        buffer = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)[:size]  # [size] uint8
        self._release = weakref.finalize(self, library.memory_free, address, size)

    def close(self) -> None:
        """Releases the memory; `tensor` must not be used any more."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()
