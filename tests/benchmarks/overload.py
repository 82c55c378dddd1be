"""Asks a running service for three times what it can do, and counts what the refused and the accepted get.

python -m tests.benchmarks.overload --seconds 20

First the peak, with as many requests at work as there are slots and twice as many that wait; then requests that come at
random moments at three times that pace, whatever becomes of them. The clients share the machine with the service.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

from genbatch import ZeroMQClient
from genbatch.clients.bench.runs import percentile
from genbatch.clients.remote import Retry
from genbatch.proto.errors import GenbatchError
from tests.actors.service.running_service import RunningService
from tests.nif.tiny_models import build_model

SLOTS, OVERLOAD = 8, 3.0
# Client -> its share of the overload.
GREED = {"greedy": 0.6, "plain": 0.3, "rare": 0.1}
TOKENS = (16, 48)  # of an answer, drawn evenly
MEAN_TOKENS = sum(TOKENS) / 2
WARM_UP_S, PEAK_S = 5.0, 10.0
# A refusal is what is measured here, so it is not to be hidden by coming again.
NO_RETRY = Retry(max_attempts=1)


@dataclass
class Seen:
    """What came of one client's requests, as (when it ended, how long it took, its tokens)."""

    answers: list[tuple[float, float, int]] = field(default_factory=list)
    refusals: dict[str, list[float]] = field(default_factory=dict)  # by the error's code: seconds until it was known

    async def ask(self, client: ZeroMQClient, rng: random.Random) -> None:
        begun = time.monotonic()
        prompt = [rng.randrange(10, 300) for _ in range(rng.randint(4, 16))]
        try:
            result = await client.generate(prompt, max_tokens=rng.randint(*TOKENS), ignore_eos=True)
        except GenbatchError as error:
            self.refusals.setdefault(error.code, []).append(time.monotonic() - begun)
        else:
            now = time.monotonic()
            self.answers.append((now, now - begun, len(result.token_ids)))

    def tokens_per_s(self, since: float, until: float) -> float:
        return sum(count for at, _, count in self.answers if since <= at < until) / (until - since)


async def measure_peak(address: str, seconds: float) -> float:
    """Tokens a second."""
    seen, rng = Seen(), random.Random(1)

    async def ask_on() -> None:
        while True:
            await seen.ask(client, rng)

    begun = time.monotonic() + WARM_UP_S
    async with ZeroMQClient(address, retry=NO_RETRY) as client:
        with trio.move_on_after(WARM_UP_S + seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(3 * SLOTS):
                    nursery.start_soon(ask_on)
        while (await client.stats())["requests_running"]:  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.1)
    if not seen.answers:
        raise RuntimeError(f"no answer, but {seen.refusals}")
    return seen.tokens_per_s(begun, begun + seconds)


async def overload(address: str, rate: float, seconds: float) -> dict[str, Seen]:
    """Requests a second for so long; returns once all have ended."""
    seen = {name: Seen() for name in GREED}

    async def arrive(name: str, rng: random.Random) -> None:
        async with ZeroMQClient(address, retry=NO_RETRY) as client, trio.open_nursery() as calls:
            with trio.move_on_after(seconds):
                while True:
                    await trio.sleep(rng.expovariate(rate * GREED[name]))
                    calls.start_soon(seen[name].ask, client, rng)

    async with trio.open_nursery() as nursery:
        for number, name in enumerate(GREED):
            nursery.start_soon(arrive, name, random.Random(number))
    return seen


def resident_mib(pid: int | None) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


async def run(service: RunningService, seconds: float) -> None:
    peak = await measure_peak(service.address, PEAK_S)
    rate = OVERLOAD * peak / MEAN_TOKENS
    before = [resident_mib(pid) for pid in (service.engine, service.gateway)]
    begun = time.monotonic()
    seen = await overload(service.address, rate, seconds)
    after = [resident_mib(pid) for pid in (service.engine, service.gateway)]
    codes = {code for one in seen.values() for code in one.refusals}
    refused = [took for one in seen.values() for times in one.refusals.values() for took in times]
    # What began before the overload and what it left behind would count on one side only.
    edge = min(seconds / 4, 3.0)
    goodput = sum(one.tokens_per_s(begun + edge, begun + seconds) for one in seen.values())
    print(f"peak {peak:.0f} tokens/s; then {rate:.0f} requests/s of {MEAN_TOKENS:.0f} tokens for {seconds:.0f} s")
    print(f"goodput {goodput:.0f} tokens/s: {goodput / peak:.0%} of the peak")
    if refused:
        p50, p99 = percentile(refused, 50) * 1e3, percentile(refused, 99) * 1e3
        print(f"{len(refused)} refused ({', '.join(sorted(codes))}): p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    for name, one in seen.items():
        asked = len(one.answers) + sum(map(len, one.refusals.values()))
        print(f"  {name}: {asked} asked, {len(one.answers)} answered")
    for role, old, new in zip(("engine", "gateway"), before, after, strict=True):
        print(f"{role}: {old:.0f} MiB before, {new:.0f} MiB after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", help="a directory or a name; without it a small random one is made")
    given = parser.parse_args()
    flags = ("--n-parallel", str(SLOTS))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = Path(given.model) if given.model else build_model("llama", place)
        with RunningService(model, place, *flags) as service:
            trio.run(run, service, given.seconds)


if __name__ == "__main__":
    main()
