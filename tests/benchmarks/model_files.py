"""One GGUF file, two engines: this one and llama.cpp, by turns, each in a process of its own; a program.

    python -m tests.benchmarks.model_files MODEL.gguf [MODEL.gguf ...] --modes exact int8 --rounds 3
    make bench ARGS="--model MODEL.gguf"

For each file: seconds from an imported library to the first token of a prompt of 16, the process's peak memory after
that and after everything, tokens a second of decode steps with a context of 128, and of a prompt of 256 tokens. Both
engines run the same steps through their lowest door, greedy, on all cores. Prints a table in Markdown, medians of the
rounds, and the ratio's least and most; each round's figures go to standard error as they come. llama.cpp comes from
the environment of the comparison, made at its first run.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

CONTEXT = 128
PREFILL = 256
BATCHES = (1, 4, 8, 16, 32)
FIRST = 16  # tokens of the prompt that ends the start
_SECONDS = 2.0  # of one measurement
_LEAST_STEPS = 4
_LLAMA_POSITIONS = 512  # of a sequence


def rate(step: Callable[[], None], tokens: int, threads: int | None, *, most: int = 10**6) -> float:
    """Tokens a second of a step that is repeated, at most so often; with one thread, a second of its CPU time."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    step()
    started_at, steps = clock(), 0
    while steps < most - 1 and (steps < _LEAST_STEPS or clock() - started_at < _SECONDS):
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
            n_ctx_seq=_LLAMA_POSITIONS,
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

        measured = rate(step, count, self._threads, most=_LLAMA_POSITIONS - CONTEXT - 1)
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


# One process an engine: a line of JSON for each of the parent's lines


def worker(engine: str, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
    """Answers until its input ends."""
    kind: Callable[[str, str, Sequence[int], int | None], Engine] = Llama
    if engine == "ours":
        from tests.benchmarks import native_steps  # not for the other one: torch alone takes 300 MB

        kind = native_steps.Ours
    print("imported", flush=True)
    sys.stdin.readline()
    loaded: Engine = kind(path, mode, batches, threads)
    start = {"first token, s": loaded.first_token_s, "memory after it, MB": _peak_mb()}
    print(json.dumps(start), flush=True)
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        measured = loaded.decode(int(count)) if what == "decode" else loaded.prefill()
        print(json.dumps({"rate": measured, "memory, MB": _peak_mb()}), flush=True)


class Process:
    """A worker, asked one thing at a time; `command` is its Python and its part of the command line."""

    def __init__(self, command: Sequence[str], path: str, batches: Sequence[int], threads: int | None) -> None:
        python, engine, mode = command
        module = "tests.benchmarks.model_files"
        arguments = ["--worker", engine, "--modes", mode, "--batch", *map(str, batches)]
        arguments += ["--threads", str(threads)] if threads else []
        self._process = subprocess.Popen(
            [python, "-m", module, path, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()
        self.start: dict[str, float] = json.loads(self.ask("start"))

    def ask(self, line: str) -> str:
        """The worker's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"a worker ended with {self._process.wait()}")
        return line


def measure(
    path: str,
    modes: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    *,
    llama_python: Path,
    threads: int | None = None,
) -> None:
    """Prints the table of one file; `llama_python` has llama.cpp."""
    commands = {"llama.cpp": (str(llama_python), "llama", "exact")}
    commands |= {mode: (sys.executable, "ours", mode) for mode in modes}
    processes = {name: Process(command, path, batches, threads) for name, command in commands.items()}
    asked = [*(f"decode {count}" for count in batches), "prefill"]
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for what in asked:
            for name, process in processes.items():
                answer = json.loads(process.ask(what))
                rates.setdefault((what, name), []).append(answer["rate"])
                process.start["memory, MB"] = answer["memory, MB"]
            last = ", ".join(f"{name} {rates[what, name][-1]:.1f}" for name in processes)
            print(f"{Path(path).name}, round {number + 1}, {what}: {last}", file=sys.stderr, flush=True)
    size = Path(path).stat().st_size / 1e6
    print(f"\n{Path(path).name}, {size:.0f} MB\n\n| | " + " | ".join(processes) + " | ratio (least to most) |")
    print("|---|" + "---|" * (len(processes) + 1))
    for what in ("first token, s", "memory after it, MB", "memory, MB"):
        print(f"| {what} | " + " | ".join(f"{process.start[what]:.1f}" for process in processes.values()) + " | |")
    for what in asked:
        theirs = rates[what, "llama.cpp"]
        ratios = []
        for mode in modes:
            each = [ours / other for ours, other in zip(rates[what, mode], theirs, strict=True)]
            ratios.append(f"{mode} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        medians = " | ".join(f"{statistics.median(rates[what, name]):.1f}" for name in processes)
        print(f"| {what}, tok/s | {medians} | {', '.join(ratios)} |", flush=True)
    for process in processes.values():
        process.close()


def main() -> None:
    """Reads the arguments and measures each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=("exact", "int8"), default=["exact", "int8"])
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each engine; 1 counts CPU time, so that a busy machine may do")
    parser.add_argument("--worker", choices=("ours", "llama"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.files[0], options.modes[0], options.batch, options.threads)
        return
    from tests.benchmarks.compare.peers import peer_python  # a worker's environment need not have what it imports

    for path in options.files:
        measure(
            path,
            options.modes,
            options.batch,
            options.rounds,
            llama_python=peer_python(),
            threads=options.threads,
        )


if __name__ == "__main__":
    main()
