"""One GGUF file and every engine that can run it, by turns, each in a process of its own; a program.

    python -m tests.benchmarks.model_files MODEL.gguf [MODEL.gguf ...] --modes exact int8 --rounds 3
    python -m tests.benchmarks.model_files 8B.gguf --batch 1 4 8 --rounds 1 --alone    # where only one fits into memory
    make bench ARGS="--model MODEL.gguf"

For each file: seconds from an imported library to the first token of a prompt of 16, the process's peak memory after
that and after everything, tokens a second of decode steps with a context of 128, and of a prompt of 256 tokens. All
engines run the same steps through their lowest door, greedy, on all cores. Prints a table in Markdown, medians of the
rounds, and the ratio to the best peer's with its least and most; each figure goes to standard error as it comes, and
with --raw into a file, from which --table makes the tables of what was measured before a run was cut off.

llama.cpp comes from the environment of the comparison, made at its first run. Two more peers are measured where a
virtual environment is named that has them (`compare.peers`): OpenVINO GenAI in int8 and int4, and vLLM's CPU build in
bfloat16, both on what transformers makes of the file.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TextIO

from tests.benchmarks.compare.command_lines import CommandLines
from tests.benchmarks.compare.engine_process import EngineProcess

CONTEXT = 128
PREFILL = 256
BATCHES = (1, 4, 8, 16, 32)
FIRST = 16  # tokens of the prompt that ends the start
POSITIONS = 512  # of a peer's sequence
SECONDS, LEAST_STEPS = 2.0, 4  # of one measurement
MOST_SECONDS = 8.0  # however few its steps were
MODES = ("exact", "int8")
_START = ("first token, s", "memory after it, MB", "memory, MB")


def enough(steps: int, seconds: float) -> bool:
    """Whether a measurement may end."""
    return (seconds >= SECONDS and steps >= LEAST_STEPS) or seconds >= MOST_SECONDS


def rate(step: Callable[[], None], tokens: int, threads: int | None, *, most: int = 10**6) -> float:
    """Tokens a second of a step that is repeated, at most so often; with one thread, a second of its CPU time."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    step()
    started_at, steps = clock(), 0
    while steps < most - 1 and not enough(steps, clock() - started_at):
        step()
        steps += 1
    return tokens * steps / (clock() - started_at)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


class Engine(Protocol):
    """What a worker measures."""

    first_token_s: float

    def decode(self, count: int) -> float:
        """Decode tokens a second of `count` sequences."""
        ...

    def prefill(self) -> float:
        """Prompt tokens a second."""
        ...


class Llama:
    """llama.cpp with split KV, its fastest way."""

    def __init__(self, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
        from tests.benchmarks.compare.llama_decoder import LlamaDecoder

        del mode  # it has one
        started_at = time.perf_counter()
        self._decoder = LlamaDecoder(
            Path(path),
            n_seq=max(batches),
            n_ctx_seq=POSITIONS,
            n_threads=threads or len(os.sched_getaffinity(0)),
            flash_attention=True,
        )
        self._threads = threads
        self._evaluate(FIRST)
        self.first_token_s = time.perf_counter() - started_at
        self._decoder.seq_rm(0)

    def decode(self, count: int) -> float:
        """Decode tokens a second of `count` sequences."""
        self._evaluate(CONTEXT)
        for seq_id in range(1, count):
            self._decoder.seq_cp(0, seq_id)
        position = CONTEXT

        def step() -> None:
            nonlocal position
            self._decoder.step([(seq_id, (1,), position, True) for seq_id in range(count)])
            position += 1

        measured = rate(step, count, self._threads, most=POSITIONS - CONTEXT - 1)
        for seq_id in range(count):
            self._decoder.seq_rm(seq_id)
        return measured

    def prefill(self) -> float:
        """Prompt tokens a second."""

        def step() -> None:
            self._evaluate(PREFILL)
            self._decoder.seq_rm(0)

        return rate(step, PREFILL, self._threads)

    def _evaluate(self, count: int) -> None:
        self._decoder.step([(0, list(range(1, count + 1)), 0, True)])


# One process an engine


def worker(engine: str, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
    """Answers until its input ends."""
    lines = CommandLines()
    kind: Callable[[str, str, Sequence[int], int | None], Engine] = Llama
    if engine == "ours":
        from tests.benchmarks import native_steps  # not for the other ones: torch alone takes 300 MB

        kind = native_steps.Ours
    elif engine != "llama":
        from tests.benchmarks import pipelines

        kind = {"openvino": pipelines.OpenVino, "vllm": pipelines.Vllm}[engine]
    lines.reply({})
    loaded: Engine | None = None

    def start() -> dict[str, float]:
        nonlocal loaded
        loaded = kind(path, mode, batches, threads)
        return {"first token, s": loaded.first_token_s, "memory after it, MB": _peak_mb()}

    def measured(what: str) -> dict[str, float]:
        assert loaded is not None
        name, _, count = what.partition(" ")
        value = loaded.decode(int(count)) if name == "decode" else loaded.prefill()
        return {what: value, "memory, MB": _peak_mb()}

    lines.serve({"start": start, "measure": measured})


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is started.

    Args:
        name: what the tables call it.
        python: of its environment.
        engine: its part of the command line.
        path: what it loads.
        mode: this engine's.
        preload: shared libraries that it wants in its process first.
    """

    name: str
    python: str
    engine: str
    path: Path
    mode: str = "exact"
    preload: Sequence[Path] = ()

    def start(self, batches: Sequence[int], threads: int | None) -> EngineProcess:
        """Its process, with nothing loaded."""
        command = [self.python, "-m", "tests.benchmarks.model_files", str(self.path), "--worker", self.engine]
        command += ["--modes", self.mode, "--batch", *map(str, batches)]
        command += ["--threads", str(threads)] if threads else []
        environment = {"LD_PRELOAD": ":".join(map(str, self.preload))} if self.preload else {}
        return EngineProcess(self.name, command, environment)


# What is measured


@dataclass(frozen=True, slots=True)
class Figure:
    """One value of one engine: seconds, MB, or tokens a second of "decode COUNT" or "prefill"."""

    file: str
    file_mb: float
    round: int
    engine: str
    what: str
    value: float


def measure(
    path: Path,
    engines: Sequence[Peer],
    batches: Sequence[int],
    rounds: int,
    *,
    alone: bool = False,
    threads: int | None = None,
    raw: TextIO | None = None,
) -> list[Figure]:
    """The file's figures, which are told as they come.

    Args:
        engines: by turns; each is asked one thing, then the next.
        alone: each is asked everything and ended, in every round, before the next one starts.
        raw: gets each figure too, as a line of JSON.
    """
    figures: list[Figure] = []
    asked = [*(f"decode {count}" for count in batches), "prefill"]
    size, started = path.stat().st_size / 1e6, {}

    def ask(number: int, peer: Peer, do: str, **arguments: str) -> None:
        process = started[peer.name]
        with process.running():
            answer = process.call(do, **arguments)
        for what, value in answer.items():
            figures.append(Figure(path.name, size, number, peer.name, what, value))
            line = json.dumps(asdict(figures[-1]))
            print(line, file=raw or sys.stderr, flush=True)
            if raw:
                print(line, file=sys.stderr, flush=True)

    def begin(number: int, peer: Peer) -> None:
        started[peer.name] = peer.start(batches, threads)
        ask(number, peer, "start")

    try:
        for number in range(1, rounds + 1):
            for group in [[peer] for peer in engines] if alone else [engines]:
                for peer in group:
                    if peer.name not in started:
                        begin(number, peer)
                for what in asked:
                    for peer in group:
                        ask(number, peer, "measure", what=what)
                for peer in group if alone else ():
                    started.pop(peer.name).close()
    finally:
        for process in started.values():
            process.close()
    return figures


def tables(figures: Iterable[Figure]) -> str:
    """Markdown, one table a file: medians of the rounds, and this engine's modes to the best peer round by round."""
    files: dict[str, list[Figure]] = {}
    for figure in figures:
        files.setdefault(figure.file, []).append(figure)
    return "\n".join(_table(found) for found in files.values())


def read_raw(lines: Iterable[str]) -> list[Figure]:
    """The figures of a file that --raw wrote; a last line that was cut off is left out."""
    return [Figure(**json.loads(line)) for line in lines if line.endswith("\n")]


def _table(figures: Sequence[Figure]) -> str:
    engines = list(dict.fromkeys(figure.engine for figure in figures))
    values: dict[tuple[str, str], dict[int, float]] = {}
    for figure in figures:
        rounds = values.setdefault((figure.what, figure.engine), {})
        # A peak is told with every rate, and only grows.
        rounds[figure.round] = max(figure.value, rounds.get(figure.round, 0.0)) if "MB" in figure.what else figure.value
    rates = [what for what in dict.fromkeys(figure.what for figure in figures) if what not in _START]
    rows = [f"\n{figures[0].file}, {figures[0].file_mb:.0f} MB\n"]
    rows.append("| | " + " | ".join(engines) + " | to the best peer (least to most) |")
    rows.append("|---|" + "---|" * (len(engines) + 1))
    for what in (*_START, *rates):
        medians = [
            f"{statistics.median(found.values()):.1f}" if (found := values.get((what, name))) else ""
            for name in engines
        ]
        ratios = [_ratio(values, what, mode, engines) for mode in MODES if mode in engines and what in rates]
        unit = ", tok/s" if what in rates else ""
        rows.append(f"| {what}{unit} | " + " | ".join(medians) + f" | {', '.join(filter(None, ratios))} |")
    return "\n".join(rows) + "\n"


def _ratio(values: dict[tuple[str, str], dict[int, float]], what: str, mode: str, engines: Sequence[str]) -> str:
    peers = [values.get((what, name), {}) for name in engines if name not in MODES]
    each = []
    for number, ours in values.get((what, mode), {}).items():
        theirs = [found[number] for found in peers if number in found]
        if theirs:
            each.append(ours / max(theirs))
    return f"{mode} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" if each else ""


def main() -> None:
    """Reads the arguments and measures each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each engine; 1 counts CPU time, so that a busy machine may do")
    parser.add_argument("--alone", action="store_true", help="one engine's process at a time, for files of many GB")
    parser.add_argument("--raw", type=Path, help="append each figure to this file as it comes")
    parser.add_argument("--table", action="store_true", help="FILES are what --raw wrote: print their tables")
    parser.add_argument("--worker", choices=("ours", "llama", "openvino", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, str(options.files[0]), options.modes[0], options.batch, options.threads)
        return
    if options.table:
        for path in options.files:
            with path.open() as lines:
                print(tables(read_raw(lines)))
        return
    from tests.benchmarks.compare.peers import file_engines  # a worker's environment need not have what it imports

    raw = options.raw.open("a") if options.raw else None
    for path in options.files:
        figures = measure(
            path,
            file_engines(path, options.modes),
            options.batch,
            options.rounds,
            alone=options.alone,
            threads=options.threads,
            raw=raw,
        )
        print(tables(figures), flush=True)


if __name__ == "__main__":
    main()
