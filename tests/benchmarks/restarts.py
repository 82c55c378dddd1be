"""Measures a restart: from SIGKILL of an engine until its stream goes on.

    python -m tests.benchmarks.restarts --model FILE --kills 5

One greedy stream over ZeroMQ, nothing else, after the packed weights were written. Its engine gets SIGKILL after its
first tokens; the answer must be the one without a kill. For each format, with and without `--spare-engine`: the pause's
median and range in seconds; the processor time that the new engine had used at the answer's end; and what it had to
read from the disk, since the pages of a large model may have been evicted.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import trio

from genbatch import ZeroMQClient
from genbatch.nif.models.model_source import cache_directory
from tests.actors.service.running_service import RunningService, kill
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio

PROMPT = "Once upon a time, in a small house beside a large lake,"
TOKENS, TOKENS_BEFORE = 40, 4
TIMEOUT_S = 300.0
SPARE_S = 8.0  # until the next spare process is there


def cpu_s(pid: int | None) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_mb(pid: int | None) -> int:
    """Return what a process has read from the disk, in MB."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"]) // 10**6


async def measure(service: RunningService, kills: int, rest_s: float) -> tuple[list[float], list[float], list[int]]:
    """Return the pauses, the new engines' processor time, both in seconds, and what they read, in MB."""
    pauses, used, read = [], [], []
    async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
        await trio.sleep(1.0)
        while list((cache_directory() / "packed").glob("*.partial")):  # noqa: ASYNC110 - another process writes
            await trio.sleep(0.1)
        expected = (await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)).token_ids
        for _ in range(kills):
            await trio.sleep(rest_s)
            token_ids, times = [], []
            async with client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) as stream:
                async for token in stream:
                    token_ids.append(token.token_id)
                    times.append(time.monotonic())
                    if len(token_ids) == TOKENS_BEFORE:
                        kill(service.engine)
            assert token_ids == expected, (token_ids, expected)
            # Tokens that were under way at the kill arrive before the pause.
            pauses.append(max(after - before for before, after in pairwise(times[TOKENS_BEFORE - 1 :])))
            used.append(cpu_s(service.engine))
            read.append(read_mb(service.engine))
    return pauses, used, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--formats", nargs="*", default=["none", "int8"], help="values of --quantize")
    given = parser.parse_args()
    exit_on_sigterm()  # so that the service ends, too
    for quantize in given.formats:
        for spare in ([], ["--spare-engine"]):
            flags = ["--quantize", quantize, "--max-restarts", "1000000", *spare]
            with (
                tempfile.TemporaryDirectory() as place,
                RunningService(Path(given.model), Path(place), *flags) as service,
            ):
                pauses, used, read = run_trio(partial(measure, service, given.kills, SPARE_S if spare else 0.0))
            pause = f"{statistics.median(pauses):.2f} s ({min(pauses):.2f} to {max(pauses):.2f})"
            told = f"{quantize}{', spare engine' if spare else ''}: the stream goes on after {pause}"
            print(f"{told}; processor time {statistics.median(used):.2f} s; MB read {read}", flush=True)


if __name__ == "__main__":
    main()
