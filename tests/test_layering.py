"""The import directions that keep the layers apart, read from the source files."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.figures import circles, folder_imports, imports, two_meanings

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "nif": {"nif"},
    "proto": {"proto"},
    "actors": {"actors", "nif", "proto"},
    "clients": {"clients", "actors", "proto", "nif"},
}
FILES = [path for layer in ALLOWED for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("genbatch.")}
    assert ours <= ALLOWED[layer], f"{layer} imports {ours - ALLOWED[layer]}"


@pytest.mark.parametrize("layer", ["nif", "proto"])
def test_the_lower_layers_know_no_event_loop_and_no_sockets(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        names = {name.split(".")[0] for name in imported_modules(path)}
        # Chat templates run in child processes, each of which has a socketpair's end.
        allowed = {"socket"} if path.name in ("templates.py", "template_child.py") else set()
        assert not names & {"trio", "zmq", "asyncio", "socket"} - allowed, path


def test_the_runtime_knows_nothing_of_batching() -> None:
    for path in (ROOT / "actors" / "runtime").glob("*.py"):
        ours = {name for name in imported_modules(path) if name.startswith("genbatch.")}
        assert all(name.startswith("genbatch.actors.runtime") for name in ours), (path, ours)


def test_scheduling_knows_no_actors() -> None:
    for path in (ROOT / "actors" / "scheduling").glob("*.py"):
        ours = {name for name in imported_modules(path) if name.startswith("genbatch.actors.")}
        assert all(
            name.startswith(("genbatch.actors.scheduling", "genbatch.actors.runtime.errors")) for name in ours
        ), (path, ours)


def test_nothing_is_ever_unpickled() -> None:
    for path in FILES:
        names = imported_modules(path)
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
        assert "torch.load" not in path.read_text(), path


# What reads the wall clock: dates that are shown, sent or kept in files. A batch expires a day after it was made, and
# its file must say so over restarts.
READS_THE_WALL_CLOCK = {
    *(f"actors/gateways/http/{name}.py" for name in ("app", "ollama", "openai_answer", "responses", "text_endpoints")),
    *(f"actors/gateways/http/{name}.py" for name in ("batch_endpoints", "batch_runner", "batch_store", "http_gateway")),
    *("actors/observing/tracing.py", "actors/recording/recorder.py", "actors/security/key_files.py"),
    *("clients/cli/bench.py", "clients/cli/hub.py", "clients/fleet/ray_replicas.py", "nif/text/template_child.py"),
    *("nif/kv/disk_cache.py", "nif/trusted_files.py"),
}


def test_no_timeout_depends_on_the_wall_clock() -> None:
    """Timeouts, leases and liveness are measured by monotonic clocks: trio's, and time.monotonic in threads."""
    reads = re.compile(r"\btime\.time(_ns)?\b|from time import .*\btime\b|datetime\.(now|utcnow)\(|(gm|local)time\(")
    assert {str(path.relative_to(ROOT)) for path in FILES if reads.search(path.read_text())} == READS_THE_WALL_CLOCK


# Imported by files that are imported for an option only: those of the extras gpu, otel and ray.
EXTRAS = {"triton", "opentelemetry", "ray"}


def test_what_the_product_imports_is_installed_with_it() -> None:
    """HTTP and grammars are no extras: a module's own imports are those of `dependencies`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[ <>=]", line)[0].lower().replace("_", "-") for line in project["dependencies"]}
    distributions = packages_distributions()
    for path in FILES:
        top = ast.Module([node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.If)], [])
        imports = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module}
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"genbatch", *EXTRAS}:
            assert needed & {one.lower().replace("_", "-") for one in distributions[name]}, (path, name)


def test_every_package_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join(("genbatch", *path.parent.relative_to(ROOT).parts)) for path in FILES if path.name == "__init__.py"
    }
    assert listed == there | {"genbatch"}


def test_no_files_import_each_other_in_a_circle() -> None:
    edges = imports()
    for circle in circles(edges):
        arrows = [f"{name} -> {other}" for name in sorted(circle) for other in sorted(edges[name] & circle)]
        raise AssertionError("; ".join(arrows))


def test_an_import_for_type_checkers_or_in_a_function_makes_a_circle_of_files(tmp_path: Path) -> None:
    for name, text in {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import genbatch.nif.b\n",
        "b": "def late():\n    from genbatch.nif import a\n",
    }.items():
        (tmp_path / "nif").mkdir(exist_ok=True)
        (tmp_path / "nif" / f"{name}.py").write_text(text)
    assert circles(imports(tmp_path)) == [{"nif/a.py", "nif/b.py"}]
    assert circles(imports(tmp_path, at_runtime=True)) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    files = imports(at_runtime=True)
    for circle in circles(folder_imports(files)):
        arrows = [
            f"{name} -> {other}"
            for name, others in sorted(files.items())
            for other in sorted(others)
            if str(Path(name).parent) != str(Path(other).parent)
            and {str(Path(name).parent), str(Path(other).parent)} <= circle
        ]
        raise AssertionError("; ".join(arrows))


def test_a_name_has_one_meaning() -> None:
    assert two_meanings() == {}
