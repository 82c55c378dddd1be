"""The figures of the house: how many rooms it has, and how often a name means two things.

    python -m tests.figures            # each before the folders were joined -> now (and the goal)
    python -m tests.figures --stream   # also the files that a streamed request over ZeroMQ crosses; loads a small model

`tests/test_layering.py` keeps what must not come back.
"""

import ast
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("actors", "nif", "proto", "clients")
MAX_PARAMETERS = 6
# Counted by this script on the commit before; None: there is no goal.
BEFORE_AND_GOAL: dict[str, tuple[int, int | None]] = {
    "Python files in the product": (328, 160),
    "lines of the product, C too": (37_907, 35_000),
    "lines of the longest file": (398, 700),
    "modules that batcher.py imports": (35, 15),
    "circles between folders": (4, 0),
    "circles between files": (0, 0),
    "names with two meanings": (21, 0),
    "functions with more than six parameters, kernels aside": (17, 4),
    "words of README": (4_964, 1_200),
    "files that a streamed request over ZeroMQ crosses": (87, 40),
}
# A kernel's plain twin has the kernel's name, so that the one stands for the other in tests.
TWINS = ("nif/kernels/",)


def product_files(root: Path = ROOT) -> list[Path]:
    """Every Python file of the product, in order."""
    return [path for layer in LAYERS for path in sorted((root / layer).rglob("*.py"))]


def imports(root: Path = ROOT, *, at_runtime: bool = False) -> dict[str, set[str]]:
    """File -> the files of ours that importing it imports; both relative to the root.

    Imports for type checkers and imports inside a function count, too.

    Args:
        at_runtime: count only the imports that run when the file is imported.
    """
    paths = {str(path.relative_to(root)): path for path in product_files(root)}
    by_module = {_module(name): name for name in paths}
    return {
        name: {
            by_module[module]
            for module in _imported(ast.parse(path.read_text()), at_runtime=at_runtime)
            if module in by_module
        }
        - {name}
        for name, path in paths.items()
    }


def folder_imports(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between folders."""
    folders: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        folders[str(Path(name).parent)] |= {str(Path(other).parent) for other in others} - {str(Path(name).parent)}
    return dict(folders)


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of names that reach each other (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            component: set[str] = set()
            while name not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


def two_meanings(root: Path = ROOT) -> dict[str, list[str]]:
    """Public classes and types that are defined in more than one file, and where."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in product_files(root):
        name = str(path.relative_to(root))
        for node in ast.parse(path.read_text()).body:
            for defined in _type_names(node):
                if not defined.startswith("_"):
                    places[defined].append(name)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def wide_functions(root: Path = ROOT) -> list[str]:
    """Functions with more than six parameters, kernels aside; self is none."""
    found = []
    for path in product_files(root):
        name = str(path.relative_to(root))
        if name.startswith(TWINS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                if count > MAX_PARAMETERS:
                    found.append(f"{name}:{node.lineno} {node.name} ({count})")
    return found


def files_of_a_stream() -> list[str]:
    """The product's files whose functions run while a ZeroMQ client streams one short answer.

    Loading the model, opening the service and connecting are not the request's way: nothing is noticed while they run.
    """
    import tempfile

    import trio

    from genbatch.clients import in_process, remote
    from tests.nif.tiny_models import build_model

    seen: set[str] = set()
    streams = threading.Event()

    def notice(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and streams.is_set() and code.co_name != "<module>":
            path = Path(code.co_filename).resolve()  # modules are found through links
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in LAYERS:
                seen.add(str(path.relative_to(ROOT)))

    async def run(directory: Path) -> None:
        bind = f"ipc://{directory}/zeromq.sock"
        model = build_model("llama", directory / "model")
        async with (
            in_process.open_batcher(str(model), n_parallel=2, bind=bind, dtype="float32"),
            remote.ZeroMQClient(bind) as client,
        ):
            await client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)  # what is made once is made
            streams.set()
            sys.setprofile(notice)
            async with client.stream([4, 5, 6], max_tokens=4, ignore_eos=True) as stream:
                async for _ in stream:
                    pass
            streams.clear()

    with tempfile.TemporaryDirectory() as directory:
        threading.setprofile(notice)  # for the model's own thread, which is not there yet
        try:
            trio.run(run, Path(directory))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return sorted(seen)


def figures(root: Path = ROOT) -> dict[str, int]:
    """Each figure but the stream's."""
    files = product_files(root)
    edges = imports(root)
    (batcher,) = [name for name in edges if name.endswith("/batcher.py") and name.startswith("actors/")]
    sources = [*files, *sorted(root.glob("nif/native/*.[ch]"))]
    lengths = [len(path.read_text().splitlines()) for path in sources]
    return {
        "Python files in the product": sum(path.name != "__init__.py" for path in files),
        "lines of the product, C too": sum(lengths),
        "lines of the longest file": max(lengths),
        "modules that batcher.py imports": len(edges[batcher]),
        "circles between folders": len(circles(folder_imports(imports(root, at_runtime=True)))),
        "circles between files": len(circles(edges)),
        "names with two meanings": len(two_meanings(root)),
        "functions with more than six parameters, kernels aside": len(wide_functions(root)),
        "words of README": len((root / "README.md").read_text().split()),
    }


def _module(name: str) -> str:
    return "genbatch." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(tree: ast.Module, *, at_runtime: bool) -> Iterator[str]:
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_runtime and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_runtime and isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            pending += node.orelse if node.test.id == "TYPE_CHECKING" else ast.iter_child_nodes(node)
        else:
            pending += ast.iter_child_nodes(node)


def _type_names(node: ast.stmt) -> Iterator[str]:
    """The class or the alias of a type that a statement defines."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


if __name__ == "__main__":
    now = figures()
    if "--stream" in sys.argv:
        crossed = files_of_a_stream()
        now["files that a streamed request over ZeroMQ crosses"] = len(crossed)
        print("\n".join(crossed))
    for name, value in now.items():
        before, goal = BEFORE_AND_GOAL[name]
        print(f"{name:60} {before:6} -> {value:6}" + ("" if goal is None else f"   goal {goal}"))
    for circle in (*circles(folder_imports(imports(at_runtime=True))), *circles(imports())):
        print("circle:", " ".join(sorted(circle)))
    for name, files in two_meanings().items():
        print(f"two meanings: {name}: {', '.join(files)}")
    for name in wide_functions():
        print("wide:", name)
