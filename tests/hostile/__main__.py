"""A steady stream of somebody innocent, alone and beside one hostile client after another: the gaps between its tokens.

Beside each kind it is measured several times, each time right after the quiet service, since the machine may have
others; what is told is the median of what one is of the other.

python -m tests.hostile --minutes 7

The service is a process with its engine and gateway, the hostile client another one, which gives way to the service
for the processor: in life it is somebody else's machine. Exit code 1 if a stream is broken or a call is not answered;
whether its gaps are at most three times those of the quiet service is told, as it depends on the machine.
"""

import argparse
import ast
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import trio

from genbatch.actors.security.curve_keys import KeyStore
from genbatch.clients import RPCClient
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
    "frame_too_large", "BrokenResourceError", "ConnectionResetError", "http 400", "http 401", "http 413",
}  # fmt: skip


async def gaps_of_streams(place: Place, seconds: float) -> list[float]:
    """Seconds between two tokens of one stream, of as many streams as there is time for, each by a new connection.

    Raises:
        GenbatchError: a stream failed.
        AssertionError: it lost a token, or a greedy text was not what it was before.
    """
    gaps: list[float] = []
    known: list[int] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        times: list[float] = []
        async with (
            RPCClient(f"unix://{place.path}", token=place.token) as client,
            client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) as stream,
        ):
            tokens = []
            async for token in stream:
                times.append(time.monotonic())
                tokens.append(token.token_id)
        assert tokens == stream.result.token_ids and len(tokens) == TOKENS, "a token is lost"
        known = known or tokens
        assert tokens == known, "another text than before"
        gaps += [after - before for before, after in pairwise(times)]
    return gaps


def measure(mine: Place, theirs: Place, kind: str | None, seconds: float) -> tuple[list[float], str, bool]:
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
    print("| beside | tokens | p99 gap, ms | of the quiet p99, median | each | it was answered |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        path, store = f"{directory}/rpc.sock", KeyStore(Path(directory) / "keys")
        zeromq, http = f"ipc://{directory}/zeromq.sock", str(free_port())
        mine, theirs = (Place(path, store.new_token(name), zeromq, http) for name in ("innocent", "hostile"))
        flags = ("--rpc-bind", f"unix://{path}", "--tokens", str(store.tokens), "--http", f":{http}")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with RunningService(Path(chosen.model), Path(directory), *flags):
            trio.run(gaps_of_streams, mine, 2.0)  # warm
            for kind in kinds:
                tokens, times, ratios, answers = 0, [], [], ""
                for _ in range(chosen.repeats):
                    try:
                        quiet = percentile(measure(mine, theirs, None, seconds)[0], 99)
                        gaps, answers, is_fair = measure(mine, theirs, kind, seconds)
                    except (GenbatchError, AssertionError, ExceptionGroup) as error:
                        print(f"| {kind} | broken: {error!r} |")
                        broken = True
                        continue
                    broken = broken or not is_fair
                    tokens += len(gaps)
                    times.append(percentile(gaps, 99))
                    ratios.append(times[-1] / quiet)
                    time.sleep(1.0)  # what it has left behind is worked off
                if ratios:
                    each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
                    told = f"{median(ratios):.1f}" + (" (more than wanted)" if median(ratios) > MOST_TIMES else "")
                    name, p99 = kind.replace("_", " "), 1e3 * median(times)
                    print(f"| {name} | {tokens} | {p99:.1f} | {told} | {each} | {answers} |", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
