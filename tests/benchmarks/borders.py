"""Where the time to the first token goes: one request after another through an idle `genbatch serve`.

    python -m tests.benchmarks.borders --requests 30
    python -m tests.benchmarks.borders --door zeromq -- --quantize int8

The same conversation is sent again and again, so its prompt is in the cache from the second request on. With `--fresh`
each request has a prompt of its own, so that the first request can be compared with the later ones. A table has a
line for each border that the request crosses: the median time since the border before, and that of the first request
after the start. The last line is the forward's share. `border_clocks.py` sets the clocks.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from genbatch import SyncZeroMQClient
from genbatch.proto.messages import Token
from tests.benchmarks.border_clocks import FOLDER

ROOT = Path(__file__).parents[2]
SERVE = "import sys; sys.argv.insert(1, 'serve'); from genbatch.clients.cli.main import main; main()"
QUESTION = "Tell me a story about a fox that learns to swim, and about the river that it learns it in. " * 4
TOKENS = 4
SENT, READ = "request sent", "first token read"
FORWARD = "worker awake", "first token drawn"
ORDER = (
    SENT,
    "connection accepted",
    "request read",
    "request at the link",
    "request at the engine",
    "request in the Batcher's mailbox",
    "prompt rendered and tokenized",
    "window closed",
    "step planned",
    "worker awake",
    "first token drawn",
    "event loop awake",
    "token booked",
    "tokens at the gateway",
    READ,
)

Clock = dict[str, float]


def over_http(address: str, questions: Iterator[str]) -> Iterator[Clock]:
    """Sends a request at each turn, with a connection of its own; what its client saw."""
    host, _, port = address.removeprefix("http://").partition(":")
    fields = {"max_tokens": TOKENS, "temperature": 0, "stream": True}
    for question in questions:
        body = json.dumps({"messages": [{"role": "user", "content": question}], **fields})
        connection = http.client.HTTPConnection(host, int(port))
        sent = time.monotonic()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer, read = connection.getresponse(), 0.0
        while line := answer.readline():
            if not read and b'"content":"' in line and b'"content":""' not in line:
                read = time.monotonic()
        connection.close()
        yield {SENT: sent, READ: read}


def over_zeromq(address: str, questions: Iterator[str]) -> Iterator[Clock]:
    """The same over ZeroMQ, with one connection for all."""
    with SyncZeroMQClient(address) as client:
        client.models()
        for question in questions:
            reads: list[float] = []
            sent = time.monotonic()
            with client.stream(messages=[{"role": "user", "content": question}], max_tokens=TOKENS) as tokens:
                for token in tokens:
                    assert isinstance(token, Token)
                    reads.append(time.monotonic())
            yield {SENT: sent, READ: reads[0]}


DOORS: dict[str, Callable[[str, Iterator[str]], Iterator[Clock]]] = {"http": over_http, "zeromq": over_zeromq}


@contextmanager
def service(folder: Path, flags: list[str]) -> Iterator[dict[str, str]]:
    """A running service with clocks; the addresses of its doors."""
    (folder / "sitecustomize.py").write_text("from tests.benchmarks.border_clocks import install\ninstall()\n")
    addresses = {"zeromq": f"ipc://{folder}/zeromq.sock"}
    doors = ["--http", "127.0.0.1:0", "--bind", addresses["zeromq"]]
    command = [sys.executable, "-c", SERVE, *doors, *flags]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", FOLDER: str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while " ready " not in (text := (folder / "log").read_text()):
                if process.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.1)
            addresses["http"] = next(word for word in text.split() if word.startswith("http://"))
            yield addresses
        finally:
            process.terminate()
            process.wait()


def crossings(folder: Path) -> list[tuple[float, str]]:
    """All borders that were crossed in any process, in the order of time."""
    found = []
    for path in folder.iterdir():
        if path.name.isdigit():
            for line in path.read_text().splitlines():
                at, _, border = line.partition(" ")
                found.append((float(at), border))
    return sorted(found)


def way(seen: Clock, crossed: list[tuple[float, str]]) -> Clock:
    """The borders of one request on its way to the first token, in order: the first crossing of each after the last."""
    clock, now = {SENT: seen[SENT]}, seen[SENT]
    for border in ORDER[1:-1]:
        at = next((at for at, name in crossed if name == border and now <= at <= seen[READ]), None)
        if at is not None:
            clock[border] = now = at
    return clock | {READ: seen[READ]}


def table(clocks: list[Clock]) -> list[str]:
    """A line for each border, in milliseconds: the median of all requests but the first, and the first."""
    first, *later = clocks
    lines = ["| border | ms | first request, ms |", "|---|---|---|"]
    for before, border in pairwise(later[0]):
        usual = median(clock[border] - clock[before] for clock in later if border in clock and before in clock)
        once = first[border] - first[before] if border in first and before in first else float("nan")
        lines.append(f"| {border} | {1000 * usual:.2f} | {1000 * once:.2f} |")
    whole = [clock[READ] - clock[SENT] for clock in clocks]
    begun, drawn = FORWARD
    beside = [wait - (clock[drawn] - clock[begun]) for wait, clock in zip(whole, clocks, strict=True)]
    for name, times in (("all", whole), ("beside the forward", beside)):
        lines.append(f"| **{name}** | {1000 * median(times[1:]):.2f} | {1000 * times[0]:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--door", choices=DOORS, default="http")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two requests")
    parser.add_argument("--fresh", action="store_true", help="each request has a prompt of its own")
    parser.add_argument("flags", nargs="*", help="flags of genbatch serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with service(folder, arguments.flags) as addresses:
            seen = []
            questions = (f"{number:03d} {QUESTION}" if arguments.fresh else QUESTION for number in count())
            requests = DOORS[arguments.door](addresses[arguments.door], questions)
            for _ in range(arguments.requests):
                seen.append(next(requests))
                time.sleep(arguments.pause)
        crossed = crossings(folder)
    print("\n".join(table([way(one, crossed) for one in seen])))


if __name__ == "__main__":
    main()
