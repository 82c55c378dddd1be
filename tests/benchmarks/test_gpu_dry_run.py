"""The GPU benchmark runs without a GPU, so that the first hour with one is not spent on an import.

`make gpu-dry` runs all of it in an environment like the first machine's."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
ABSENT = ("gguf", "trio", "outcome", "sniffio", "msgspec", "zmq", "structlog", "llguidance", "msgpack", "starlette")
"""Packages that the first machine lacks."""

_REFUSE = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def gpu() -> ModuleType:
    """The script as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_script", HERE / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_script"] = module  # where its dataclasses are looked up
    spec.loader.exec_module(module)
    return module


def child(gpu: ModuleType, source: str, case_s: float = 20.0) -> object:
    """A group whose child runs this source, which may report."""
    begin = f"import sys, time; sys.path.insert(0, {str(HERE)!r}); from gpu_events import report, done\n"
    return gpu.Group("the group", [sys.executable, "-c", begin + source], case_s)


def test_decode_needs_nothing_that_the_first_machine_lacks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_REFUSE)
    events = tmp_path / "decode-8b.jsonl"
    variables = {**os.environ, "GPU_EVENTS": str(events), "GPU_DRY_RUN": "1", "TRITON_INTERPRET": "1"}
    done = ["decode B=2", "decode int4 B=2", "decode int8 B=1", "decode int8 B=2"]
    variables |= {"OMP_NUM_THREADS": "1", "GPU_DONE": json.dumps(done)}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, HERE.parents[1] / ".ns", HERE.parents[1])))
    ran = subprocess.run(
        [sys.executable, HERE / "gpu_cases.py", "decode-8b", tmp_path],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:] + events.read_text()
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert "figures mean nothing" in events.read_text()
    assert [one["case"] for one in found if one["event"] == "end"] == ["machine", "decode B=1", "decode int4 B=1"]
    assert any(one["case"].endswith("steps overlapped") for one in found)


_ATTENTION = """
import torch
from gpu_attention import AttentionLoad, compare, ours, pages_of
from tests.nif.kernels.reference import paged_attention

load = AttentionLoad("tiny", 3, 10, 4, torch.device("cpu"), torch.float32)
keys, values = load.layers[0]
assert keys.stride() == values.stride() and keys.stride(0) == 2 * keys[0].numel(), "a block holds K, then V"
want = paged_attention(load.query, keys, values, load.table, load.starts, load.lengths, scale=load.scale)
torch.testing.assert_close(ours(load)(0), want)
begins, pages, last = pages_of(load)
for row, blocks in enumerate(load.table):
    assert pages[begins[row] : begins[row + 1]].tolist() == blocks.tolist()
    assert (len(blocks) - 1) * load.block_size + last[row] == load.context
print(*(f"{name}: {figure}, {note}" for name, figure, note in compare(load)), sep="\\n")
"""


def test_attention_alone_is_computed_over_a_pool_as_ours_and_names_what_a_library_lacks() -> None:
    variables = {**os.environ, "GPU_DRY_RUN": "1", "TRITON_INTERPRET": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, HERE.parents[1] / ".ns", HERE.parents[1])))
    ran = subprocess.run([sys.executable, "-c", _ATTENTION], env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "ours", "FlashInfer", "FlashInfer by tensor cores", "varlen_attn", "varlen_attn, one split"
    ]  # fmt: skip
    assert all("not there, it needs a GPU" in line for line in lines[1:]), ran.stdout


def test_a_case_that_hangs_or_dies_is_recorded_and_the_next_begins(gpu: ModuleType, tmp_path: Path) -> None:
    record = gpu.Record(tmp_path / "part.jsonl")
    source = """
for case in ("hangs", "dies", "works"):
    if case in done():
        continue
    report("begin", case)
    if case == "hangs":
        time.sleep(3600)
    if case == "dies":
        print("an illegal access"); sys.exit(7)
    report("figure", case, figure="1 tok/s")
    report("end", case)
"""
    assert gpu.run_group(child(gpu, source, case_s=2.0), record, dict(os.environ), time.monotonic() + 60)
    failed = {event["case"]: event["note"] for event in record.events if event["event"] == "failed"}
    assert set(failed) == {"hangs", "dies"}
    assert "time limit" in failed["hangs"]
    assert "an illegal access" in failed["dies"] and "exit status 7" in failed["dies"]
    assert "1 tok/s" in record.table() and "FAILED" in record.table()
    # A second call of the part runs none of them again.
    assert gpu.run_group(child(gpu, source), record, dict(os.environ), time.monotonic() + 60)
    assert [event["case"] for event in record.events if event["event"] == "begin"] == ["hangs", "dies", "works"]


def test_a_child_that_cannot_start_is_one_failure_and_not_a_loop(gpu: ModuleType, tmp_path: Path) -> None:
    record = gpu.Record(tmp_path / "part.jsonl")
    group = child(gpu, "import no_such_module")
    assert gpu.run_group(group, record, dict(os.environ), time.monotonic() + 60)
    [failure] = record.events
    assert failure["case"] == "the group"
    assert "no_such_module" in failure["note"]


def test_a_part_ends_in_time(gpu: ModuleType, tmp_path: Path) -> None:
    record = gpu.Record(tmp_path / "part.jsonl")
    group = child(gpu, "report('begin', 'long'); time.sleep(3600)", case_s=3600.0)
    assert not gpu.run_group(group, record, dict(os.environ), time.monotonic() + 1)
    assert record.finished() == ["long"]


@pytest.mark.parametrize("dry", [False, True])
def test_a_file_whose_tests_are_all_skipped_has_failed(tmp_path: Path, dry: bool) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_works(): pass\n@pytest.mark.skip(reason='of a reason')\ndef test_not(): pass\n"
    )
    (tmp_path / "test_none.py").write_text(
        "import pytest\n@pytest.mark.skip(reason='no device')\ndef test_one(): pass\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    events = tmp_path / "events.jsonl"
    variables = {**os.environ, "GPU_EVENTS": str(events), "PYTHONPATH": str(HERE)} | (
        {"GPU_DRY_RUN": "1"} if dry else {}
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "gpu_outcomes", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        check=True,
    )
    found = [json.loads(line) for line in events.read_text().splitlines()]
    failed = {one["case"]: one["note"] for one in found if one["event"] == "failed"}
    assert set(failed) == ({"test_module.py"} if dry else {"test_module.py", "test_none.py"})
    assert {one["case"] for one in found if one["event"] == "figure"} == {"test_some.py", "test_none.py"}


def test_a_test_runs_again_under_another_tool(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_works(): pass\n")
    events = tmp_path / "events.jsonl"
    ended = ["test_some.py::test_works"]
    for tool in ("memcheck", "racecheck"):
        variables = {
            "GPU_EVENTS": str(events),
            "GPU_DONE": json.dumps(ended),
            "PYTHONPATH": str(HERE),
            "GPU_TOOL": tool,
        }
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "gpu_outcomes", "-p", "no:cacheprovider", "."],
            cwd=tmp_path,
            env={**os.environ, **variables, "PYTHONPATH": str(HERE)},
            capture_output=True,
            check=True,
        )
        found = [json.loads(line) for line in events.read_text().splitlines()]
        ended += [one["case"] for one in found if one["event"] == "end"]
    assert ended[-2:] == ["memcheck: test_some.py::test_works", "racecheck: test_some.py::test_works"]


def test_only_missing_packages_are_unpacked(gpu: ModuleType, tmp_path: Path) -> None:
    for name in ("pytest", "no_such_package"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    target = tmp_path / "unpacked"
    assert gpu.unpack_missing(tmp_path, target) == ["no_such_package"]
    assert [path.name for path in target.iterdir()] == ["no_such_package"]


def test_parts_fit_their_slots_and_memcheck_sees_freed_memory(gpu: ModuleType, tmp_path: Path) -> None:
    assert gpu.environment_of("races", tmp_path, dry_run=False)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in gpu.environment_of("tests", tmp_path, dry_run=False)
    assert all(group.case_s <= 540 for part in gpu.PARTS for group in gpu.groups_of(part, tmp_path, dry_run=False))
    assert all(group.case_s <= 540 for group in gpu.groups_of(gpu.UNMEASURED, tmp_path, dry_run=False))
    for part in ("decode-8b", "decode-0.6b"):
        names = [group.name for group in gpu.groups_of(part, tmp_path, dry_run=False)]
        assert names == [part, f"{part}-peers"], "our own figures come first"
