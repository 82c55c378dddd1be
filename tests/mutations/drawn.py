"""Mutations drawn by seed over the whole product, each tried against the tests that reach the changed line.

    python -m tests.mutations.drawn --map                     # once: which test reaches which line
    python -m tests.mutations.drawn --count 300 --seed 7      # the share that survives, by folder, and the survivors

A survivor is a change of the code that no test notices: a promise without a test, or a change that means nothing. The
hand-written guards (`python -m tests.mutations`) must all be noticed; of these most must.
"""

import argparse
import ast
import json
import queue
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath

from coverage import CoverageData

from tests.mutations.__main__ import ROOT, copy_source
from tests.mutations.run import FAILED, PASSED, prepare, run_tests

PRODUCT = ("actors", "nif", "proto", "clients")
MAP = ROOT / ".mutations"  # ignored by git: the coverage data and how long each test takes
# Tests of one mutation: the quickest that reach its line, so many seconds of them without the mutation.
MOST_SECONDS = 30.0
TIMEOUT_S = 150.0

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One span of a file and what is put in its place.

    Args:
        file: below the repository's root.
        line: where it begins, from 1; `last` where the statement around it ends.
        start, end: the span, in characters of the file's text.
    """

    file: str
    line: int
    last: int
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        """The file's text with the change."""
        return text[: self.start] + self.new + text[self.end :]

    def describe(self, text: str) -> str:
        """The changed line before and after."""
        before = text.splitlines()[self.line - 1].strip()
        after = self.apply(text).splitlines()[self.line - 1].strip()
        return f"{self.file}:{self.line}: {before}  ->  {after}"


class _Draws(ast.NodeVisitor):
    """Finds everything in a module that can be changed so that it still parses."""

    def __init__(self, file: str, text: str) -> None:
        self.changes: list[Change] = []
        self._file, self._text = file, text
        lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines
        self._statement: ast.stmt | None = None

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node
            super().generic_visit(node)
            self._statement = outer
        else:
            super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._statement = node
        for default in (*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # not what it is made from: frozen or not, nobody writes to it
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._statement = node
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left alone: they watch over our own mistakes."""

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._statement = node
        self._replace(node.test, f"not ({self._source(node.test)})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not self._source(call).startswith(("log.", "logging.", "super().")):
            self._statement = node
            self._replace(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._statement = node
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._statement = node
        self._replace(node, "pass")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operands = self._source(node.left), self._source(node.comparators[0])
            self._replace(node, f"({operands[0]} {COMPARISONS[type(node.ops[0])]} {operands[1]})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._replace(node, "(" + word.join(f"({self._source(value)})" for value in node.values) + ")")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({self._source(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        texts = any(isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in ast.walk(node))
        if other is not None and not texts:
            self._replace(node, f"(({self._source(node.left)}) {other} ({self._source(node.right)}))")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Left alone: words."""

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._text, node) or ""

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        if self._statement is None or node.end_lineno is None or node.end_col_offset is None:
            return
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno, node.end_col_offset)
        self.changes.append(Change(self._file, node.lineno, node.end_lineno, start, end, new))

    def _offset(self, line: int, column: int) -> int:
        """From ast's line and column of UTF-8 bytes to characters of the text."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def changes_of(file: str, text: str) -> list[Change]:
    """Every change that can be drawn from a file; each still parses."""
    draws = _Draws(file, text)
    draws.visit(ast.parse(text))
    return [change for change in draws.changes if _parses(change.apply(text))]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def draw(count: int, seed: int, folders: list[str]) -> list[Change]:
    """Changes over the product, each file as likely as it has places to change."""
    files = sorted(
        path.relative_to(ROOT).as_posix() for folder in (folders or PRODUCT) for path in (ROOT / folder).rglob("*.py")
    )
    every = [change for file in files for change in changes_of(file, (ROOT / file).read_text())]
    return random.Random(seed).sample(every, min(count, len(every)))


# Which tests reach a line


def make_map() -> int:
    """Runs the suite under coverage, a context a test."""
    MAP.mkdir(exist_ok=True)
    settings = MAP / "coveragerc"
    packages = "".join(f"    genbatch.{name}\n" for name in PRODUCT)
    settings.write_text(f"[run]\ndata_file = {MAP / 'coverage'}\nsource_pkgs =\n{packages}")
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    options.append(f"--junitxml={MAP / 'times.xml'}")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=ROOT, check=False)
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(MAP / "times.xml").iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/').removeprefix('tests/')}.py::{case.get('name')}"
        seconds[name] = float(case.get("time", 0))
    (MAP / "times.json").write_text(json.dumps(seconds))
    return done.returncode


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tests reach which line, and how long each takes."""

    data: CoverageData
    files: dict[str, str]  # below the root: as the data names it
    seconds: dict[str, float]

    def tests(self, change: Change) -> list[str]:
        """The quickest tests that reach a change, MOST_SECONDS of them."""
        measured = self.files.get(change.file)
        contexts = self.data.contexts_by_lineno(measured) if measured is not None else {}
        lines = range(change.line, change.last + 1)
        tests = _tests(context for line in lines for context in contexts.get(line, ()))
        # A rank, a worker or a kernel that is interpreted runs where nobody measures: then its mirrored tests.
        tests = tests or self._mirrored(change.file)
        # What runs once, when its module is imported, belongs to no test: then any of the file's.
        tests = tests or _tests(context for of_line in contexts.values() for context in of_line)
        chosen, seconds = [], 0.0
        for test in sorted(tests, key=self._seconds):
            seconds += self._seconds(test)
            if seconds > MOST_SECONDS and chosen:
                break
            chosen.append(test)
        return chosen

    def _mirrored(self, file: str) -> set[str]:
        """The tests in the folder that mirrors a file's and named after it, as `test_kernel_sample.py` is."""
        path = PurePath(file)
        return {
            test
            for test in self.seconds
            if PurePath(test.partition("::")[0]).parent == path.parent
            and PurePath(test.partition("::")[0]).stem.endswith(path.stem)
        }

    def _seconds(self, test: str) -> float:
        return self.seconds.get(test, 5.0)


def _tests(contexts: Iterable[str]) -> set[str]:
    names = {context.partition("|")[0] for context in contexts}
    return {name.removeprefix("tests/").partition("[")[0] for name in names if "::" in name}


def load_reach() -> Reach:
    """Reads what `--map` wrote."""
    data = CoverageData(str(MAP / "coverage"))
    data.read()
    files = {}
    for measured in data.measured_files():
        path = Path(measured).resolve()
        if path.is_relative_to(ROOT):
            files[path.relative_to(ROOT).as_posix()] = measured
    times: Counter[str] = Counter()
    for name, taken in json.loads((MAP / "times.json").read_text()).items():
        times[name.partition("[")[0]] += taken
    return Reach(data, files, dict(times))


# Trying them


@dataclass(frozen=True, slots=True)
class Tried:
    """How a change went: what noticed it, or "" if nothing did."""

    change: Change
    killer: str
    num_tests: int


def try_all(changes: list[Change], reach: Reach, jobs: int) -> Iterator[Tried]:
    """Tries each change in a copy of the source."""
    chosen = [(change, reach.tests(change)) for change in changes]
    with tempfile.TemporaryDirectory(prefix="drawn-") as directory, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(jobs):
            copies.put(copy_source(Path(directory) / str(index)))
        yield from pool.map(lambda pair: _try(copies, *pair), chosen)


def _try(copies: "queue.SimpleQueue[Path]", change: Change, tests: list[str]) -> Tried:
    if not tests:
        return Tried(change, "", 0)
    copy = copies.get()
    path = copy / change.file
    text = path.read_text()
    try:
        path.write_text(change.apply(text))
        run = run_tests(copy, tests, stop_at_first=True, timeout_s=TIMEOUT_S)
    finally:
        path.write_text(text)
        copies.put(copy)
    if run.exit_code is None:
        return Tried(change, "does not end", len(tests))
    if run.exit_code == PASSED:
        return Tried(change, "", len(tests))
    return Tried(change, run.red[0] if run.exit_code == FAILED and run.red else f"exit {run.exit_code}", len(tests))


def _folder(file: str) -> str:
    return "/".join(Path(file).parts[:2]) if "/" in file.partition("/")[2] else Path(file).parts[0]


def report(tried: list[Tried]) -> str:
    """The share that survives by folder, and every survivor."""
    drawn, survived, unreached = Counter[str](), Counter[str](), Counter[str]()
    for one in tried:
        folder = _folder(one.change.file)
        drawn[folder] += 1
        survived[folder] += not one.killer
        unreached[folder] += not one.num_tests
    lines = ["| folder | drawn | survived | of those reached by no test |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {drawn[name]} | {survived[name]} | {unreached[name]} |" for name in sorted(drawn)]
    total = sum(survived.values())
    lines.append(f"| all | {len(tried)} | {total} ({total / max(1, len(tried)):.0%}) | {sum(unreached.values())} |")
    lines.append("")
    for one in tried:
        if not one.killer:
            lines.append(f"- {one.change.describe((ROOT / one.change.file).read_text())} ({one.num_tests} tests)")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 1 if more than --most of the changes survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", action="store_true", help="run the suite once to learn which test reaches which line")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", action="append", default=[], help="only below this folder; repeatable")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=float, default=0.1, help="share that may survive")
    parser.add_argument("--report", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    if chosen.map:
        return make_map()
    prepare()
    reach = load_reach()
    changes = draw(chosen.count, chosen.seed, chosen.folder)
    tried: list[Tried] = []
    for one in try_all(changes, reach, chosen.jobs):
        tried.append(one)
        text = (ROOT / one.change.file).read_text()
        print(f"{'killed  ' if one.killer else 'SURVIVED'} {one.change.describe(text)}  [{one.killer}]", flush=True)
    table = report(tried)
    print("\n" + table)
    if chosen.report is not None:
        chosen.report.write_text(table)
    return 1 if sum(not one.killer for one in tried) > chosen.most * len(tried) else 0


if __name__ == "__main__":
    sys.exit(main())
