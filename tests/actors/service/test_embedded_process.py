"""A program that keeps its model in a process of its own, and its gateways with itself."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from genbatch.clients.in_process import open_batcher
from genbatch.nif.errors import OptionError
from tests.actors.engine.stage import Stage
from tests.actors.service.running_service import is_running
from tests.waiting import a_moment


def child_processes() -> list[int]:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if "engine_process" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.trio
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")
async def test_an_engine_process_serves_the_program_and_ends_with_its_block(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # which is where its process looks, too
    stage = Stage(tmp_path)
    stages: set[str] = set()
    async with open_batcher(
        str(tiny_model_dir("native_llama")),
        dtype="float32",
        n_gpu_layers=0,
        n_ctx=512,
        engine="process",
        scheduler=stage.scheduler,
        progress=lambda stage, done, total: stages.add(stage),
    ) as batcher:
        [child] = child_processes()
        assert "load" in stages
        whole = await batcher.generate([5, 6, 7], max_tokens=6, ignore_eos=True)
        async with batcher.stream([5, 6, 7], max_tokens=6, ignore_eos=True) as stream:
            assert [token.token_id async for token in stream] == whole.token_ids
        with stage.holding(), trio.CancelScope() as scope:
            async with batcher.stream([5, 6, 8], max_tokens=240, ignore_eos=True) as stream:
                async for _ in stream:
                    scope.cancel()
        while (stats := await batcher.stats())["requests_running"]:
            await a_moment()
        assert stats["finished"] == {"length": 2, "cancelled": 1} and stats["kv_blocks_used"] == 0
    assert not is_running(child)


@pytest.mark.trio
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")
async def test_a_programs_stream_goes_on_after_its_engine_process_was_killed(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model_dir("native_llama"))
    async with open_batcher(model, dtype="float32", n_gpu_layers=0, n_ctx=512, engine="process") as batcher:
        whole = await batcher.generate([5, 6, 8], max_tokens=240, ignore_eos=True)
        seen: list[int] = []
        async with batcher.stream([5, 6, 8], max_tokens=240, ignore_eos=True) as stream:
            async for token in stream:
                assert token.index == len(seen)
                seen.append(token.token_id)
                if len(seen) == 3:
                    [child] = child_processes()
                    os.kill(child, signal.SIGKILL)
        assert seen == stream.result.token_ids == whole.token_ids
        assert (await batcher.stats())["engine_restarts"] == 1


@pytest.mark.trio
async def test_a_scheduler_object_stays_in_its_process() -> None:
    with pytest.raises(OptionError, match="scheduler"):
        async with open_batcher("some", engine="process", scheduler=object()):
            pass
