"""The table of faults in tests/README.md names tests that exist, and a fault has one."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
HEADING = "## Faults\n"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def section() -> str:
    text = (TESTS / "README.md").read_text()
    assert HEADING in text, f"tests/README.md has no {HEADING.strip()!r}"
    return text.split(HEADING)[1].split("\n## ")[0]


def functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_of_the_catalogue_exists() -> None:
    named = set(NAMED.findall(section()))
    known = {path: functions(TESTS / path) for path, _ in named}
    assert named
    assert [f"{path}::{name}" for path, name in sorted(named) if name not in known[path]] == []


def test_every_fault_has_a_test() -> None:
    rows = [line for line in section().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row.split("|")[1].strip() for row in rows if not NAMED.search(row)] == []
