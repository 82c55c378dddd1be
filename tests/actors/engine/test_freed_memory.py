"""What was freed goes back to the kernel, also where small blocks that live on lie between."""

import ctypes
import subprocess
import sys

import pytest
import trio
from trio.testing import MockClock

from genbatch.actors.engine import freed_memory
from genbatch.actors.engine.freed_memory import EVERY_S, GROWTH_BYTES, keep_returning_freed_memory

# Frees 200 MB in blocks of 20 kB, between which others live on; tells how many MB the process is smaller then.
FREES = """
from genbatch.actors.engine.freed_memory import resident_bytes, return_freed_memory

large, small = [], []
for _ in range(10_000):
    large.append(bytearray(20_000))
    small.append(bytearray(1_000))
del large
before = resident_bytes()
return_freed_memory()
print(before - resident_bytes() >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc gives back what it keeps")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100


@pytest.mark.trio
async def test_an_engine_gives_back_each_time_that_it_has_grown(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """Beside those that it reads while it waits, it reads its size once more after each time."""
    sizes = [10, 10 + GROWTH_BYTES, 11 + GROWTH_BYTES, 20, 19 + GROWTH_BYTES, 5, 6 + GROWTH_BYTES, 7]
    given_back: list[int] = []  # how many sizes were left to be read
    done = trio.Event()

    def resident() -> int:
        if not sizes:
            done.set()
            return 0
        return sizes.pop(0)

    async def on_thread(job: object) -> None:
        assert job is freed_memory.return_freed_memory
        given_back.append(len(sizes))

    monkeypatch.setattr(freed_memory, "resident_bytes", resident)
    monkeypatch.setattr(trio.to_thread, "run_sync", on_thread)
    nursery.start_soon(keep_returning_freed_memory)
    await done.wait()
    assert given_back == [5, 1]
    assert trio.current_time() == 6 * EVERY_S
