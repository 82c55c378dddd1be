"""The table of tests/README.md: which test shows which row of the five source documents.

    python tests/rows.py            # writes it anew

A row's tests carry its id in their names: test_b03_... shows row B3.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS / "README.md"
MEANINGS = TESTS.parent / "docs" / "rows.md"
BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->\n"
ROWS = {"A": 12, "B": 35, "H": 16, "R": 6, "S": 7}
ID = re.compile(r"([abhrs])(\d\d)_(to_)?")


def tests_by_row() -> dict[str, list[str]]:
    """Row -> "file::test", in the order of files and lines."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for row in rows_of(node.name):
                    found[row].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def rows_of(name: str) -> list[str]:
    """The rows in a test's name: test_b28_b29_... names two, test_b25_to_b30_... six."""
    rows: list[str] = []
    rest = name.removeprefix("test_")
    first: int | None = None
    while match := ID.match(rest):
        number = int(match[2])
        rows += [f"{match[1].upper()}{i}" for i in range(number if first is None else first + 1, number + 1)]
        first = number if match[3] else None
        rest = rest[match.end() :]
    return rows


def meanings() -> dict[str, str]:
    """What docs/rows.md says of each row, in its order."""
    return dict(re.findall(r"^\| ([ABHRS]\d+) \| (.*) \|$", MEANINGS.read_text(), re.MULTILINE))


def table() -> str:
    """The table in Markdown, a line a row that has a test."""
    found = tests_by_row()
    lines = ["| row | tests |\n|---|---|\n"]
    for letter, count in ROWS.items():
        for number in range(1, count + 1):
            tests = found.get(f"{letter}{number}")
            if tests:
                lines.append(f"| {letter}{number} | {'<br>'.join(f'`{test}`' for test in tests)} |\n")
    return "".join(lines)


def missing() -> list[str]:
    """Rows without a test."""
    found = tests_by_row()
    return [
        f"{letter}{i}" for letter, count in ROWS.items() for i in range(1, count + 1) if f"{letter}{i}" not in found
    ]


if __name__ == "__main__":
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + table() + END + rest.split(END)[1])
    print("without a test:", ", ".join(missing()) or "none")
