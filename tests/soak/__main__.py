"""Runs a real service under clients that work, cancel, stall, die and misbehave, and tells what it has lost or kept.

python -m tests.soak --minutes 20 --kill-every 120
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import trio

from genbatch import ZeroMQClient
from genbatch.proto.errors import Unavailable
from tests.soak.callers import Tally, run_callers

SAMPLE_S = 5.0
# Memory is compared once everything has been used: caches filled, threads started.
WARM_UP_SHARE = 0.25
READY_S = 120.0
REST_S = 90.0


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def usage(pid: int) -> tuple[str, int, int]:
    """What a process is, its resident MiB and its open files."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    roles = {"engine_process": "engine", "gateway_process": "gateway", "template_child": "templates"}
    role = next((role for module, role in roles.items() if module in command), "supervisor")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return role, pages * os.sysconf("SC_PAGE_SIZE") // 2**20, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def slope(samples: list[tuple[float, float]]) -> float:
    """Least squares, per hour."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    above = sum((x - mean_x) * (y - mean_y) for x, y in samples)
    below = sum((x - mean_x) ** 2 for x, _ in samples)
    return 3600 * above / below if below else 0.0


class Soak:
    """One run.

    Args:
        options: the command line's.
        directory: for sockets and the log.
    """

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.zeromq, self.rpc = f"ipc://{directory}/zeromq.sock", f"unix://{directory}/rpc.sock"
        self.log = directory / "serve.log"
        self.tally = Tally()
        self.kills = 0
        self.samples: dict[tuple[str, int], list[tuple[float, int, int]]] = {}  # by role and pid: time, MiB, files
        self.tasks: list[int] = []

    def serve(self) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("genbatch")), "serve", self.options.model]
        command += ["--bind", self.zeromq, "--rpc-bind", self.rpc, "--n-parallel", "8", "--engine", "process"]
        command += ["--max-restarts", "1000", *self.options.serve]
        return subprocess.Popen(command, stdout=self.log.open("wb"), stderr=subprocess.STDOUT)

    async def run(self) -> int:
        service = self.serve()
        try:
            return await self._run(service)
        finally:
            service.kill()
            service.wait()

    async def _run(self, service: "subprocess.Popen[bytes]") -> int:
        await self._until_ready(service)
        with trio.move_on_after(60 * self.options.minutes):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sample, service.pid)
                if self.options.kill_every:
                    nursery.start_soon(self._kill_engines, service.pid)
                await self._call()
        stats = await self._come_to_rest()
        files = {pid: usage(pid)[2] for pid in (service.pid, *children(service.pid))}
        service.send_signal(signal.SIGTERM)
        code = await trio.to_thread.run_sync(service.wait)
        return self._report(stats, files, code)

    async def _until_ready(self, service: "subprocess.Popen[bytes]") -> None:
        with trio.fail_after(READY_S):
            while b"zeromq.sock" not in self.log.read_bytes():
                assert service.poll() is None, self.log.read_text()
                await trio.sleep(0.5)

    async def _call(self) -> None:
        await run_callers(
            self.zeromq, self.rpc, self.tally, steady_callers=self.options.callers, seed=self.options.seed
        )

    async def _sample(self, pid: int) -> None:
        while True:
            for process in (pid, *children(pid)):
                try:
                    role, mib, files = usage(process)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just been killed
                self.samples.setdefault((role, process), []).append((time.monotonic(), mib, files))
            await trio.sleep(SAMPLE_S)

    async def _kill_engines(self, pid: int) -> None:
        while True:
            await trio.sleep(self.options.kill_every)
            for process in children(pid):
                if usage(process)[0] == "engine":
                    os.kill(process, signal.SIGKILL)
                    self.kills += 1

    async def _come_to_rest(self) -> dict[str, object]:
        """The stats once nothing is at work."""
        async with ZeroMQClient(self.zeromq) as client:
            with trio.fail_after(REST_S):
                while True:
                    with suppress(Unavailable):  # it may have been killed a moment ago
                        stats = await client.stats()
                        if stats["engine"] == "up" and not stats["requests_running"] and not stats["requests_waiting"]:
                            return stats
                    await trio.sleep(1)

    def _report(self, stats: dict[str, object], files: dict[int, int], code: int) -> int:
        tally = self.tally
        leaked = stats["kv_blocks_used"]
        print(f"{self.options.minutes} minutes, {sum(tally.ends.values())} calls, {self.kills} engines killed")
        print("ends: " + ", ".join(f"{reason} {count}" for reason, count in tally.ends.most_common()))
        print(f"calls without a final: {tally.missing}; streams with something too much or too little: {tally.broken}")
        print(f"greedy answers unlike those before: {tally.wrong}; unexpected errors: {dict(tally.unexpected)}")
        tasks = f"engine {stats.get('tasks')}, gateway {stats.get('gateway_tasks')}"
        print(f"leaked blocks: {leaked}; tasks at rest: {tasks}")
        for (role, pid), samples in self.samples.items():
            lived_s = samples[-1][0] - samples[0][0]
            if lived_s < 60:
                continue
            warm = [one for one in samples if one[0] - samples[0][0] > WARM_UP_SHARE * lived_s]
            grows = slope([(at, mib) for at, mib, _ in warm])
            print(
                f"{role} {pid}: {lived_s / 60:.1f} min, {warm[-1][1]} MiB, {grows:+.1f} MiB/h, "
                f"files {warm[0][2]} .. {max(one[2] for one in warm)}, at rest {files.get(pid, '-')}"
            )
        print(f"SIGTERM: exit code {code}")
        failed = leaked or tally.missing or tally.broken or tally.wrong or tally.unexpected or code
        return 1 if failed else 0


def main() -> int:
    """Exit code 1 if anything was lost, leaked, wrong or unexpected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=16, help="steady ones; the others are one of each kind")
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds between kills of the engine; 0: never")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("serve", nargs="*", help="further flags of genbatch serve, after --")
    with tempfile.TemporaryDirectory() as directory:
        return trio.run(Soak(parser.parse_args(), Path(directory)).run)


if __name__ == "__main__":
    sys.exit(main())
