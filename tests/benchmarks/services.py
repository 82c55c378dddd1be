"""genbatch and its peers as services: the same weights, the same client, streamed chats over HTTP.

    python -m tests.benchmarks.services --llama .venv/llama/bin/python --openvino .venv/openvino/bin/python
    python -m tests.benchmarks.services --at-once 8 --requests 24 --rates

Services take turns, each started anew and measured alone: callers in closed loops, then Poisson arrivals at shares of
the capacity that the largest loop showed. `--llama` names a Python that has the package xllamacpp, `--openvino` one
that has OpenVINO GenAI and its exporter (`compare/peers.py`); without them genbatch is measured alone. Each peer gets
the weights in the format in which it is fastest. A request is good if its first token came within 1 s and 99 % of its
gaps are 100 ms or shorter. A gap is the time between two pieces of text.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import trio

from genbatch.clients.bench.runs import RequestTimes, percentile
from genbatch.clients.bench.workloads import arrival_times
from genbatch.nif.models.model_source import resolve_model
from tests.benchmarks.compare.peers import openvino_model
from tests.benchmarks.requantise import requantise

TOKENS = 64
MODEL = "measured"  # the name that requests ask for; llama.cpp ignores it
WORDS = ("river", "stone", "music", "window", "engine", "garden", "paper", "silver", "doctor", "market", "forest")
SERVE = "import sys; sys.argv.insert(1, 'serve'); from genbatch.clients.cli.main import main; main()"
# xllamacpp has the server of llama.cpp; ready once it prints the address.
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx, params.cpuparams.n_threads = params.n_parallel * 512, int(sys.argv[4])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(1)
"""
STREAMS = 7  # beside a long prompt
GOOD_FIRST_S, GOOD_GAP_S = 1.0, 0.1
START_S, END_S = 300.0, 20.0
"""Seconds for a service to load its model, and to end."""
ANSWER_S = 300.0


def questions(count: int, seed: int) -> list[str]:
    """Prompts of some 110 tokens; a long story is asked for, so that no answer ends early."""
    draw = Random(seed)
    task = "Write a very long story in which all of these words occur, and do not stop: "
    return [task + " ".join(draw.choice(WORDS) for _ in range(70)) for _ in range(count)]


async def ask(port: int, question: str, times: RequestTimes, max_tokens: int = TOKENS) -> None:
    """Sends one chat, and notes when each piece of its answer came."""
    fields = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps({"model": MODEL, "ignore_eos": True, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    times.sent_at = time.perf_counter()
    with trio.fail_after(ANSWER_S):
        await _stream(port, head, body, times)


async def _stream(port: int, head: str, body: bytes, times: RequestTimes) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        rest = b""
        async for data in stream:
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            pieces = sum(b'"content":"' in line and b'"content":""' not in line for line in lines)
            times.token_at += [now] * pieces
            if any(line.startswith(b"data: [DONE]") for line in lines):
                break
        times.ended_at = time.perf_counter()
    if not times.token_at:
        times.error = rest.decode(errors="replace")[:200] or "no answer"


async def closed_loops(port: int, asked: Sequence[str], at_once: int) -> list[RequestTimes]:
    """So many callers, each with one request at a time."""
    found: list[RequestTimes] = []
    waiting = iter(asked)

    async def caller() -> None:
        for question in waiting:
            found.append(RequestTimes(0, TOKENS, 0.0))
            await ask(port, question, found[-1])

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(caller)
    return found


async def poisson(port: int, asked: Sequence[str], rate: float) -> list[RequestTimes]:
    """Requests that arrive whether others have ended or not."""
    found = [RequestTimes(0, TOKENS, 0.0) for _ in asked]
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for at, question, times in zip(arrival_times(len(asked), rate, seed=1), asked, found, strict=True):
            await trio.sleep_until(start + at)
            nursery.start_soon(ask, port, question, times)
    return found


async def beside_streams(port: int, words: int, streams: int = STREAMS) -> tuple[float, list[float]]:
    """A prompt of so many words arrives beside streams; the time to its first token, and the gaps meanwhile."""
    long, *short = (RequestTimes(0, TOKENS, 0.0) for _ in range(1 + streams))
    async with trio.open_nursery() as nursery:
        for question, times in zip(questions(streams, seed=7), short, strict=True):
            nursery.start_soon(ask, port, question, times, 16 * TOKENS)
        while not all(times.token_at for times in short):  # noqa: ASYNC110
            await trio.sleep(0.01)
        await ask(port, " ".join(Random(8).choices(WORDS, k=words)), long, 1)
        nursery.cancel_scope.cancel()
    if long.error is not None:
        raise SystemExit(long.error)
    reads = ([at for at in times.token_at if long.sent_at <= at <= long.token_at[0]] for times in short)
    return long.ttft, [end - begin for times in reads for begin, end in pairwise(times)]


def is_good(times: RequestTimes) -> bool:
    if times.error is not None or times.ttft > GOOD_FIRST_S:
        return False
    return not times.itl or percentile(times.itl, 99) <= GOOD_GAP_S


def row(name: str, load: str, found: Sequence[RequestTimes], megabytes: int) -> str:
    """A line of the table."""
    good = [times for times in found if times.error is None]
    if not good:
        raise SystemExit(f"{name}, {load}: {found[0].error}")
    seconds = max(times.ended_at for times in found) - min(times.sent_at for times in found)
    first = [1000 * times.ttft for times in good]
    gaps = [1000 * gap for times in good for gap in times.itl]
    figures = [
        f"{len(good) * TOKENS / seconds:.0f}",
        f"{percentile(first, 50):.0f} / {percentile(first, 99):.0f}",
        f"{percentile(gaps, 50):.1f} / {percentile(gaps, 99):.1f}",
        f"{percentile(gaps, 99) / percentile(gaps, 50):.1f}",
        f"{100 * sum(map(is_good, found)) / len(found):.0f} %",
        f"{megabytes}",
    ]
    return "| " + " | ".join([name, load, *figures]) + " |"


HEADER = """| service | load | tokens/s | first token p50 / p99, ms | gap p50 / p99, ms | p99 / p50 | goodput | MB |
|---|---|---|---|---|---|---|---|"""


def is_healthy(port: int) -> bool:
    """Whether the service answers; llama.cpp's listens before its model is loaded."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except OSError:
        return False


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    """A service in a session of its own, once it says that it is healthy; its process id."""
    if is_healthy(port):  # a service that was left behind would be measured in place of this one
        raise SystemExit(f"port {port} is taken")
    with tempfile.NamedTemporaryFile("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            begun = time.monotonic()
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > begun + START_S:
                    raise SystemExit(f"the service did not start:\n{Path(log.name).read_text()}")
                time.sleep(0.1)
            yield process.pid
        finally:
            for signal_, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal_)
                    process.wait(patience_s)


def megabytes(session: int) -> int:
    """Memory of all processes of a session, each page of several processes counted once a process."""
    pages = 0
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if place.name.isdigit() and os.getsid(int(place.name)) == session:
                pages += int((place / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def measure(name: str, port: int, session: int, arguments: argparse.Namespace) -> None:
    """Prints a line for each load."""
    trio.run(closed_loops, port, questions(4, seed=99), 4)  # the first requests warm everything up
    most = 0.0
    for at_once in arguments.at_once:
        asked = questions(max(arguments.requests, 2 * at_once), seed=at_once)
        begun = time.perf_counter()
        found = trio.run(closed_loops, port, asked, at_once)
        most = max(most, len(asked) / (time.perf_counter() - begun))
        print(row(name, f"{at_once} at once", found, megabytes(session)), flush=True)
    if arguments.beside:
        first, gaps = trio.run(beside_streams, port, arguments.beside)
        shares = " / ".join(f"{1000 * percentile(gaps, share):.1f}" for share in (50, 99, 100))
        print(f"{name}: {arguments.beside} words after {first:.1f} s, gaps p50 / p99 / longest {shares} ms", flush=True)
    for share in arguments.rates:
        asked = questions(arguments.requests, seed=1000 + int(100 * share))
        found = trio.run(poisson, port, asked, share * most)
        print(row(name, f"{share:.0%} of capacity", found, megabytes(session)), flush=True)


def services(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each service's name and command; with as many slots as the largest load has callers."""
    port, threads = str(arguments.port), str(len(os.sched_getaffinity(0)))
    slots = max([*arguments.at_once, 1 + STREAMS if arguments.beside else 1])
    doors = ["--http", f"127.0.0.1:{port}", "--bind", f"ipc://{folder}/zeromq.sock"]
    positions = 512 * slots + 4 * (arguments.beside or 0)
    flags = ["--n-parallel", str(slots), "--n-ctx", str(positions), "--served-model-name", MODEL]
    for quantize in arguments.quantize:
        serve = [sys.executable, "-c", SERVE, arguments.model]
        yield f"genbatch {quantize}", [*serve, *doors, *flags, "--quantize", quantize]
    file = resolve_model(arguments.model).path
    if arguments.llama:
        made = folder / "model.gguf" if arguments.llama_format else file
        if arguments.llama_format:
            requantise(file, made, arguments.llama_format)
        command = [str(arguments.llama), "-c", LLAMA, str(made), str(slots), port, threads]
        yield f"llama.cpp {arguments.llama_format}".strip(), command
    if arguments.openvino:
        made = openvino_model(file, arguments.openvino, arguments.openvino_format)
        server = Path(__file__).with_name("openvino_server.py")
        command = [*map(str, (arguments.openvino, server, made, slots)), port, threads]
        yield f"OpenVINO {arguments.openvino_format}", command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2", help="a name or a GGUF file")
    parser.add_argument("--llama", type=Path, help="a Python with the package xllamacpp")
    parser.add_argument("--llama-format", default="Q4_0", help='of the weights; "" takes the file as it is')
    parser.add_argument("--openvino", type=Path, help="a Python with OpenVINO GenAI and optimum-intel")
    parser.add_argument("--openvino-format", default="int8", choices=["int8", "int4"])
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 0.6, 0.9], help="shares of the capacity")
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--beside", type=int, help="words of a long prompt that arrives beside 7 streams")
    parser.add_argument("--quantize", nargs="*", default=["none", "int8"])
    parser.add_argument("--port", type=int, default=8433)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the service, too
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, command in services(arguments, Path(folder)):
            with running(command, arguments.port) as session:
                measure(name, arguments.port, session, arguments)


if __name__ == "__main__":
    main()
