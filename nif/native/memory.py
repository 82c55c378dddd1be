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
    """Tensors copied end to end into few allocations; released with the object.

    Args:
        library: what `native_library` returned.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunks: list[NativeMemory] = []
        self._used = 0  # bytes of the last chunk

    def put(self, content: torch.Tensor) -> int:
        """Copies `content` in and returns its address, on a cache line of its own.

        Raises:
            MemoryError: the system refused.
        """
        data = content.contiguous().view(torch.uint8).flatten()
        if not self._chunks or self._used + data.numel() > self._chunks[-1].tensor.numel():
            self._chunks.append(NativeMemory(self._library, max(_CHUNK_BYTES, data.numel())))
            self._used = 0
        start = self._used
        self._chunks[-1].tensor[start : start + data.numel()] = data
        self._used = start + data.numel() + -data.numel() % _LINE_BYTES
        return self._chunks[-1].address + start
