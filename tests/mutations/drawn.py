"""Mutations drawn by seed over the whole product, each tried against the tests that reach the changed line.

    python -m tests.mutations.drawn --count 300 --seed 7                # the share that survives, and the survivors
    python -m tests.mutations.drawn --count 300 --seed 7 --minutes 10   # goes on where the last call stopped
    python -m tests.mutations.drawn --count 300 --seed 7 --again        # the survivors once more, with more tests

First it learns which test reaches which line (`reach.py`). Both that and how each change went are kept below
`.mutations`. A survivor is a change of the code that no test notices: a promise without a test, or a change that means
nothing. The hand-written guards (`python -m tests.mutations`) must all be noticed; of these most must.
"""

import argparse
import ast
import json
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tests.mutations.__main__ import ROOT, copy_source
from tests.mutations.reach import KEPT, MOST_SECONDS, MOST_SECONDS_AGAIN, PRODUCT, Reach, load_reach, make_map
from tests.mutations.run import FAILED, PASSED, prepare, run_tests

# A change that makes tests take so much longer than they took under coverage has been noticed.
MOST_TIMES, SPARE_SECONDS = 3.0, 45.0
UNFINISHED = 3  # exit code

# What only a GPU runs: the branch taken where there is one, and a function that cannot do without.
ASKS_FOR_GPU = re.compile(r"\"cuda\"|cuda\.is_available|\bon_gpu|_on_gpu\b")
NEEDS_GPU = re.compile(r"torch\.cuda\.(?!is_available|device_count)")
# Arguments that Triton's interpreter and a CPU's memory do without.
GPU_ARGUMENTS = ("num_warps", "num_stages", "pin_memory", "non_blocking")

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
        if any(self._needs_gpu(one) for one in node.body):
            return
        self._statement = node
        for default in (*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in GPU_ARGUMENTS:
            self.generic_visit(node)

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
        self.visit(node.test)
        for one in self._without_gpu(node.test, node.body, node.orelse):
            self.visit(one)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        for one in self._without_gpu(node.test, [node.body], [node.orelse]):
            self.visit(one)

    def _needs_gpu(self, node: ast.AST) -> bool:
        """Whether running it calls CUDA, whatever is asked before."""
        if isinstance(node, ast.If | ast.IfExp | ast.BoolOp | ast.Lambda | ast.FunctionDef):
            return False
        if isinstance(node, ast.Call) and NEEDS_GPU.match(self._source(node.func)):
            return True
        return any(self._needs_gpu(child) for child in ast.iter_child_nodes(node))

    def _without_gpu(self, test: ast.expr, body: list[Any], orelse: list[Any]) -> list[Any]:
        """The branches that run where there is no GPU."""
        source = self._source(test)
        if ASKS_FOR_GPU.search(source) is None or " or " in source:
            return [*body, *orelse]
        return body if source.startswith("not ") or " != " in source else orelse

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
        if not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None or node.end_col_offset is None:
            return ""
        return self._text[
            self._offset(node.lineno, node.col_offset) : self._offset(node.end_lineno, node.end_col_offset)
        ]

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
    """Every change that can be drawn from a file; a few do not parse."""
    draws = _Draws(file, text)
    draws.visit(ast.parse(text))
    return draws.changes


def parses(change: Change, text: str) -> bool:
    """Whether the file is still Python with the change."""
    try:
        ast.parse(change.apply(text))
    except SyntaxError:
        return False
    return True


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def draw(count: int, seed: int, folders: list[str]) -> list[Change]:
    """Changes over the product, each place as likely as any other; fewer are the first of more."""
    files = sorted(
        path.relative_to(ROOT).as_posix() for folder in (folders or PRODUCT) for path in (ROOT / folder).rglob("*.py")
    )
    texts = {file: (ROOT / file).read_text() for file in files}
    every = [change for file, text in texts.items() for change in changes_of(file, text)]
    random.Random(seed).shuffle(every)
    return list(islice((change for change in every if parses(change, texts[change.file])), count))


# Trying them


@dataclass(frozen=True, slots=True)
class Tried:
    """How a change went: what noticed it, or "" if nothing did."""

    change: Change
    killer: str
    num_tests: int


class Record:
    """How each change of a seed went, a line each, on disk.

    Args:
        path: written to after each change. What it says of a text that has changed since is not believed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tried: dict[tuple[str, str], Tried] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            kept = json.loads(line)
            tried = Tried(Change(**kept["change"]), kept["killer"], kept["num_tests"])
            self._tried[kept["was"], tried.change.new] = tried

    def find(self, change: Change) -> Tried | None:
        """How the change went, if it was tried on this text."""
        return self._tried.get((self._was(change), change.new))

    def add(self, tried: Tried) -> None:
        """Keeps it."""
        was = self._was(tried.change)
        self._tried[was, tried.change.new] = tried
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"was": was, **asdict(tried)}) + "\n")

    @staticmethod
    def _was(change: Change) -> str:
        """The file and its text around the change, which tells it apart wherever the lines have moved to."""
        text = (ROOT / change.file).read_text()
        return f"{change.file}: {text[max(0, change.start - 200) : change.end + 100]}"


def try_change(copy: Path, change: Change, tests: list[str], reach: Reach) -> Tried:
    """Tries a change in a copy of the source."""
    if not tests:
        return Tried(change, "", 0)
    limit = SPARE_SECONDS + MOST_TIMES * sum(reach.seconds[test] for test in tests)
    path = copy / change.file
    text = path.read_text()
    try:
        path.write_text(change.apply(text))
        run = run_tests(copy, tests, stop_at_first=True, timeout_s=limit)
    finally:
        path.write_text(text)
    if run.exit_code == PASSED:
        return Tried(change, "", len(tests))
    if run.exit_code is not None:
        return Tried(change, run.red[0] if run.exit_code == FAILED and run.red else f"exit {run.exit_code}", len(tests))
    # Was it the change, or is the machine so slow just now?
    without = run_tests(copy, tests, stop_at_first=True, timeout_s=limit / 2)
    return Tried(change, "does not end" if without.exit_code == PASSED else "", len(tests))


def try_all(changes: list[Change], record: Record, again: bool, ends_at: float) -> bool:
    """Tries what the record does not know; `again`: and what survived. False if `ends_at` came first."""
    known = {change: record.find(change) for change in changes}
    wanted = [change for change, tried in known.items() if tried is None or (again and not tried.killer)]
    reach, most_seconds = load_reach(), MOST_SECONDS_AGAIN if again else MOST_SECONDS
    with tempfile.TemporaryDirectory(prefix="drawn-") as directory:
        copy = copy_source(Path(directory) / "copy")
        for change in wanted:
            if time.monotonic() > ends_at:
                return False
            tried = try_change(copy, change, reach.tests(change.file, change.line, change.last, most_seconds), reach)
            record.add(tried)
            print(f"{'killed  ' if tried.killer else 'SURVIVED'} {_words(change)}  [{tried.killer}]", flush=True)
    return True


def _words(change: Change) -> str:
    return change.describe((ROOT / change.file).read_text())


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
            lines.append(f"- {_words(one.change)} ({one.num_tests} tests)")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 1 if more than --most of the changes survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", action="append", default=[], help="only below this folder; repeatable")
    parser.add_argument("--most", type=float, default=0.1, help="share that may survive")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the next call goes on")
    parser.add_argument("--again", action="store_true", help="try the survivors once more, with more tests")
    parser.add_argument("--report", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    ends_at = time.monotonic() + 60 * chosen.minutes
    prepare()
    if not make_map(ends_at):
        return UNFINISHED
    changes = draw(chosen.count, chosen.seed, chosen.folder)
    record = Record(KEPT / f"tried-{chosen.seed}.jsonl")
    is_finished = try_all(changes, record, chosen.again, ends_at)
    tried = [one for one in map(record.find, changes) if one is not None]
    table = report(tried)
    print("\n" + table)
    if chosen.report is not None:
        chosen.report.write_text(table)
    if not is_finished:
        return UNFINISHED
    return 1 if sum(not one.killer for one in tried) > chosen.most * len(tried) else 0


if __name__ == "__main__":
    sys.exit(main())
