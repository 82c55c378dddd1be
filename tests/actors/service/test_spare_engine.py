"""A spare engine process: the next engine takes it, it imports what that engine needs, and a dead one is no fault."""

import os
import signal
from pathlib import Path

import pytest
import trio

from genbatch import ZeroMQClient
from genbatch.actors.engine.child_process import ChildProcess
from genbatch.actors.service import processes
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.processes import SpareEngine
from genbatch.nif.errors import OptionError
from tests.actors.service.running_service import TIMEOUT_S, RunningService, is_running
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.waiting import a_moment

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")


@pytest.mark.trio
async def test_the_spare_process_becomes_the_engine_and_another_one_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    model = build_native_model("llama", tmp_path / "model", build_tokenizer)
    with RunningService(model, tmp_path, "--spare-engine", "--default-deadline-s", "0") as service:
        async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
            whole = await client.generate([5, 6], max_tokens=5, ignore_eos=True)
            while len(service.engines) < 2:
                await a_moment()
            # Until the packed weights are kept, an engine needs torch to pack them.
            while not list((tmp_path / "cache" / "packed").glob("*.weights")):
                await a_moment()
            old, spare = service.engines
            os.kill(old, signal.SIGKILL)
            again = await client.generate([5, 6], max_tokens=5, ignore_eos=True)
            assert again.token_ids == whole.token_ids
            assert service.engines[0] == spare and not is_running(old)
            assert has_mapped(spare, "numpy") and not has_mapped(spare, "libtorch"), "a native engine needs no torch"
        service.process.terminate()
        assert service.process.wait(TIMEOUT_S) == 0
        assert not is_running(spare)


@pytest.mark.trio
async def test_a_spare_process_imports_torch_for_a_model_that_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SPARE_DELAY_S", 0.0)
    spare = SpareEngine(lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spare.run)
        while spare.pid is None or not has_mapped(spare.pid, "libtorch"):
            await a_moment()
        nursery.cancel_scope.cancel()


def has_mapped(pid: int, name: str) -> bool:
    """Whether the process has such a library."""
    return name in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.trio
async def test_a_spare_process_that_has_ended_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SPARE_DELAY_S", 0.0)
    spare = SpareEngine(lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spare.run)
        ends: list[ChildProcess] = []
        while spare.pid is None:
            await a_moment()
        pid = spare.pid
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            await a_moment()
        ends.append(spare.take())
        assert ends[0].pid != pid and ends[0].is_running
        while spare.pid is None:
            await a_moment()
        kept = spare.pid
        nursery.cancel_scope.cancel()
    assert not is_running(kept)
    await ends[0].end()


def test_an_engine_in_this_process_has_no_spare() -> None:
    with pytest.raises(OptionError, match="spare_engine"):
        ServiceOptions(spare_engine=True, engine="thread")
