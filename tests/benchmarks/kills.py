"""Kills the engine of a running service again and again, and counts what its clients get.

    python -m tests.benchmarks.kills --kills 100 --model DIRECTORY

Each round has requests that stream, that run and that wait; at a random moment the engine gets SIGKILL. Every request
must end once, with a result or an error that fits: a stream that had begun with engine_lost and the right count of
tokens, everything else, after its replay, with a whole result.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import trio

from genbatch import ZeroMQClient
from genbatch.proto.errors import EngineLost, GenbatchError
from tests.actors.service.running_service import RunningService, kill
from tests.benchmarks.compare.sigterm import exit_on_sigterm, run_trio

STREAMS, WHOLES, MAX_TOKENS = 3, 6, 100
TOLD_EVERY = 10


@dataclass
class Counts:
    """What became of all requests."""

    asked: int = 0
    results: int = 0
    lost_in_stream: int = 0
    wrong: list[str] = field(default_factory=list)
    until_lost_s: list[float] = field(default_factory=list)  # from a kill to the final of a stream
    until_back_s: list[float] = field(default_factory=list)  # from a kill to the first result of the next engine

    @property
    def finals(self) -> int:
        return self.results + self.lost_in_stream


class Round:
    """One kill."""

    def __init__(self, client: ZeroMQClient, number: int, counts: Counts) -> None:
        self._client = client
        self._number = number
        self._counts = counts
        self._killed_at = float("inf")

    async def run(self, service: RunningService, delay_s: float) -> None:
        async with trio.open_nursery() as nursery:
            for index in range(STREAMS):
                nursery.start_soon(self._stream, [5 + index, *_digits(self._number)])
            for index in range(WHOLES):
                nursery.start_soon(self._whole, [20 + index, *_digits(self._number)])
            await trio.sleep(delay_s)
            self._killed_at = time.monotonic()
            kill(service.engine)

    async def _stream(self, prompt: list[int]) -> None:
        counts, seen = self._counts, 0
        counts.asked += 1
        try:
            async with self._client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
                async for token in stream:
                    if token.index != seen:
                        counts.wrong.append(f"token {token.index} after {seen}")
                    seen += 1
            self._end(seen == MAX_TOKENS, f"a stream of {seen} tokens")
        except EngineLost as error:
            counts.lost_in_stream += 1
            counts.until_lost_s.append(time.monotonic() - self._killed_at)
            if error.tokens_delivered != seen or not seen:
                counts.wrong.append(f"{error.tokens_delivered} tokens delivered, {seen} came")
        except GenbatchError as error:
            counts.wrong.append(f"a stream: {error!r}")

    async def _whole(self, prompt: list[int]) -> None:
        self._counts.asked += 1
        try:
            result = await self._client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        except GenbatchError as error:
            self._counts.wrong.append(f"a request: {error!r}")
        else:
            self._end(len(result.token_ids) == MAX_TOKENS, f"a result of {len(result.token_ids)} tokens")
            if time.monotonic() > self._killed_at:
                self._counts.until_back_s.append(time.monotonic() - self._killed_at)

    def _end(self, is_whole: bool, what: str) -> None:
        self._counts.results += 1
        if not is_whole:
            self._counts.wrong.append(what)


def _digits(number: int) -> list[int]:
    """Another prompt each time: one and the same would be taken for poison."""
    return [40 + int(digit) for digit in f"{number:04d}"]


async def run(service: RunningService, kills: int, seed: int) -> Counts:
    draw, counts = random.Random(seed), Counts()
    async with ZeroMQClient(service.address) as client:
        for number in range(kills):
            await Round(client, number, counts).run(service, draw.uniform(0.0, 1.0))
            await client.generate([5, 6], max_tokens=1)  # the next engine is there
            if (number + 1) % TOLD_EVERY == 0:
                print(f"{number + 1}: {counts.finals} of {counts.asked} finals, {len(counts.wrong)} wrong", flush=True)
        stats = await client.stats()
    if stats["engine_restarts"] != kills:
        counts.wrong.append(f"{stats['engine_restarts']} restarts")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    exit_on_sigterm()  # so that the service ends, too
    flags = ("--n-parallel", "4", "--max-restarts", "1000000", "--default-deadline-s", "0", "--quantize", "auto")
    with tempfile.TemporaryDirectory() as place, RunningService(Path(given.model), Path(place), *flags) as service:
        counts = run_trio(lambda: run(service, given.kills, given.seed))
    print(f"{given.kills} kills, {counts.asked} requests: {counts.finals} finals, {counts.asked - counts.finals} lost")
    print(f"  {counts.results} results, {counts.lost_in_stream} streams cut off, {len(counts.wrong)} wrong")
    if counts.until_lost_s:
        print(f"  a stream's end after the kill: {max(counts.until_lost_s):.3f} s at most")
    if counts.until_back_s:
        print(f"  results of the next engine after the kill: {median(counts.until_back_s):.1f} s, median")
    for what in counts.wrong:
        print(f"  wrong: {what}")
    raise SystemExit(bool(counts.wrong or counts.asked != counts.finals))


if __name__ == "__main__":
    main()
