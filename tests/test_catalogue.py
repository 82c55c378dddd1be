"""Documents and docstrings: the table of faults names tests that exist, lines have a length, arguments exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
HEADING = "## Faults\n"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
ARGUMENTS = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"^    (\w[\w, ]*):(?: |$)", re.MULTILINE)


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


def documents() -> Iterator[Path]:
    """What people write: not the results that a benchmark writes, and nothing that was installed."""
    for folder in ("", "ADRs", "actors", "clients", "docs", "examples", "nif", "proto", "tests"):
        pattern = "**/*.md" if folder else "*.md"
        yield from (path for path in (ROOT / folder).glob(pattern) if "results" not in path.parts)


def lines_of_prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of tables and code, numbered from 1."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield number, line


def test_an_adr_has_at_most_80_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "ADRs").glob("*.md")}
    assert len(lengths) > 40
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_a_line_of_prose_has_at_most_120_characters() -> None:
    paths = list(documents())
    assert {ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "ADRs" / "0048-tests-that-let-code-move.md"} <= {
        *paths
    }
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in lines_of_prose(path.read_text())
        if len(line) > 120 and " " in line.strip()
    ]
    assert long == []


def test_tables_and_code_may_be_wider() -> None:
    text = "a\n```\n" + "b " * 90 + "\n```\n| " + "c " * 90 + "\nd"
    assert list(lines_of_prose(text)) == [(1, "a"), (6, "d")]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    optional = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *optional)}


def unknown_arguments(source: str) -> list[str]:
    """The names below `Args:` that are neither a parameter of the function nor a field of the class."""
    unknown = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = parameters(node)
        elif isinstance(node, ast.ClassDef):
            fields = {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
            inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
            known = fields.union(*map(parameters, inits))
            if not known and node.bases:
                continue  # its base has the constructor
        else:
            continue
        named = ARGUMENTS.search(ast.get_docstring(node) or "")
        for names in ARGUMENT.findall(named[1]) if named else ():
            unknown += [f"{node.name}: {name}" for name in names.split(", ") if name not in known]
    return unknown


@pytest.mark.parametrize("layer", ["actors", "clients", "nif", "proto"])
def test_a_docstring_names_arguments_that_exist(layer: str) -> None:
    sources = {path: path.read_text() for path in (ROOT / layer).glob("**/*.py")}
    assert any("Args:" in source for source in sources.values())
    unknown = {str(path.relative_to(ROOT)): unknown_arguments(source) for path, source in sources.items()}
    assert {path: names for path, names in unknown.items() if names} == {}


def test_a_docstring_that_names_an_old_argument_is_found() -> None:
    old = 'def f(new: int) -> None:\n    """Do it.\n\n    Args:\n        old: a number.\n    """\n'
    assert unknown_arguments(old) == ["f: old"]
    assert unknown_arguments(old.replace("(new", "(old")) == []
