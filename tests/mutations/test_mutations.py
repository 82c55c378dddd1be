"""Every guard of the list is still where the list says, and so are the tests that watch it."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutations.drawn import changes_of, draw
from tests.mutations.mutation import DoesNotApply, Mutation
from tests.mutations.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_guard_can_be_taken_out_of_a_copy_and_put_back(mutation: Mutation, tmp_path: Path) -> None:
    source, copy = ROOT / mutation.file, tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    text = mutation.apply(tmp_path)
    assert text == source.read_text() != copy.read_text()
    if copy.suffix == ".py":
        ast.parse(copy.read_text())  # else every test would be red


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_that_are_named_are_there(mutation: Mutation) -> None:
    for test in mutation.tests:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test


def test_a_guard_that_has_moved_is_named(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("if full: return\nif full: return\n")
    with pytest.raises(DoesNotApply, match="2 times"):
        Mutation("bound", "there.py", "if full", "if False", (), "it grows").apply(tmp_path)


def test_names_tell_guards_apart() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_changes_are_drawn_by_seed_and_every_one_still_parses() -> None:
    text = (
        "def f(a: int, b: bool = True) -> int:\n"
        '    """Word 1 < 2."""\n'
        "    assert a < 3\n"
        "    if a <= 1 and not b:\n"
        "        log.info(1)\n"
        "        a += 2\n"
        "    g(a * 2)\n"
        '    return f"{a + 1}"\n'
    )
    drawn = {change.describe(text).partition(": ")[2] for change in changes_of("f.py", text)}
    assert drawn == {
        "def f(a: int, b: bool = True) -> int:  ->  def f(a: int, b: bool = False) -> int:",
        "if a <= 1 and not b:  ->  if not (a <= 1 and not b):",
        "if a <= 1 and not b:  ->  if ((a <= 1) or (not b)):",
        "if a <= 1 and not b:  ->  if (a < 1) and not b:",
        "if a <= 1 and not b:  ->  if a <= 2 and not b:",
        "if a <= 1 and not b:  ->  if a <= 1 and bool(b):",
        "log.info(1)  ->  log.info(2)",
        "a += 2  ->  pass",
        "a += 2  ->  a += 3",
        "g(a * 2)  ->  pass",
        "g(a * 2)  ->  g(((a) + (2)))",
        "g(a * 2)  ->  g(a * 3)",
    }
    assert draw(20, 3, ["proto"]) == draw(20, 3, ["proto"]) != draw(20, 4, ["proto"])
