"""Packed weights on disk: mapped weights give the same bits. A file that is not whole, ours and right is not used."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genbatch.nif.context.context import Context
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model import describe_model
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.models.warm_model import files_identity
from genbatch.nif.native import kept_weights, model_weights
from genbatch.nif.native.library import native_library
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from tests.nif.failing_disks import breakable_disk, mounted_disk
from tests.nif.models.gguf_files import write_llama
from tests.nif.native.models import CONFIGS, build_native_model
from tests.nif.tiny_models import build_tokenizer

GB = 2**30


def start(path: Path, quantize: str = "none", cache_bytes: int = GB) -> ModelWeights:
    """Pack or map a model's weights, and wait until they are written."""
    identity = files_identity(resolve_model(str(path)))
    model = describe_model(str(path), dtype="float32")
    assert model is not None and identity
    weights = ModelWeights(replace(model, identity=identity), quantize, cache_bytes=cache_bytes)
    if weights.keeping is not None:
        weights.keeping.join()
    return weights


def logits(weights: ModelWeights) -> np.ndarray:
    context = Context(weights.model, NativeRunner(weights, n_threads=1), n_ctx=64, n_parallel=1)
    try:
        return np.stack([context.prefill([1, 5, 3, 9, 2], 0, 0), context.prefill([4, 4], 0, 5)])
    finally:
        context.close()


def files(cache: Path) -> list[Path]:
    return sorted((cache / "packed").glob("*.weights"))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_mapped_weights_give_the_bits_of_packed_weights(name: str, quantize: str, cache: Path, tmp_path: Path) -> None:
    path = build_native_model(name, tmp_path / name, build_tokenizer)
    packed, mapped = start(path, quantize), start(path, quantize)
    assert not packed.num_mapped and mapped.num_mapped and mapped.keeping is None
    assert mapped.groups == packed.groups
    assert np.array_equal(logits(mapped), logits(packed))


@pytest.mark.parametrize("where", ["magic", "digest", "head", "image", "first", "last", "short", "cut", "empty"])
def test_damaged_weights_are_named_once_and_packed_anew(
    where: str, cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = logits(start(gguf))
    [path] = files(cache)
    data = bytearray(path.read_bytes())
    head = len(data[:256].split(b"\n", 1)[0])
    weights = 2 << 20
    places = {"magic": 0, "digest": 25, "head": head + 9, "image": data.index(b"\n", head + 1) + 700, "first": weights}
    at = {**places, "last": len(data.rstrip(b"\0")) - 1}.get(where)
    if at is not None:
        data[at] ^= 4
    path.write_bytes(data[: {"short": -64, "cut": weights, "empty": 0}.get(where, len(data))])
    with caplog.at_level(logging.WARNING, "genbatch"):
        again = start(gguf)
    assert not again.num_mapped and np.array_equal(logits(again), right)
    [told] = caplog.messages
    assert "damaged and will be packed again" in told and str(path) in told
    last = start(gguf)
    assert last.num_mapped and np.array_equal(logits(last), right)


def test_every_part_of_a_head_counts(cache: Path, gguf: Path) -> None:
    start(gguf)
    [path] = files(cache)
    data = bytearray(path.read_bytes())
    line = data[:256].split(b"\n", 1)[0]
    for at in range(0, len(line) + int(line.split()[-1]), 97):
        data[at] ^= 1
        path.write_bytes(data)
        assert kept_weights.open_weights(path, native_library()) is None, at
        data[at] ^= 1
    path.write_bytes(data)
    assert kept_weights.open_weights(path, native_library()) is not None


def test_weights_that_others_could_have_written_are_not_mapped(cache: Path, gguf: Path) -> None:
    start(gguf)
    [path] = files(cache)

    def is_used() -> bool:
        return kept_weights.open_weights(path, native_library()) is not None

    assert is_used()
    for place, open_, closed in ((path, 0o666, 0o600), (path.parent, 0o777, 0o700)):
        place.chmod(open_)
        assert not is_used()
        place.chmod(closed)
        assert is_used()
    other = path.with_name("other")
    other.hardlink_to(path)  # a file of two names
    assert not is_used()
    other.unlink()
    path.rename(other)
    path.symlink_to(other)
    assert not is_used()
    if os.geteuid() == 0:
        path.unlink()
        other.rename(path)
        os.chown(path, 12345, 12345)
        assert not is_used()


def test_a_model_that_was_written_since_is_packed_anew_though_its_size_and_time_are_the_same(
    cache: Path, gguf: Path
) -> None:
    start(gguf)
    status, data = gguf.stat(), gguf.read_bytes()
    gguf.write_bytes(data)
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not start(gguf).num_mapped


def test_weights_of_another_model_under_this_name_are_not_used(
    cache: Path, gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(gguf)
    [path] = files(cache)
    other = tmp_path / "other.gguf"
    write_llama(other)
    start(other)
    [foreign] = [one for one in files(cache) if one != path]
    shutil.copyfile(foreign, path)
    assert not start(gguf).num_mapped
    assert "another model" in caplog.text


@pytest.mark.parametrize("form", [("int8", GB), ("none", 0)])
def test_weights_of_another_format_are_not_used_and_0_bytes_keep_none(
    form: tuple[str, int], cache: Path, gguf: Path
) -> None:
    start(gguf)
    assert not start(gguf, *form).num_mapped
    assert len(files(cache)) == 1 + bool(form[1])


def test_weights_of_other_kernels_are_not_used(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library()
    place = kept_weights.kept_place("a", "b", library)
    assert place == kept_weights.kept_place("a", "b", library)

    class Other:
        """Kernels with other bytes, or for a CPU with other multiplications."""

        def __init__(self, path: Path, pays: bool) -> None:
            self._name, self.digits_pay = str(path), lambda: pays

    compiled = cache / "other.so"
    shutil.copyfile(library._name, compiled)
    pays = bool(library.digits_pay())
    same: Any = Other(compiled, pays)
    assert kept_weights.kept_place("a", "b", same) == place
    others: list[Any] = [Other(compiled, not pays)]
    with compiled.open("ab") as file:
        file.write(b"1")
    others.append(Other(compiled, pays))
    assert place not in [kept_weights.kept_place("a", "b", other) for other in others]


def test_the_files_that_were_used_last_stay_within_the_bound(cache: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path in paths:
        write_llama(path)
    start(paths[0])
    room = 2 * files(cache)[0].stat().st_size + 1000
    start(paths[1])
    for age, path in enumerate(files(cache)):
        os.utime(path, ns=(age, age))  # long ago
    assert start(paths[0], cache_bytes=room).num_mapped  # is used, and so the other is the older one
    start(paths[2], cache_bytes=room)
    assert len(files(cache)) == 2
    assert [bool(start(path, cache_bytes=room).num_mapped) for path in (paths[0], paths[2], paths[1])] == [1, 1, 0]


def test_weights_above_the_bound_are_not_kept_and_no_others_make_room(
    cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(gguf)
    with caplog.at_level(logging.INFO, "genbatch"):
        start(gguf, "int8", 1000)
    assert "weights_cache allows" in caplog.text
    assert start(gguf).num_mapped


KILLED = """
import os, sys
from pathlib import Path
from genbatch.nif.native import kept_weights
from tests.nif.native.test_kept_weights import start

def die(parts, offsets, rest):
    yield parts[0][:64], offsets[0]
    os._exit(9)

kept_weights._pieces = die
start(Path(sys.argv[1]))
"""


def test_a_killed_writer_leaves_no_file_that_is_used_and_the_next_one_removes_its_rest(cache: Path, gguf: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(gguf)], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 9
    assert [path.suffix for path in (cache / "packed").iterdir() if path.name != "lock"] == [".partial"]
    assert not start(gguf).num_mapped
    assert [path.suffix for path in (cache / "packed").iterdir() if path.name != "lock"] == [".weights"]
    assert start(gguf).num_mapped


DIES_ANYWHERE = """
import os, sys
from pathlib import Path
from genbatch.nif.native import kept_weights, model_weights
from tests.nif.native.test_kept_weights import start

writing = []
model_weights.keep_in_background = lambda *arguments: writing.append(arguments)
start(Path(sys.argv[1]))
[arguments] = writing
place, _, _, library, _ = arguments


def keep(dies_after=None):
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != kept_weights.__file__:
            return None
        lines += event == "line"
        if lines == dies_after:
            os._exit(9)
        return count

    sys.settrace(count)
    kept_weights.keep_weights(*arguments, lambda seconds: None)
    sys.settrace(None)
    return lines


num_lines = keep()
assert kept_weights.open_weights(place, library) is not None
place.unlink()
for moment in range(1, num_lines, max(1, num_lines // 24)):
    if not (child := os.fork()):
        keep(moment)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if place.exists():  # it had its name already
        assert kept_weights.open_weights(place, library) is not None, moment
        place.unlink()
keep()
assert kept_weights.open_weights(place, library) is not None
assert not list(place.parent.glob("*.partial"))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file_or_none(cache: Path, gguf: Path) -> None:
    command = [sys.executable, "-c", DIES_ANYWHERE, str(gguf)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "damaged" not in done.stderr, done.stderr


def test_a_second_writer_waits_for_the_first_and_writes_nothing(
    cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing: list[Any] = []
    monkeypatch.setattr(model_weights, "keep_in_background", lambda *arguments: writing.append(arguments))
    start(gguf)
    [arguments] = writing
    begun, goes_on, again = threading.Event(), threading.Event(), threading.Event()

    def rest(_: float) -> None:
        begun.set()
        goes_on.wait()

    first = threading.Thread(target=kept_weights.keep_weights, args=(*arguments, rest))
    second = threading.Thread(target=kept_weights.keep_weights, args=(*arguments, lambda _: again.set()))
    first.start()
    begun.wait()
    second.start()
    second.join(0.2)
    waits = second.is_alive()
    goes_on.set()
    first.join()
    second.join()
    assert waits and not again.is_set() and len(files(cache)) == 1 and not caplog.messages


def test_services_that_start_at_the_same_time_keep_the_weights_once(cache: Path, gguf: Path) -> None:
    program = "import sys; from pathlib import Path; from tests.nif.native.test_kept_weights import start; "
    command = [sys.executable, "-c", program + "start(Path(sys.argv[1]))", str(gguf)]
    begun = [
        subprocess.Popen(command, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    told = [process.communicate()[1] for process in begun]
    assert [process.returncode for process in begun] == [0, 0, 0], told
    assert not any("packed weights" in text for text in told), told
    assert [path.suffix for path in (cache / "packed").iterdir() if path.name != "lock"] == [".weights"]
    assert start(gguf).num_mapped


@pytest.mark.parametrize("kind", ["full", "read-only", "file"])
def test_a_disk_that_takes_no_weights_is_named_once_and_the_model_is_used(
    kind: str, cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "packed"
    if kind == "file":
        folder.write_bytes(b"no folder")
    with nullcontext() if kind == "file" else mounted_disk(folder, "size=4k" if kind == "full" else "ro"):
        if kind == "full":  # the disk fills after it was looked at
            usage = shutil.disk_usage(folder)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=GB))
        with caplog.at_level(logging.WARNING, "genbatch"):
            weights = start(gguf)
        [told] = caplog.messages
        assert "the next start is slower" in told
        assert not weights.num_mapped and np.isfinite(logits(weights)).all()
        assert kind == "file" or not [path for path in folder.iterdir() if path.name != "lock"]


def test_weights_on_a_broken_disk_are_packed_anew(
    cache: Path, gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that the disk cannot read would end the process with SIGBUS, at each start anew."""
    with breakable_disk(tmp_path / "image", cache / "packed") as break_disk:
        right = logits(start(gguf))
        break_disk(files(cache))
        with caplog.at_level(logging.WARNING, "genbatch"):
            again = start(gguf)
        assert not again.num_mapped and np.array_equal(logits(again), right)
        assert "damaged and will be packed again" in caplog.text


LOSES_PAGES = """
import mmap, os, sys
from pathlib import Path
from genbatch.nif.native.kept_weights import open_weights
from genbatch.nif.native.library import native_library

path, library, map_file = Path(sys.argv[1]), native_library(), mmap.mmap


def loses_pages(*arguments):
    mapped = map_file(*arguments)
    os.truncate(path, path.stat().st_size - 4 * mmap.PAGESIZE)
    return mapped


mmap.mmap = loses_pages
assert open_weights(path, library) is None
"""


def test_weights_that_cannot_be_read_do_not_end_the_process(cache: Path, gguf: Path) -> None:
    """The file loses its last pages after it was mapped."""
    start(gguf)
    [path] = files(cache)
    command = [sys.executable, "-c", LOSES_PAGES, str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "the disk cannot read its weights" in done.stderr and str(path) in done.stderr
    assert not path.exists()
    start(gguf)
    assert start(gguf).num_mapped


def test_a_folder_in_the_place_of_weights_is_named(cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(gguf)
    [path] = (cache / "packed").glob("*.weights")
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING, "genbatch"):
        assert not start(gguf).num_mapped
    [told] = caplog.messages
    assert "the next start is slower" in told and path.name in told


def test_two_engines_have_the_weights_once_in_memory(cache: Path, gguf: Path) -> None:
    start(gguf)
    [path] = files(cache)
    both = [kept_weights.open_weights(path, native_library()) for _ in range(2)]
    assert None not in both
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert len(lines) == 2 and all(" r--s " in line for line in lines)  # not writable, and shared


MAPS = """
import sys
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions

engine = load_engine(EngineOptions(model_path="smollm2", n_gpu_layers=0, n_ctx=64, quantize="int8"))
context = engine.open_context(n_parallel=1, n_held=0, n_batch=16)
context.prefill([1, 5, 3], 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def mapped_kilobytes(pid: int, path: Path) -> Counter[str]:
    """The numbers of `smaps` for the mappings of a file."""
    numbers, is_ours = Counter[str](), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_ours = line.endswith(str(path))
        elif is_ours and rest[-1] == "kB":
            numbers[name.removesuffix(":")] += int(rest[0])
    return numbers


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux reports who shares which pages")
def test_two_processes_have_one_copy_of_the_packaged_models_weights(cache: Path) -> None:
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(3):
            one = subprocess.Popen([sys.executable, "-c", MAPS], stdin=-1, stdout=-1, text=True)
            processes.append(one)
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
            if len(processes) == 1:
                one.communicate()  # it packs the weights, and keeps them at its end
        [path] = files(cache)
        size = path.stat().st_size // 1024
        both = [mapped_kilobytes(one.pid, path) for one in processes[1:]]
        assert size > 90_000 and all(one["Rss"] > 0.95 * size for one in both), (size, both)
        assert sum(one["Pss"] for one in both) < 1.05 * size, (size, both)
        assert all(one["Private_Dirty"] == 0 for one in both)
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def test_an_engine_keeps_its_weights_by_default_and_reads_no_header_the_next_time(cache: Path, gguf: Path) -> None:
    def load(**options: Any) -> Any:
        engine = load_engine(EngineOptions(model_path=str(gguf), n_gpu_layers=0, n_ctx=64, **options))
        runner: Any = engine._new_runner(1)
        weights = runner._weights
        if weights.keeping is not None:
            weights.keeping.join()
        return engine, runner

    engine, runner = load()
    assert not runner.own_bytes(1, 16)
    again, mapped = load()
    # Pages of mapped weights count as available memory, which the pool must not take.
    assert mapped.own_bytes(1, 16) == mapped._weights.num_mapped > 0
    assert "_made" not in vars(again.model.weights) and "_made" not in vars(again.model.hf)
    contexts = [one.open_context(n_parallel=1, n_held=0, n_batch=16) for one in (engine, again)]
    first, second = (context.prefill([1, 5, 3], 0, 0) for context in contexts)
    assert np.array_equal(first, second)
    _, other = load(weights_cache=0)
    assert not other.own_bytes(1, 16) and other._weights.keeping is None
    with pytest.raises(OptionError, match="weights_cache"):
        EngineOptions(weights_cache=-1)


def test_writing_takes_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    parts = [np.zeros(40 << 20, np.uint8)]
    for piece, _ in kept_weights._pieces(parts, [0], sleep):
        now += len(piece)
    assert slept == [16 << 20, 16 << 20, 8 << 20]


@pytest.mark.parametrize(("disk_s", "is_kept"), [(1.0, True), (3600.0, False)])
def test_a_program_that_ends_at_once_waits_for_its_weights_for_a_while(
    disk_s: float, is_kept: bool, cache: Path, gguf: Path
) -> None:
    program = f"""
import os, time
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.native import kept_weights
os.fsync = lambda descriptor: time.sleep({disk_s})
if {not is_kept}:
    kept_weights.EXIT_S = 0.1
load_engine(EngineOptions(model_path={str(gguf)!r}, n_gpu_layers=0, n_ctx=64))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert bool(files(cache)) is is_kept
    assert ("takes more than" in done.stderr) is not is_kept


def test_packed_memory_can_be_read_until_the_process_is_gone() -> None:
    """The thread that keeps weights may be in the middle of them when the program ends."""
    program = """
import atexit
atexit.register(lambda: print(int(memory.bytes[-1])))  # before the memory's own: runs after it
from genbatch.nif.native.library import NativeMemory, native_library
memory = NativeMemory(native_library(), 1 << 24)
memory.bytes[:] = 7
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "7\n")
