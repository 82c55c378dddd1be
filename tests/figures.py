"""The figures of the code: issue 27's table with today's values, then files, circles and names.

    python -m tests.figures            # loads a small model and traces two requests
    python -m tests.figures --files    # also the files, the shapes and the checks that were counted

`tests/test_layering.py` keeps what must not come back.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("actors", "nif", "proto", "clients")
MAX_PARAMETERS = 6
# Optional fields of the Batcher's records that tell one kind of work from another.
KIND_FIELDS = {"pooled", "beams", "lookup", "donor", "embedding", "beam_width", "prompt_logprobs"}
# Counted by this script before the folders were joined; None: there is no goal.
BEFORE_AND_GOAL: dict[str, tuple[int, int | None]] = {
    "Python files in the product": (328, 160),
    "lines of the product, C too": (37_907, 35_000),
    "lines of the longest file": (398, 700),
    "modules that batcher.py imports": (35, 15),
    "circles between folders": (4, 0),
    "circles between files": (0, 0),
    "names with two meanings": (21, 0),
    "functions with more than six parameters, kernels aside": (17, 4),
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


def files_that_write(names: set[str], root: Path = ROOT) -> list[str]:
    """The files in which one of the names is an identifier, a field, a parameter, a keyword or a whole string."""
    files = []
    for path in product_files(root):
        words: set[object] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            words |= {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")} & names
        if words:
            files.append(str(path.relative_to(root)))
    return files


def files_of_a_method(root: Path = ROOT) -> list[str]:
    """The files that the method `tokenize` is written in; an argument of transformers has this name, too."""
    names = {"tokenize", "Tokenize", "TokenizeRequest", "TokenizeResult"}
    return [name for name in files_that_write(names, root) if name != "nif/text/tokenizer.py"]


def kind_checks(folder: str, root: Path = ROOT) -> tuple[int, int]:
    """Calls of isinstance with class patterns, and tests of the optional fields that tell kinds of work apart."""
    classes = fields = 0
    for path in sorted((root / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            classes += called or isinstance(node, ast.MatchClass)
            fields += sum(isinstance(each, ast.Attribute) and each.attr in KIND_FIELDS for each in _tested(node))
    return classes, fields


def _tested(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node asks whether they are there."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return [node.left]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.ifs if isinstance(node, ast.comprehension) else []


def table(root: Path = ROOT) -> list[tuple[str, str, str, str]]:
    """Issue 27's table: the figure, its value at the time of the issue, today's, and the goal."""
    from tests.traced import trace_openai_stream, trace_zeromq_stream

    chat, stream = trace_openai_stream(), trace_zeromq_stream()
    classes, fields = kind_checks("actors/batcher", root)
    rings = circles(imports(root))
    adrs = [len(path.read_text().split()) for path in (root / "ADRs").glob("*.md")]
    words = len((root / "README.md").read_text().split())
    diary = len((root / "docs" / "measurements.md").read_text().splitlines())
    methods = files_of_a_method(root)
    parameters = files_that_write({"min_p"}, root)
    files = f"{len(chat.files)} / {len(stream.files)}"
    seconds = root / ".pytest_cache" / "seconds"
    minutes = f"{int(seconds.read_text()) / 60:.1f} min" if seconds.exists() else "run it"
    return [
        ("shapes that hold a chat's parameters, in one process", "19", str(len(chat.shapes)), "<= 10"),
        ("times a chat is type-checked, in one process", "5", str(len(chat.checks)), "2"),
        ("files that one method (`tokenize`) is written in", "16", str(len(methods)), "<= 5"),
        ("files that one sampling parameter (`min_p`) is written in", "10", str(len(parameters)), "<= 5"),
        ("files of a streamed OpenAI chat / of a ZeroMQ stream", "62 / 48", files, "<= 45 / 38"),
        ("`isinstance` and kind checks in `actors/batcher`", "72 + 46", f"{classes} + {fields}", "<= 25"),
        ("files in a circle, type checking included", "11 (+ 3 pairs)", str(sum(len(ring) for ring in rings)), "0"),
        ("product lines, C included", "56.1k", f"{sum(_lengths(root)) / 1000:.1f}k", "<= 50k"),
        ("words of README / longest ADR", "1,188 / 5,000", f"{words:,} / {max(adrs):,}", "900 / -"),
        ("lines of docs/measurements.md", "268", str(diary), "-"),
        ("`make test` on two cores", "15 to 22 min", minutes, "<= 10 min"),
    ]


def _lengths(root: Path) -> list[int]:
    sources = [*product_files(root), *sorted(root.glob("nif/native/*.[ch]"))]
    return [len(path.read_text().splitlines()) for path in sources]


def figures(root: Path = ROOT) -> dict[str, int]:
    """Each figure but the stream's."""
    files = product_files(root)
    edges = imports(root)
    (batcher,) = [name for name in edges if name.endswith("/batcher.py") and name.startswith("actors/")]
    lengths = _lengths(root)
    return {
        "Python files in the product": sum(path.name != "__init__.py" for path in files),
        "lines of the product, C too": sum(lengths),
        "lines of the longest file": max(lengths),
        "modules that batcher.py imports": len(edges[batcher]),
        "circles between folders": len(circles(folder_imports(imports(root, at_runtime=True)))),
        "circles between files": len(circles(edges)),
        "names with two meanings": len(two_meanings(root)),
        "functions with more than six parameters, kernels aside": len(wide_functions(root)),
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


def main() -> None:
    for name, then, today, goal in (("figure", "issue 27", "today", "goal"), *table()):
        print(f"{name:60} {then:>14} {today:>14} {goal:>12}")
    print()
    for name, value in figures().items():
        before, most = BEFORE_AND_GOAL[name]
        print(f"{name:60} {before:14} {value:14} {'' if most is None else most:>12}")
    for circle in (*circles(folder_imports(imports(at_runtime=True))), *circles(imports())):
        print("circle:", " ".join(sorted(circle)))
    for name, files in two_meanings().items():
        print(f"two meanings: {name}: {', '.join(files)}")
    for name in wide_functions():
        print("wide:", name)
    if "--files" in sys.argv:
        from tests.traced import trace_openai_stream, trace_zeromq_stream

        for what, trace in (("OpenAI chat", trace_openai_stream()), ("ZeroMQ stream", trace_zeromq_stream())):
            print(f"\n{what}: {' '.join(trace.shapes)}\n" + "\n".join([*trace.checks, *sorted(trace.files)]))


if __name__ == "__main__":
    main()
