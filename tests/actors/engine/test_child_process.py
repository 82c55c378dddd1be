"""Options arrive in another process as they left, and nothing else does."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import (
    ChildProcess,
    NotStarted,
    ProcessDied,
    ProcessFailed,
    decode_options,
    encode_options,
    to_error,
    to_message,
)
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import FIFOScheduler, PauseOrder, SchedulerError
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.service.options import ServiceOptions
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError, OptionError
from genbatch.proto.validation import RequestLimits
from tests.waiting import a_moment

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(model_path="m", num_blocks=7, max_memory_percent=0.5, allow_block_sharing=False),
        BatcherOptions(),
        BatcherOptions(
            n_parallel=3,
            max_queue=9,
            scheduler="some.module:Class",
            batching_type=BatchingType.INFLIGHT_BATCHING,
            pause_order=PauseOrder.OLDEST,
            system_prompts=("a", "b"),
            limits=RequestLimits(max_n=2),
        ),
        ServiceOptions(),
        ServiceOptions(bind="ipc:///tmp/x", engine="process", tls_cert="a", tls_key="b", max_restarts=1),
    ],
    ids=lambda options: type(options).__name__,
)
def test_options_arrive_as_they_left(options: Any) -> None:
    assert decode_options(encode_options(options), type(options)) == options


@pytest.mark.parametrize("kind", [EngineOptions, BatcherOptions, ServiceOptions])
def test_every_option_has_a_type_that_can_be_checked(kind: type[Any]) -> None:
    for field in fields(kind):
        if field.init:
            with pytest.raises(OptionError) as caught:
                decode_options(msgspec.msgpack.encode({field.name: {"no": ["such", "value"]}}), kind)
            assert caught.value.option == field.name


def test_what_is_no_option_or_out_of_range_is_refused_by_name() -> None:
    for named, option in (
        ({"no_such": 1}, "no_such"),
        ({"scheduling": {}}, "scheduling"),
        ({"n_parallel": 0}, "n_parallel"),
    ):
        with pytest.raises(OptionError) as caught:
            decode_options(msgspec.msgpack.encode(named), BatcherOptions)
        assert caught.value.option == option


def test_an_object_cannot_be_sent() -> None:
    class Scheduler(FIFOScheduler):
        def __init__(self) -> None:
            pass

    options = BatcherOptions(scheduler=Scheduler())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="another process") as caught:
        encode_options(options)
    assert caught.value.option == "scheduler"


@pytest.mark.parametrize(
    "error",
    [
        ModelError("some", "is not there"),
        OptionError("n_ctx", "too much"),
        SchedulerError("no such scheduler"),
        AddressError("ipc:///x", "taken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_errors_of_a_start_keep_their_class_and_what_they_name(error: Exception) -> None:
    again = to_error(msgspec.msgpack.decode(msgspec.msgpack.encode(to_message(error)), type=NotStarted))
    assert type(again) is type(error)
    assert str(again) == str(error) and vars(again) == vars(error)


def test_another_error_of_a_start_keeps_its_text() -> None:
    again = to_error(to_message(ZeroDivisionError("what")))
    assert isinstance(again, ProcessFailed) and "ZeroDivisionError: what" in str(again)


@pytest.mark.parametrize(
    ("returncode", "how"),
    [(-9, "was killed by signal 9"), (0, "ended with exit code 0"), (1, "ended with exit code 1")],
)
def test_how_a_process_ended_is_said(returncode: int, how: str) -> None:
    assert str(ProcessDied("engine", returncode)) == f"the engine process {how}"


@pytest.mark.trio
async def test_a_process_whose_end_is_not_waited_for_to_the_end_is_gone_all_the_same() -> None:
    child = ChildProcess("sleeper", "tests.actors.engine.sleeper")
    with trio.CancelScope() as scope:
        scope.cancel()
        await child.end(grace_s=60.0)
    assert scope.cancelled_caught
    assert child._process.returncode == -signal.SIGKILL
    assert await child.end() == -signal.SIGKILL, "it may be called again"


# Starts a child that is stuck, tells its number, and is gone without a word.
PARENT = """
import os, pathlib, signal, sys
from genbatch.actors.engine.child_process import ChildProcess
pathlib.Path(sys.argv[1]).write_text(str(ChildProcess("stuck", "tests.actors.engine.stuck").pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.trio
async def test_a_child_that_is_stuck_ends_with_its_parent_all_the_same(tmp_path: Path) -> None:
    done = await trio.run_process([sys.executable, "-c", PARENT, str(tmp_path / "pid")], check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    try:
        with trio.fail_after(100):
            while _is_alive(pid):
                await a_moment()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    """Also false for one that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


COLLECTIONS = """
import gc
from genbatch.actors.engine.child_process import set_up_garbage_collection

def collections():
    return [generation["collections"] for generation in gc.get_stats()]

def cycles(count):
    for _ in range(count):
        cycle = []
        cycle.append(cycle)

set_up_garbage_collection()
before, frozen = collections(), gc.get_freeze_count()
cycles(4000)
assert collections() == before, "a step's objects are scanned"
cycles(4000)
assert collections()[0] == before[0] + 1, "garbage stays"
assert collections()[1:] == before[1:] and frozen > 1000
"""


def test_a_process_collects_garbage_after_more_objects_than_a_step_makes() -> None:
    subprocess.run([sys.executable, "-c", COLLECTIONS], check=True, timeout=100)
