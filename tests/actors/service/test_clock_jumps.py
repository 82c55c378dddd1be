"""The wall clock jumps by hours and days under a running service: nothing times out, restarts or waits."""

import mmap
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from genbatch import RPCClient, ZeroMQClient
from tests.actors.service.running_service import TIMEOUT_S, RunningService

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc"),
    pytest.mark.trio,
]

DAY_S = 86_400
# The wall clock of every process of the service is off by what a file says; the monotonic clocks are as they are.
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t off(void) {
    static volatile int64_t *seconds;
    if (!seconds) {
        int file = open(getenv("WALL_CLOCK"), O_RDONLY);
        seconds = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int fault = syscall(SYS_clock_gettime, id, now);
    if (!fault && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += off();
    return fault;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


class WallClock:
    """What the service's processes see on the wall."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "wall_clock"
        self.file.write_bytes(bytes(8))
        with self.file.open("r+b") as file:
            self._seconds = mmap.mmap(file.fileno(), 8)

    def jump(self, seconds: int) -> None:
        """By so many seconds from the true time."""
        self._seconds[:] = struct.pack("=q", seconds)

    def close(self) -> None:
        self._seconds.close()


@pytest.fixture
def wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WallClock]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    clock = WallClock(tmp_path)
    monkeypatch.setenv("WALL_CLOCK", str(clock.file))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    yield clock
    clock.close()


@pytest.mark.long
async def test_a_service_does_not_notice_that_the_wall_clock_jumps(
    wall_clock: WallClock, tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc = f"unix://{tmp_path}/rpc.sock"
    flags = ("--rpc-bind", rpc, "--default-deadline-s", "200", "--stall-s", "60", "--max-restarts", "0")
    with RunningService(tiny_model_dir("llama"), tmp_path, *flags) as service:
        monkeypatch.delenv("LD_PRELOAD")
        engine, gateway = service.engine, service.gateway
        async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client, RPCClient(rpc) as rpc_client:
            known = (await client.generate("abc", max_tokens=120, ignore_eos=True)).token_ids
            for seconds in (DAY_S, -DAY_S, 0, 40 * 365 * DAY_S, -10 * 365 * DAY_S, 1, 0):
                for one in (client, rpc_client):
                    tokens: list[int] = []
                    async with one.stream("abc", max_tokens=120, ignore_eos=True, deadline_s=200.0) as stream:
                        async for token in stream:
                            if token.index == 20:
                                wall_clock.jump(seconds)
                            tokens.append(token.token_id)
                    assert tokens == known
                    assert (await one.health()).status == "ready"
            stats = await client.stats()
        assert (service.engine, service.gateway) == (engine, gateway)
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        assert service.process.poll() is None and "Traceback" not in service.log


async def test_the_shim_moves_the_clock_that_the_service_reads(wall_clock: WallClock) -> None:
    code = "import time; print(int(time.time()), int(time.monotonic()))"

    async def ask() -> list[int]:
        done = await trio.run_process(["python3", "-c", code], capture_stdout=True)
        return [int(number) for number in done.stdout.split()]

    wall, monotonic = await ask()
    wall_clock.jump(10 * DAY_S)
    later_wall, later_monotonic = await ask()
    assert later_wall - wall >= 10 * DAY_S
    assert later_monotonic - monotonic < DAY_S
