"""Returns freed memory to the kernel; glibc keeps free blocks that lie between blocks in use.

Prompts of a megabyte leave some hundred MB of such memory in an engine within minutes. glibc's own threshold concerns
only the end of the heap. Separate large blocks (mallopt's M_MMAP_THRESHOLD, as in the gateway) would cost every step
page faults, since a step's tensors are large blocks, too.
"""

import ctypes
import os
from pathlib import Path

import trio

# The growth that is worth a call. A call takes 20 ms for 100 MB in small pieces, and blocks every allocation meanwhile.
GROWTH_BYTES = 64 * 2**20
EVERY_S = 10.0


def return_freed_memory() -> None:
    """Return free memory to the kernel; only glibc has such a call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


async def keep_returning_freed_memory() -> None:
    """Return freed memory whenever the process has grown, on a thread, since the call does not hold Python's lock."""
    least = resident_bytes()
    while True:
        await trio.sleep(EVERY_S)
        now = resident_bytes()
        if now > least + GROWTH_BYTES:
            await trio.to_thread.run_sync(return_freed_memory)
            least = resident_bytes()
        least = min(least, now)


def resident_bytes() -> int:
    """Return the resident bytes; 0 where the kernel does not report them, and then no memory is returned."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def oom_kills() -> int | None:
    """Return how many processes this machine's kernel has killed for their memory; None if it does not report that."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return None
    return int(counters["oom_kill"]) if "oom_kill" in counters else None
