"""Takes each guard out of a copy of the source, and shows that a test turns red.

    python -m tests.mutations                     # all of them
    python -m tests.mutations --only "poison"
    python -m tests.mutations --jobs 2 --table table.md

The source itself is never changed. Exit code 1 if a guard can be taken out and nobody notices.
"""

import argparse
import compileall
import py_compile
import queue
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.mutation import DoesNotApply, Mutation
from tests.mutations.mutations import MUTATIONS
from tests.mutations.run import FAILED, PASSED, Run, prepare, run_tests

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "actors",
    "nif",
    "proto",
    "clients",
    "genbatch",
    "tests",
    "docs",
    "examples",
    "README.md",
    "pyproject.toml",
    ".ns",
)
# Seconds. A guard may be what keeps a test from waiting for ever.
TIMEOUT_S, WHOLE_TIMEOUT_S = 120.0, 1200.0


def main() -> int:
    """Exit code 1 if a mutation survives, does not apply, or names a test that is red anyway."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="guards with this in their names; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once, each with a copy of its own")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args()
    mutations = [one for one in MUTATIONS if chosen.only is None or any(part in one.name for part in chosen.only)]
    prepare()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(chosen.jobs):
            copies.put(copy_source(Path(directory) / str(index)))
        red = _red_anyway(copies, mutations)
        if red:
            print("red without any mutation: " + ", ".join(red))
            return 1
        with ThreadPoolExecutor(chosen.jobs) as pool:
            rows = list(pool.map(lambda mutation: _check(copies, mutation), mutations))
    survivors = [mutation.name for mutation, is_killed, _ in rows if not is_killed]
    table = _table(rows)
    print(f"\n{table}\n{len(rows)} guards, {len(survivors)} not missed, {time.perf_counter() - started:.0f} s")
    if chosen.table is not None:
        chosen.table.write_text(table)
    return 1 if survivors or not rows else 0


def copy_source(directory: Path) -> Path:
    """The source, compiled so that a file is read anew when its text has changed, however soon and however little."""
    directory.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, directory / name)
    for name in ("actors", "nif", "proto", "clients"):
        compileall.compile_dir(directory / name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return directory


def _red_anyway(copies: "queue.SimpleQueue[Path]", mutations: list[Mutation]) -> tuple[str, ...]:
    """The tests that prove nothing, because they fail with all guards in place."""
    copy = copies.get()
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    run = run_tests(copy, tests, stop_at_first=False, timeout_s=WHOLE_TIMEOUT_S)
    copies.put(copy)
    if run.exit_code == PASSED:
        print(f"{len(tests)} tests are green with all guards in place", flush=True)
        return ()
    print(run.output[-5000:])
    return run.red or (f"pytest ended with {run.exit_code}",)


def _check(copies: "queue.SimpleQueue[Path]", mutation: Mutation) -> tuple[Mutation, bool, str]:
    """Whether a test turns red without the guard, and which one, or else what happened."""
    copy = copies.get()
    started = time.perf_counter()
    try:
        path, text = mutation.apply(copy)
        try:
            run = run_tests(copy, list(mutation.tests), stop_at_first=True, timeout_s=TIMEOUT_S)
        finally:
            path.write_text(text)
        is_killed, what = _verdict(mutation, run)
    except DoesNotApply as fault:
        is_killed, what = False, f"does not apply: {fault}"
    finally:
        copies.put(copy)
    seconds = time.perf_counter() - started
    print(f"{'killed  ' if is_killed else 'SURVIVED'} {mutation.name} ({seconds:.1f} s): {what}", flush=True)
    return mutation, is_killed, what


def _verdict(mutation: Mutation, run: Run) -> tuple[bool, str]:
    if run.exit_code is None:
        return True, f"{mutation.tests[0]} does not end"
    if run.exit_code == FAILED and run.red:
        return True, run.red[0]
    if run.exit_code == PASSED:
        return False, "no test turns red"
    return False, f"pytest ended with {run.exit_code}: {run.output[-300:]}"


def _table(rows: list[tuple[Mutation, bool, str]]) -> str:
    lines = ["| guard | without it | file | test that turns red |", "|---|---|---|---|"]
    for mutation, is_killed, what in rows:
        red = f"`{what}`" if is_killed else f"**survives**: {what}"
        lines.append(f"| {mutation.name} | {mutation.why} | `{mutation.file(ROOT)}` | {red} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
