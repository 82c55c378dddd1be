"""Reach: which test reaches which line of the product, learned test file by test file and kept on disk.

Each test file runs once under coverage, over a copy of the source, in a process that begins with torch imported. What
it reached is a record of its own, so a map that is cut short goes on where it stopped, and only what changed since is
made again. Tests that take the product as one (benchmarks, soaks, examples) are left out: they are slow and few.
"""

import hashlib
import json
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from coverage import CoverageData

from tests.mutations.__main__ import ROOT, copy_source
from tests.mutations.run import run_tests

PRODUCT = ("actors", "nif", "proto", "clients")
KEPT = ROOT / ".mutations"  # ignored by git
# A folder's simulation comes last: it is slow and reaches what the tests before it reach.
MAPPED = ("proto", "actors", "clients", "nif", "simulation")
# Seconds of one test file under coverage; one that takes longer is left out.
TIMEOUT_S = 900.0
# Seconds of the tests chosen for a line, as they took under coverage: of its mirrored folder, and of all others; more
# for what has survived once.
MOST_SECONDS, MOST_SECONDS_AGAIN = 12.0, 60.0
# What it costs to load one more test file.
FILE_SECONDS = 0.5


def make_map(ends_at: float, say: Callable[[str], None] = print) -> bool:
    """Runs every test file whose record is stale or missing; False if `ends_at` (time.monotonic) came first."""
    stale = [file for file in _test_files() if not _is_fresh(file)]
    if not stale:
        return True
    with tempfile.TemporaryDirectory(prefix="reach-") as directory:
        copy = copy_source(Path(directory) / "copy")
        for index, file in enumerate(stale):
            if time.monotonic() > ends_at:
                say(f"{len(stale) - index} test files are not mapped yet")
                return False
            started = time.monotonic()
            record = _learn(copy, file)
            path = _record_path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))
            say(f"mapped {file}: {len(record['seconds'])} tests, {time.monotonic() - started:.0f} s")
    return True


def _test_files() -> list[str]:
    """Below tests/, in the order of MAPPED."""
    tests = ROOT / "tests"
    return [
        path.relative_to(tests).as_posix()
        for folder in MAPPED
        for path in sorted((tests / folder).rglob("test_*.py"), key=lambda path: (len(path.parts), path))
    ]


def _record_path(file: str) -> Path:
    return KEPT / "reach" / f"{file}.json"


def _is_fresh(file: str) -> bool:
    """Whether neither the test file nor anything that it reached has changed since its record was made."""
    path = _record_path(file)
    if not path.exists():
        return False
    return all(_digest(ROOT / name) == digest for name, digest in json.loads(path.read_text())["digests"].items())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def _learn(copy: Path, file: str) -> dict[str, object]:
    """Runs one test file of the copy: how long its green tests took, and who reached which line."""
    settings, data_file, times = copy / "coveragerc", copy / "coverage", copy / "times.xml"
    packages = "".join(f"    genbatch.{name}\n" for name in PRODUCT)
    settings.write_text(f"[run]\ndata_file = {data_file}\nsource_pkgs =\n{packages}")
    for old in (data_file, times):
        old.unlink(missing_ok=True)
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", f"--junitxml={times}"]
    run_tests(copy, [file], stop_at_first=False, timeout_s=TIMEOUT_S, options=options)
    seconds: dict[str, float] = {}
    not_green = set()
    for case in ElementTree.parse(times).iter("testcase") if times.exists() else ():
        name = f"{file}::{str(case.get('name')).partition('[')[0]}"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
        if any(case.find(outcome) is not None for outcome in ("failure", "error")):
            not_green.add(name)
    seconds = {name: taken for name, taken in seconds.items() if name not in not_green}
    names = list(seconds)
    numbers = {name: number for number, name in enumerate(names)}
    lines: dict[str, dict[int, list[int]]] = {}
    if data_file.exists():
        data = CoverageData(str(data_file))
        data.read()
        for measured in data.measured_files():
            path = Path(measured).resolve()
            if path.is_relative_to(copy.resolve()):
                of_line = {
                    line: sorted(numbers[name] for name in _names(contexts) if name in numbers)
                    for line, contexts in data.contexts_by_lineno(measured).items()
                }
                lines[path.relative_to(copy.resolve()).as_posix()] = {line: who for line, who in of_line.items() if who}
    lines = {name: of_line for name, of_line in lines.items() if of_line}
    digests = {name: _digest(ROOT / name) for name in [f"tests/{file}", *lines]}
    return {"digests": digests, "seconds": {name: round(seconds[name], 2) for name in names}, "lines": lines}


def _names(contexts: Iterable[str]) -> set[str]:
    """Tests below tests/, from coverage's `tests/a/test_b.py::test_c[1]|run`."""
    names = {context.partition("|")[0] for context in contexts}
    return {name.removeprefix("tests/").partition("[")[0] for name in names if "::" in name}


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tests reach which line, and how long each takes."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, file: str, first: int, last: int, most_seconds: float) -> list[str]:
        """The tests to try a change of these lines with: those of the mirrored folder first, the quickest first."""
        of_line = self.lines.get(file, {})
        tests = {test for line in range(first, last + 1) for test in of_line.get(line, ())}
        # A rank, a child or a kernel that is interpreted runs where nobody measures: then its mirrored tests.
        tests = tests or {test for test in self.seconds if self._is_named_after(test, file)}
        # What runs once, when its module is imported, belongs to no test: then any of the file's.
        tests = tests or {test for who in of_line.values() for test in who}
        near = {test for test in tests if self._is_mirrored(test, file)}
        return [*self._quickest(near, most_seconds), *self._quickest(tests - near, most_seconds)]

    def _quickest(self, tests: set[str], most_seconds: float) -> list[str]:
        chosen: list[str] = []
        files: set[str] = set()
        seconds = 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            file = test.partition("::")[0]
            seconds += self.seconds[test] + (0 if file in files else FILE_SECONDS)
            if seconds > most_seconds and chosen:
                break
            files.add(file)
            chosen.append(test)
        # A file's tests in a row share what their module sets up.
        return sorted(chosen, key=lambda test: list(files).index(test.partition("::")[0]))

    @staticmethod
    def _is_mirrored(test: str, file: str) -> bool:
        return PurePath(test.partition("::")[0]).parent == PurePath(file).parent

    @classmethod
    def _is_named_after(cls, test: str, file: str) -> bool:
        """As `test_kernel_sample.py` is after `sample.py`."""
        return cls._is_mirrored(test, file) and PurePath(test.partition("::")[0]).stem.endswith(PurePath(file).stem)


def load_reach() -> Reach:
    """Reads the records of the test files that are there, fresh or not."""
    reach = Reach()
    for file in _test_files():
        path = _record_path(file)
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        reach.seconds.update(record["seconds"])
        names = list(record["seconds"])
        for name, of_line in record["lines"].items():
            kept = reach.lines.setdefault(name, {})
            for line, numbers in of_line.items():
                kept.setdefault(int(line), set()).update(names[number] for number in numbers)
    return reach
