"""Memory that C reads and torch writes: page-aligned, zeroed, on huge pages where the system has them."""

import ctypes
import weakref

import torch

_CHUNK_BYTES = 1 << 26
_LINE_BYTES = 64


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


class NativeArena:
    """Memory handed out end to end from few allocations; released with the object.

    Args:
        library: what `native_library` returned.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunks: list[NativeMemory] = []
        self._start = 0  # of what was handed out last, in the last chunk
        self._used = 0  # bytes of the last chunk

    def reserve(self, size: int) -> tuple[int, torch.Tensor]:
        """`size` bytes that start on a cache line of their own.

        Returns:
            Their address, and the same memory as [size] uint8.

        Raises:
            MemoryError: the system refused.
        """
        if not self._chunks or self._used + size > self._chunks[-1].tensor.numel():
            self._chunks.append(NativeMemory(self._library, max(_CHUNK_BYTES, size)))
            self._used = 0
        self._start, chunk = self._used, self._chunks[-1]
        self.shrink(size)
        return chunk.address + self._start, chunk.tensor[self._start : self._start + size]

    def shrink(self, size: int) -> None:
        """Keeps only the first `size` bytes of what was reserved last."""
        self._used = self._start + size + -size % _LINE_BYTES
