"""Mutation: a guard taken out of the source, and the tests that must turn red without it.

The product marks a guard's statement with a comment of its own line, so that the guard is found wherever it moves:

    # guard: poison
    if forgiven_at is not None:

A change works on the syntax tree of the marked statement. It knows the statement's shape and not its text.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

LAYERS = ("actors", "nif", "proto", "clients")
MARKER = re.compile(r"[ \t]*(?:#|//|/\*) guard: (.+?)(?: \*/)?")
# A change gets the source below the marker and the marked node, if the file is Python, and returns the new text.
Change = Callable[["Marked"], str]
Node = TypeVar("Node", bound=ast.AST)


class DoesNotApply(Exception):
    """The guard's marker is not in the source exactly once, or the marked statement has another shape."""


@dataclass(frozen=True, slots=True)
class Marked:
    """The statement below a marker.

    Args:
        text: of the whole file.
        line: number of the statement's first line, from 1.
        node: the largest node of the syntax tree that begins on that line; None in C.
    """

    text: str
    line: int
    node: ast.AST | None

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where the node begins and ends in the text."""
        lines = self.text.splitlines(keepends=True)
        starts = [sum(len(line) for line in lines[: row - 1]) for row in (node.lineno, node.end_lineno)]  # type: ignore[attr-defined]
        columns = (
            len(lines[row - 1].encode()[:column].decode())
            for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        )
        start, end = (start + column for start, column in zip(starts, columns, strict=True))
        return start, end

    def source(self, node: ast.AST) -> str:
        """The node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def replaced(self, node: ast.AST, new: str) -> str:
        """The file's text with another text for the node."""
        start, end = self.span(node)
        return self.text[:start] + new + self.text[end:]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One guard.

    Args:
        name: of the guard; the product has it in a marker.
        change: what takes the guard out.
        tests: below tests/, as pytest names them; one that turns red is enough.
        why: what goes wrong without it.
    """

    name: str
    change: Change
    tests: tuple[str, ...]
    why: str

    def file(self, root: Path) -> str:
        """The file with the marker, below `root`."""
        places = markers(root).get(self.name, [])
        if len(places) != 1:
            raise DoesNotApply(f"the source has the marker 'guard: {self.name}' {len(places)} times, not once")
        return places[0]

    def apply(self, root: Path) -> tuple[Path, str]:
        """Takes the guard out of the copy at `root`; returns the changed file and its text as it was.

        Raises:
            DoesNotApply: the marker is missing, or its statement has another shape.
        """
        path = root / self.file(root)
        text = path.read_text()
        try:
            changed = self.change(_marked(text, self.name, path.suffix == ".py"))
        except DoesNotApply as fault:
            raise DoesNotApply(f"{self.name}: {path}: {fault}") from None
        path.write_text(changed)
        return path, text


@lru_cache(maxsize=8)
def markers(root: Path) -> dict[str, list[str]]:
    """Guard -> the files that mark it. A copy is read once: a mutation leaves the markers where they are."""
    places: dict[str, list[str]] = {}
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                for line in path.read_text().splitlines():
                    if marker := MARKER.fullmatch(line):
                        places.setdefault(marker[1], []).append(str(path.relative_to(root)))
    return places


def never(marked: Marked) -> str:
    """The condition is evaluated and never holds."""
    test = _test(marked)
    return marked.replaced(test, f"({marked.source(test)}) and False")


def always(marked: Marked) -> str:
    """The condition is evaluated and always holds."""
    test = _test(marked)
    return marked.replaced(test, f"({marked.source(test)}) or True")


def replaced_by(new: str) -> Change:
    """Another statement, or another expression, stands where the marked one stood."""

    def change(marked: Marked) -> str:
        assert marked.node is not None
        return marked.replaced(marked.node, new)

    return change


dropped = replaced_by("pass")


def body_begins(statement: str) -> Change:
    """The body of the marked `if` or `with` begins with another statement."""

    def change(marked: Marked) -> str:
        first = marked.node.body[0] if isinstance(marked.node, ast.If | ast.With) else None
        if first is None:
            raise DoesNotApply(f"line {marked.line} begins no `if` or `with`")
        return marked.replaced(first, f"{statement}\n{' ' * first.col_offset}{marked.source(first)}")

    return change


def preceded_by(statement: str) -> Change:
    """Another statement stands before the marked one."""

    def change(marked: Marked) -> str:
        assert isinstance(marked.node, ast.stmt)
        return marked.replaced(marked.node, f"{statement}\n{' ' * marked.node.col_offset}{marked.source(marked.node)}")

    return change


def value_becomes(template: str) -> Change:
    """What the statement or keyword assigns, returns or passes is another value; {0} is the old one."""

    def change(marked: Marked) -> str:
        value = getattr(marked.node, "value", None)
        if not isinstance(value, ast.expr):
            raise DoesNotApply(f"line {marked.line} has no value")
        return marked.replaced(value, template.format(marked.source(value)))

    return change


def call_becomes(function: str, template: str) -> Change:
    """The one call of the function is another expression; {0} is its first argument, {of} what its method is of."""

    def change(marked: Marked) -> str:
        node = _only(marked, ast.Call, function)
        of = marked.source(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        return marked.replaced(node, template.format(*(marked.source(each) for each in node.args), of=of))

    return change


def argument_becomes(function: str, place: int | str, new: str) -> Change:
    """The one call of the function has another argument at this place or under this keyword."""

    def change(marked: Marked) -> str:
        node = _only(marked, ast.Call, function)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        return marked.replaced(node.args[place] if isinstance(place, int) else keywords[place], new)

    return change


def without_operand(index: int) -> Change:
    """The outermost `and` or `or` of the statement lacks an operand."""

    def change(marked: Marked) -> str:
        node = _only(marked, ast.BoolOp)
        rest = [value for value in node.values if value is not node.values[index]]
        word = " and " if isinstance(node.op, ast.And) else " or "
        return marked.replaced(node, word.join(f"({marked.source(value)})" for value in rest))

    return change


def only_left(marked: Marked) -> str:
    """The outermost sum of the statement is its left operand."""
    node = _only(marked, ast.BinOp)
    return marked.replaced(node, marked.source(node.left))


def only_right(marked: Marked) -> str:
    """The outermost sum of the statement is its right operand."""
    node = _only(marked, ast.BinOp)
    return marked.replaced(node, marked.source(node.right))


def only_then(marked: Marked) -> str:
    """The outermost conditional expression always has the value before its `if`."""
    node = _only(marked, ast.IfExp)
    return marked.replaced(node, marked.source(node.body))


def only_otherwise(marked: Marked) -> str:
    """The outermost conditional expression always has the value behind its `else`."""
    node = _only(marked, ast.IfExp)
    return marked.replaced(node, marked.source(node.orelse))


def unfiltered(marked: Marked) -> str:
    """The outermost comprehension of the statement takes every element."""
    node = _only(marked, ast.GeneratorExp)
    return marked.replaced(node.generators[0].ifs[0], "True")


def catches_only(name: str) -> Change:
    """The marked `except` catches another class."""

    def change(marked: Marked) -> str:
        if not isinstance(marked.node, ast.ExceptHandler) or marked.node.type is None:
            raise DoesNotApply(f"line {marked.line} begins no `except`")
        return marked.replaced(marked.node.type, name)

    return change


def expression_becomes(old: str, new: str) -> Change:
    """The one part of the statement that reads like this, however it is laid out, is another expression."""

    def change(marked: Marked) -> str:
        assert marked.node is not None
        shape = ast.dump(ast.parse(old, mode="eval").body)
        found = [node for node in ast.walk(marked.node) if isinstance(node, ast.expr) and ast.dump(node) == shape]
        if len(found) != 1:
            raise DoesNotApply(f"line {marked.line} has {old!r} {len(found)} times, not once")
        return marked.replaced(found[0], new)

    return change


def text_becomes(old: str, new: str) -> Change:
    """The line below the marker has another text: for C, which has no tree here."""

    def change(marked: Marked) -> str:
        lines = marked.text.splitlines(keepends=True)
        if lines[marked.line - 1].count(old) != 1:
            raise DoesNotApply(f"line {marked.line} does not have {old!r} once")
        lines[marked.line - 1] = lines[marked.line - 1].replace(old, new)
        return "".join(lines)

    return change


def _marked(text: str, name: str, is_python: bool) -> Marked:
    lines = text.splitlines()
    row = next(row for row, line in enumerate(lines, 1) if (found := MARKER.fullmatch(line)) and found[1] == name) + 1
    while row <= len(lines) and MARKER.fullmatch(lines[row - 1]):  # a statement may be several guards'
        row += 1
    if not is_python:
        return Marked(text, row, None)
    # The walk goes from the outside in: the first node of a line is its largest.
    nodes = (node for node in ast.walk(ast.parse(text)) if getattr(node, "lineno", None) == row)
    node = next(nodes, None)
    if node is None:
        raise DoesNotApply(f"nothing begins on line {row}, below the marker")
    return Marked(text, row, node)


def _test(marked: Marked) -> ast.expr:
    test = getattr(marked.node, "test", None)
    if not isinstance(test, ast.expr):
        raise DoesNotApply(f"line {marked.line} is no `if` or `while`")
    return test


def _only(marked: Marked, kind: type[Node], function: str | None = None) -> Node:
    """The one node of this kind in the marked one, bodies and what is inside of such a node aside."""
    assert marked.node is not None
    found: list[Node] = []
    pending = [marked.node]
    while pending:
        node = pending.pop()
        if isinstance(node, kind) and (function is None or _called(node) == function):
            found.append(node)
            continue
        for name, value in ast.iter_fields(node):
            if not (isinstance(node, ast.stmt) and name in ("body", "orelse", "finalbody", "handlers")):
                pending += [
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
                ]
    if len(found) != 1:
        raise DoesNotApply(f"line {marked.line} has {function or kind.__name__} {len(found)} times, not once")
    return found[0]


def _called(node: ast.AST) -> str | None:
    """The name of the function or method that a call calls."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
