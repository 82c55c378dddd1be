"""Gives memory that was freed back to the kernel, which glibc keeps where small blocks lie between large ones.

Prompts of a megabyte leave some hundred MB of such memory in an engine within minutes. glibc's own threshold looks at
the end of the heap only. Large blocks of their own (mallopt's M_MMAP_THRESHOLD, as in the gateway) would cost every
step page faults: its tensors are large blocks, too.
"""

import ctypes
import os
from pathlib import Path

import trio

# So much more memory is worth the work: 20 ms for 100 MB in small pieces, in which no thread allocates anything.
GROWTH_BYTES = 64 * 2**20
EVERY_S = 10.0


def return_freed_memory() -> None:
    """Gives back what is free. Other libraries than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


async def keep_returning_freed_memory() -> None:
    """Does so each time that the process has grown, on a thread: the call holds no lock of Python's."""
    least = _resident_bytes()
    while True:
        await trio.sleep(EVERY_S)
        now = _resident_bytes()
        if now > least + GROWTH_BYTES:
            await trio.to_thread.run_sync(return_freed_memory)
            least = _resident_bytes()
        least = min(least, now)


def _resident_bytes() -> int:
    """0 where the kernel does not tell: then nothing is ever given back."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
