"""Steady streams of innocent clients, one at each door, alone and beside one hostile client after another.

What is measured are the gaps between their tokens; what is told of a kind is the door at which they grew most.

Beside each kind it is measured several times, each time right after the quiet service, since the machine may have
others; what is told is the median of what one is of the other.

python -m tests.hostile --minutes 7

The service is a process with its engine and gateway, the hostile client another one, which gives way to the service
for the processor: in life it is somebody else's machine. Exit code 1 if a stream is broken or a call is not answered;
whether its gaps are at most three times those of the quiet service is told, as it depends on the machine.
"""

import argparse
import ast
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx2
import trio

from genbatch import RPCClient, ZeroMQClient
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.clients.bench.runs import percentile
from genbatch.proto.errors import GenbatchError
from tests.actors.service.running_service import RunningService
from tests.hostile.clients import KINDS, Place

TOKENS = 200  # of one stream; the next begins when it has ended
PROMPT = "Once upon a time there was a"
MOST_TIMES = 3.0
# What a hostile client may hear: its fault, or that there is too much of it.
FAIR = {
    "result", "closed", "queue_full", "invalid_request", "prompt_too_long", "unauthenticated", "malformed_message",
    "frame_too_large", "BrokenResourceError", "ConnectionResetError", "http 400", "http 401", "http 413", "http 200",
    "http 429", "http 505",
}  # fmt: skip


Streamed = tuple[list[float], str]  # when each token came, and the text


async def over_rpc(place: Place) -> Streamed:
    """One stream over a new connection; the doors below do the same.

    Raises:
        GenbatchError: the stream failed.
        AssertionError: it lost a token.
    """
    async with RPCClient(f"unix://{place.path}", token=place.token) as client:
        return await _times(client)


async def over_zeromq(place: Place) -> Streamed:
    async with ZeroMQClient(place.zeromq) as client:
        return await _times(client)


async def _times(client: RPCClient | ZeroMQClient) -> Streamed:
    async with client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) as stream:
        times = [time.monotonic() async for _ in stream]
    assert len(times) == len(stream.result.token_ids) == TOKENS, "a token is lost"
    return times, stream.result.text


async def over_http(place: Place) -> Streamed:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {place.token}"}
    times: list[float] = []
    text, last = "", ""
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{place.http}", trust_env=False, timeout=60.0) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in line, line
                times.append(time.monotonic())
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            last = line or last
    assert last == "data: [DONE]", "the stream has no end"
    return times, text


Door = Callable[[Place], Awaitable[Streamed]]
DOORS: dict[str, Door] = {"RPC": over_rpc, "ZeroMQ": over_zeromq, "HTTP": over_http}
Gaps = dict[str, list[float]]  # seconds between two tokens, by door


async def gaps_of_streams(place: Place, seconds: float) -> Gaps:
    """The gaps at each door, of as many streams as there is time for, one at a time at each.

    Raises:
        GenbatchError: a stream failed.
        AssertionError: it lost a token, or its end, or its text was not that of the others.
    """
    gaps: Gaps = {name: [] for name in DOORS}
    texts: set[str] = set()
    ends = time.monotonic() + seconds

    async def stream(name: str, door: Door) -> None:
        while time.monotonic() < ends:
            times, text = await door(place)
            texts.add(text)
            assert len(texts) == 1, "another text than before"
            gaps[name] += [after - before for before, after in pairwise(times)]

    async with trio.open_nursery() as nursery:
        for name, door in DOORS.items():
            nursery.start_soon(stream, name, door)
    return gaps


def measure(mine: Place, theirs: Place, kind: str | None, seconds: float) -> tuple[Gaps, str, bool]:
    """The gaps beside a kind of hostile client, what that one was answered, and whether all of it is fair."""
    if kind is None:
        return trio.run(gaps_of_streams, mine, seconds), "", True
    command = ["nice", "-n", "19", sys.executable, "-m", "tests.hostile.clients", kind]
    command += [theirs.path, theirs.token, theirs.zeromq, theirs.http]
    with tempfile.TemporaryFile("w+") as log:
        client = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            time.sleep(2.0)  # it has begun
            gaps = trio.run(gaps_of_streams, mine, seconds)
        finally:
            ended = client.poll()
            client.kill()
            client.wait()
        log.seek(0)
        lines = log.read().splitlines()
    told = next((line for line in reversed(lines) if line.startswith("{")), "{}")
    answers: dict[str, int] = ast.literal_eval(told)
    text = ", ".join(f"{name} {count}" for name, count in sorted(answers.items()))
    if ended is not None:
        text = f"{text}; it ended: {lines[-1:]}"
    return gaps, text or "nothing yet", ended is None and set(answers) <= FAIR


def free_port() -> int:
    """A TCP port of this machine that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="shared by all kinds and the quiet service")
    parser.add_argument("--model", default="smollm2", help="a directory or a name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one; repeatable")
    chosen = parser.parse_args()
    kinds = chosen.kind or list(KINDS)
    seconds = 60 * chosen.minutes / (2 * len(kinds) * chosen.repeats)
    broken = False
    print("| beside | tokens | p99 gap, ms | of the quiet p99, median of the worst door | each | it was answered |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        path, store = f"{directory}/rpc.sock", KeyStore(Path(directory) / "keys")
        zeromq, http = f"tcp://127.0.0.1:{free_port()}", str(free_port())
        mine, theirs = (Place(path, store.new_token(name), zeromq, http) for name in ("innocent", "hostile"))
        flags = ("--bind", zeromq, "--rpc-bind", f"unix://{path}", "--tokens", str(store.tokens), "--http", f":{http}")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with RunningService(Path(chosen.model), Path(directory), *flags):
            trio.run(gaps_of_streams, mine, 2.0)  # warm
            for kind in kinds:
                tokens, times, ratios, doors, answers = 0, [], [], [], ""
                for _ in range(chosen.repeats):
                    try:
                        quiet = measure(mine, theirs, None, seconds)[0]
                        gaps, answers, is_fair = measure(mine, theirs, kind, seconds)
                        p99 = {door: percentile(gaps[door], 99) for door in DOORS}
                        worse = {door: p99[door] / percentile(quiet[door], 99) for door in DOORS}
                    except (GenbatchError, AssertionError, httpx2.HTTPError, ExceptionGroup) as error:
                        print(f"| {kind} | broken: {error!r} |")
                        broken = True
                        continue
                    broken = broken or not is_fair
                    worst = max(worse, key=worse.__getitem__)
                    tokens += sum(map(len, gaps.values()))
                    times.append(p99[worst])
                    ratios.append(worse[worst])
                    doors.append(worst)
                    time.sleep(1.0)  # what it has left behind is worked off
                if ratios:
                    each = ", ".join(f"{ratio:.1f} {door}" for ratio, door in zip(ratios, doors, strict=True))
                    told = f"{median(ratios):.1f}" + (" (more than wanted)" if median(ratios) > MOST_TIMES else "")
                    name, gap = kind.replace("_", " "), 1e3 * median(times)
                    print(f"| {name} | {tokens} | {gap:.1f} | {told} | {each} | {answers} |", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
