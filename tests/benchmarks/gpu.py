"""Tries and measures the GPU path in parts, each shorter than ten minutes, with whatever Python has torch and Triton.

    python tests/benchmarks/gpu.py --results DIR --wheels DIR       # every part, one after another
    python tests/benchmarks/gpu.py --parts decode-8b --results DIR  # one part; a second call goes on
    python tests/benchmarks/gpu.py --dry-run --results DIR          # a tiny model, under Triton's interpreter

    tests        every kernel test and every test marked gpu
    decode-8b    bandwidth; decode of an 8B shape at 64, 1, 16 and 256 rows, and packed; then transformers and
                 attention alone, ours and libraries'
    decode-0.6b  the same for 0.6B, time to the first token, a mixed load; then transformers and attention alone
    service      `genbatch bench` over a service of the 0.6B shape
    races        steps held up by torch.cuda._sleep; compute-sanitizer over the kernels, where it is installed
    unmeasured   what no GPU has run yet, of all the parts above; only where it is named. `make gpu-next` runs it

This process imports neither torch nor genbatch. It starts a child for each group of cases, and the child appends what
it finds to DIR/PART.jsonl at once. A child that hangs or dies costs one case: the failure is recorded, and a new child
goes on with the next case. A case that DIR/PART.jsonl has already is not run again. DIR/PART.md shows the same as a
table.

`--wheels` names a folder with wheels (`make gpu-wheels` fills it). A wheel is unpacked only if its package is missing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = ("tests", "decode-8b", "decode-0.6b", "service", "races")
UNMEASURED = "unmeasured"
LEAST = {"torch": (2, 11), "triton": (3, 6)}
_POLL_S = 0.1


@dataclass(frozen=True)
class Group:
    """Cases that one child process runs one after another.

    Args:
        name: for the record, if the child fails outside of a case.
        command: of the child.
        case_s: time limit of a case; also of the time before the first one and between two.
    """

    name: str
    command: Sequence[str]
    case_s: float = 150.0


@dataclass
class Record:
    """What a part has found so far: the lines of its file."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        """Returns the events that were appended since the last call."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        new, self.events = whole[len(self.events) :], whole
        return new

    def add(self, event: str, case: str, **fields: Any) -> None:
        """Appends an event of the parent's own."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "case": case, **fields}) + "\n")

    def finished(self) -> list[str]:
        """Names the cases that ended, however they ended."""
        return [event["case"] for event in self.events if event["event"] in ("end", "failed")]

    def failures(self) -> int:
        """Counts the cases that failed."""
        return sum(event["event"] == "failed" for event in self.events)

    def table(self) -> str:
        """Returns the figures and the failures as a Markdown table."""
        rows = [("case", "figure", "note")]
        for event in self.events:
            if event["event"] in ("figure", "failed"):
                figure = "FAILED" if event["event"] == "failed" else event["figure"]
                note = str(event.get("note", "")).strip().splitlines() or [""]
                rows.append((event["case"], figure, note[-1][:160].replace("|", "/")))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(lines) + "\n"


def unpack_missing(wheels: Path, target: Path) -> list[str]:
    """Unpacks the wheels whose packages this Python lacks; returns the names of those packages."""
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            distribution(name)
        except PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            unpacked.append(name)
    return unpacked


def describe_checkout(target: Path) -> None:
    """Gives the checkout a version that importlib.metadata finds: it is not installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = target / f"{project['name']}-{project['version']}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (described / "METADATA").write_text(header)


def check_versions() -> None:
    """Ends the program if torch or Triton is missing or too old."""
    for package, least in LEAST.items():
        wanted = ".".join(map(str, least))
        try:
            version = distribution(package).version
        except PackageNotFoundError:
            sys.exit(f"{package} is missing; {package} >= {wanted} is needed")
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if numbers < least:
            sys.exit(f"{package} {version} is too old; {package} >= {wanted} is needed")


def run_group(group: Group, record: Record, environment: dict[str, str], end: float) -> bool:
    """Runs a group's cases, with a new child after each failure; returns whether all of them were tried.

    Args:
        end: by time.monotonic(), when the part's time is over.
    """
    while time.monotonic() < end:
        record.read()
        finished = len(record.finished())
        variables = {**environment, "GPU_EVENTS": str(record.path), "GPU_DONE": json.dumps(record.finished())}
        status, running, output = _watch(group, record, variables, end)
        if running is not None:
            why = f"exit status {status}" if status is not None else "the time limit was over"
            record.add("failed", running, note=f"{output[-1500:]}\n{why}")
        elif status == 0:
            return True
        elif len(record.finished()) == finished:  # it failed before its first case: so would the next child
            why = f"exit status {status}" if status is not None else "the time limit was over"
            record.add("failed", group.name, note=f"{output[-1500:]}\n{why}")
            record.read()
            return True
        record.read()
    return False


def _watch(group: Group, record: Record, environment: dict[str, str], end: float) -> tuple[int | None, str | None, str]:
    """Runs one child to its end or its limit; returns its exit status, the case it was in, and its last output."""
    log = record.path.with_suffix(".log")
    running: str | None = None
    with log.open("ab") as out:
        begun = out.tell()
        child = subprocess.Popen(
            group.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        limit = time.monotonic() + group.case_s
        try:
            while True:
                status = child.poll()
                for event in record.read():
                    if event["event"] == "begin":
                        running = event["case"]
                    elif event["event"] in ("end", "failed"):
                        running = None
                    limit = time.monotonic() + group.case_s
                    _show(event)
                if status is not None or time.monotonic() > min(limit, end):
                    break
                time.sleep(_POLL_S)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    with log.open("rb") as written:
        written.seek(begun)
        return status, running, written.read().decode(errors="replace")


def _show(event: dict[str, Any]) -> None:
    if event["event"] == "figure":
        print(f"  {event['case']}: {event['figure']} {event.get('note', '')}", flush=True)
    elif event["event"] == "failed":
        print(f"  {event['case']}: FAILED\n{event.get('note', '')}", flush=True)


def groups_of(part: str, results: Path, *, dry_run: bool) -> list[Group]:
    """Returns what a part runs, in order."""
    here = Path(__file__).parent

    def measured(name: str, case_s: float = 150.0, only: Sequence[str] = ()) -> Group:
        chosen = ["--only", *only] if only else []
        return Group(name, [sys.executable, str(here / "gpu_cases.py"), name, str(results), *chosen], case_s)

    def tested(name: str, *chosen: str, prefix: Sequence[str] = (), case_s: float = 120.0) -> Group:
        options = ["-q", "-p", "gpu_outcomes", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        if dry_run:  # Triton 3.6's interpreter does what a newer numpy warns about
            options += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
        return Group(name, [*prefix, sys.executable, "-m", "pytest", *options, *chosen], case_s)

    if part == "tests":
        if dry_run:
            few = ["-k", "next_tokens or copies or h15_a_launch"]
            chosen = ["tests/nif/kernels/test_kernel_elementwise.py", "tests/nif/test_gpu.py", *few]
            return [tested("dry tests", *chosen)]
        kernels = sorted(path.name for path in (ROOT / "tests/nif/kernels").glob("test_kernel_*.py"))
        return [tested(name, f"tests/nif/kernels/{name}") for name in kernels] + [
            tested("test_gpu.py", "tests/nif/test_gpu.py")
        ]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")

    def checked(tool: str, case_s: float = 240.0) -> list[Group]:
        few = ["tests/nif/kernels/test_kernel_paged_attention.py", "-k", "padding_row or every_head_size or one_long"]
        prefix = ["env", f"GPU_TOOL={tool}"]  # the same tests are other cases under another tool
        if sanitizer is not None:
            # The child reports the tool's errors by its exit status: they end no test.
            prefix += [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        elif not dry_run:
            return []
        return [tested(tool, *few, prefix=prefix, case_s=case_s)]

    if part == UNMEASURED:
        rows, most = (2, 2) if dry_run else (64, 256)

        def attention(shape: str) -> list[str]:
            return [f"attention of {shape}, B={count}" for count in ((1, 2) if dry_run else (1, 16, 64, 256))]

        formats = ("int4", "int8", "float8 cache", "int4 and float8 cache")
        return [
            tested("packed weights and FP8 caches", "tests/nif/test_gpu.py", "tests/nif/kernels",
                   "-k", "packed_weights or fp8"),
            measured("decode-8b", case_s=240.0, only=[f"decode {kind} B={count}" for kind in formats
                                                      for count in (rows, most)]),
            measured("service", 400.0),
            measured("decode-0.6b-peers", only=attention("qwen3-0.6b")),
            measured("decode-8b-peers", only=attention("llama-3.1-8b")),
            measured("decode-0.6b-peers", only=["generate, B=1", f"generate, B={rows}", "W1 generate_batch"]),
        ]  # fmt: skip
    if part == "races":
        held_up = tested("steps held up", "tests/nif/test_gpu.py", "-k", "held_up")
        return [held_up, *checked("memcheck"), *checked("racecheck")]
    return [measured(part), measured(f"{part}-peers")] if part.startswith("decode") else [measured(part, 400.0)]


def environment_of(part: str, extra: Path, *, dry_run: bool) -> dict[str, str]:
    """Returns the children's environment: the checkout and what was unpacked can be imported."""
    paths = [str(ROOT / ".ns"), str(ROOT), str(Path(__file__).parent), str(extra)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # what is found there counts as installed
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    if part == "races":
        # The allocator keeps memory that was freed: without this, memcheck sees no access beyond a tensor's end.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if dry_run:
        environment |= {"GPU_DRY_RUN": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, UNMEASURED), default=list(PARTS))
    parser.add_argument("--results", type=Path, default=ROOT / "tests/benchmarks/results/gpu", metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of packages that may be missing")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of a part")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, under Triton's interpreter")
    chosen = parser.parse_args()
    check_versions()
    results: Path = chosen.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    unpacked = results / "unpacked"
    describe_checkout(unpacked)
    if chosen.wheels is not None:
        print("unpacked:", " ".join(unpack_missing(chosen.wheels, unpacked)) or "nothing, all packages are there")
    failures = 0
    for part in chosen.parts:
        print(f"{part}:", flush=True)
        end = time.monotonic() + 60 * chosen.minutes
        record = Record(results / f"{part}.jsonl")
        record.read()
        before = record.failures()
        environment = environment_of(part, unpacked, dry_run=chosen.dry_run)
        for group in groups_of(part, results, dry_run=chosen.dry_run):
            if not run_group(group, record, environment, end):
                record.add("figure", group.name, figure="not finished", note=f"{chosen.minutes:g} minutes were over")
            record.read()
            record.path.with_suffix(".md").write_text(record.table())
        failures += record.failures() - before
        print(record.table(), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
