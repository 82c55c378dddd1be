"""Every guard of the list is still where the list says, and so are the tests that watch it."""

import ast
import os
import shutil
from pathlib import Path

import pytest

from tests.mutations import drawn as drawn_mutations
from tests.mutations.drawn import Record, Tried, changes_of, draw
from tests.mutations.mutation import (
    Change,
    DoesNotApply,
    Mutation,
    always,
    call_becomes,
    dropped,
    markers,
    never,
    only_otherwise,
    without_operand,
)
from tests.mutations.mutations import MUTATIONS
from tests.mutations.reach import Reach
from tests.mutations.run import origin_in_a_child, put_first

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_guard_can_be_taken_out_of_a_copy_and_put_back(mutation: Mutation, tmp_path: Path) -> None:
    source = ROOT / mutation.file(ROOT)
    copy = tmp_path / mutation.file(ROOT)
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    path, text = mutation.apply(tmp_path)
    assert path == copy and text == source.read_text() != copy.read_text()
    if copy.suffix == ".py":
        assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse(text)), "nothing but the layout changed"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_that_are_named_are_there(mutation: Mutation) -> None:
    for test in mutation.tests:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test


def test_every_marker_of_the_product_has_its_guard() -> None:
    assert set(markers(ROOT)) == {mutation.name for mutation in MUTATIONS}


def test_processes_of_the_service_import_the_copy_even_if_the_environment_names_the_checkout_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("copy", "checkout"):
        (tmp_path / folder / "genbatch").mkdir(parents=True)
        (tmp_path / folder / "genbatch" / "__init__.py").touch()
    names = str(tmp_path / "copy")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "checkout"), names]))
    assert not origin_in_a_child().startswith(names)
    put_first(names)
    assert origin_in_a_child().startswith(names)


def written(root: Path, text: str) -> None:
    (root / "proto").mkdir(exist_ok=True)
    (root / "proto" / "there.py").write_text(text)
    markers.cache_clear()


def taken_out(root: Path, text: str, change: Change) -> str:
    written(root, text)
    path, _ = Mutation("bound", change, (), "it grows").apply(root)
    return path.read_text()


def test_a_marker_that_is_missing_or_there_twice_is_named(tmp_path: Path) -> None:
    for text, times in (("if full: pass\n", 0), ("# guard: bound\nif full: pass\n" * 2, 2)):
        with pytest.raises(DoesNotApply, match=f"'guard: bound' {times} times"):
            taken_out(tmp_path, text, never)


def test_a_statement_of_another_shape_is_named(tmp_path: Path) -> None:
    for text, change in (
        ("# guard: bound\nfull()\n", never),
        ("# guard: bound\nif f(max(1, 2), max(3, 4)): pass\n", call_becomes("max", "{0}")),
        ("# guard: bound\nif True:\n    x = max(1, 2)\n", call_becomes("max", "{0}")),
        ("# guard: bound\n", dropped),
    ):
        with pytest.raises(DoesNotApply):
            taken_out(tmp_path, text, change)


@pytest.mark.parametrize(
    ("statement", "change", "rest"),
    [
        ("if a:\n    pass\nelif b:\n    pass\n", always, "if (a) or True:\n    pass\nelif b:\n    pass\n"),
        ("if a or\\\n  b: pass\n", never, "if (a or\\\n  b) and False: pass\n"),
        ("f(\n    1,\n)\ng()\n", dropped, "pass\ng()\n"),
        ("x = 'ä' if a(b) else c\n", only_otherwise, "x = c\n"),
        ("if f(max(a.b, 2)):\n    max(1, 2)\n", call_becomes("max", "{0}"), "if f(a.b):\n    max(1, 2)\n"),
        ("return a and (b or c)\n", without_operand(0), "return (b or c)\n"),
    ],
)
def test_a_guard_is_found_by_its_marker_and_the_shape_of_its_statement(
    statement: str, change: Change, rest: str, tmp_path: Path
) -> None:
    for before in ("# guard: bound\n", "a = 'é'\n# guard: bound\n# guard: another\n"):
        assert taken_out(tmp_path, before + statement, change) == before + rest


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
    assert draw(20, 3, ["proto"])[:10] == draw(10, 3, ["proto"])


def test_what_only_a_gpu_runs_is_not_drawn_and_what_asks_for_one_is() -> None:
    text = (
        "def f(a: int) -> int:\n"
        '    if device.type == "cuda":\n'
        "        g(1)\n"
        "    else:\n"
        "        g(2)\n"
        '    h(a, num_warps=4, pad=8 if device.type != "cuda" else 16)\n'
        "def sync(a: int) -> int:\n"
        "    torch.cuda.synchronize()\n"
        "    return a + 1\n"
        "def free(a: int) -> int:\n"
        "    return torch.cuda.mem_get_info()[3] if torch.cuda.is_available() else a + 4\n"
    )
    drawn = {text[change.start : change.end] for change in changes_of("f.py", text)}
    assert {"g(2)", "2", "8", 'device.type == "cuda"', 'device.type != "cuda"', "a + 4", "4"} <= drawn
    assert not drawn & {"g(1)", "1", "16", "a + 1", "3", "torch.cuda.synchronize()"}
    assert [change for change in changes_of("f.py", text) if change.line == 6 and change.new == "5"] == []


def test_tests_of_the_mirrored_folder_come_first_and_the_quickest_of_them() -> None:
    seconds = {"a/test_x.py::one": 5.0, "a/test_x.py::two": 1.0, "b/test_y.py::one": 0.1, "b/test_y.py::two": 90.0}
    reach = Reach({"a/x.py": {3: set(seconds), 4: {"a/test_x.py::one"}}}, seconds)
    assert reach.tests("a/x.py", 3, 3, 4.0) == ["a/test_x.py::two", "b/test_y.py::one"]
    assert reach.tests("a/x.py", 4, 5, 4.0) == ["a/test_x.py::one"], "one is tried, however long it takes"
    # Nobody was seen to reach it: the tests named after the file, else any that reach the file.
    assert reach.tests("a/x.py", 9, 9, 100.0) == ["a/test_x.py::two", "a/test_x.py::one"]
    assert reach.tests("b/z.py", 9, 9, 100.0) == []


def test_what_was_tried_is_found_again_until_the_text_around_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn_mutations, "ROOT", tmp_path)
    (tmp_path / "f.py").write_text("a = 1\n")
    (change,) = changes_of("f.py", "a = 1\n")
    record = Record(tmp_path / "kept" / "tried.jsonl")
    assert record.find(change) is None
    record.add(Tried(change, "", 3))
    record.add(Tried(change, "test_a.py::test_b", 4))
    assert Record(tmp_path / "kept" / "tried.jsonl").find(change) == Tried(change, "test_a.py::test_b", 4)
    (tmp_path / "f.py").write_text("b = 1\n")
    assert Record(tmp_path / "kept" / "tried.jsonl").find(change) is None
