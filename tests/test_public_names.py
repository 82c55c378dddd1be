"""`from genbatch import ...`: what it offers, and what it costs."""

import ast
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path

import pytest

import genbatch
from genbatch.proto.errors import CLASSES

ROOT = Path(__file__).parent.parent
# What runs a model in this process, and so needs torch.
NEEDS_TORCH = {
    *("open_batcher", "BatcherClient"),
    *("OfflineScheduler", "InferenceEngine", "InferenceSession", "generate_batch"),
}


def names_for_type_checkers() -> dict[str, str]:
    """Name -> module, as the imports say that only type checkers read."""
    tree = ast.parse((ROOT / "genbatch" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name, "without `as` a type checker takes the name for a private one"
            found[alias.name] = node.module
    return found


def test_type_checkers_and_programs_see_the_same_names() -> None:
    assert names_for_type_checkers() == genbatch._MODULES
    assert set(genbatch.__all__) == set(genbatch._MODULES)


@pytest.mark.parametrize("name", genbatch.__all__)
def test_a_name_is_the_one_that_its_module_defines(name: str) -> None:
    assert getattr(genbatch, name) is getattr(import_module(genbatch._MODULES[name]), name)
    assert name in dir(genbatch)


def test_every_error_of_a_request_can_be_caught_by_its_public_name() -> None:
    assert {error.__name__ for error in CLASSES.values()} <= set(genbatch.__all__)


ERRORS = [error for name in genbatch.__all__ if isinstance(error := getattr(genbatch, name), type)]
ERRORS = [error for error in ERRORS if issubclass(error, Exception)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_in_another_process(kind: type[Exception]) -> None:
    """A pool of processes hands a worker's error to its parent, and one that cannot be read there ends the pool."""
    parameters = [] if kind.__init__ is Exception.__init__ else signature(kind).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is Parameter.empty]
    error = kind(*(5 if parameter.annotation is int else f"the {parameter.name}" for parameter in needed))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and vars(copy) == vars(error)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'open_bather'"):
        genbatch.open_bather  # noqa: B018
    with pytest.raises(ImportError):
        from genbatch import open_bather  # noqa: F401


def test_the_source_distribution_has_the_tests_the_documents_and_what_they_need(tmp_path: Path) -> None:
    tracked = ("pyproject.toml", "README.md", "MANIFEST.in", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")
    folders = ("actors", "nif", "proto", "clients", "genbatch", "tests", "docs", "examples", "ADRs")
    copy = tmp_path / "copy"
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in tracked:
        shutil.copy(ROOT / name, copy / name)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=300)
    (archive,) = tmp_path.glob("genbatch-*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {*tracked, *(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())}
    assert sorted(path for path in wanted - packed if "egg-info" not in path) == []


def test_the_names_that_call_a_service_import_no_torch() -> None:
    light = sorted(set(genbatch.__all__) - NEEDS_TORCH)
    program = f"""
import sys
import genbatch
assert not {{"msgspec", "trio", "zmq", "torch"}} & set(sys.modules), "importing genbatch alone imports nothing"
for name in {light}:
    getattr(genbatch, name)
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_the_version_is_the_distributions() -> None:
    assert f'version = "{genbatch.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_python_m_genbatch_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "genbatch", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout and "generate" in done.stdout


def test_what_is_published_shows_no_link_that_leads_nowhere() -> None:
    """The wheel's description stands on a package index, beside no file of the repository."""
    assert not re.findall(r"\]\((?!https?://)", (ROOT / "docs" / "package.md").read_text())


def test_the_guides_table_has_every_public_name() -> None:
    (section,) = re.findall(r"## Names\n(.*?)\n## ", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    told = set(re.findall(r"`(\w+)`", section)) - {"genbatch"}
    errors = {error.__name__ for error in CLASSES.values()}  # "and its subclasses"
    assert told == set(genbatch.__all__) - errors
