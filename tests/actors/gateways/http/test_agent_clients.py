"""Programs that use tools, unchanged, against the whole tree over a tiny model."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import open_service
from genbatch.nif.engine import EngineOptions
from tests.actors.gateways.scripted_batcher import PATIENCE_S
from tests.tool_models import tool_model

PROGRAMS = Path(__file__).with_name("agent_programs.py")
NEEDS = {
    "openai_stream": "openai",
    "openai_responses": "openai",
    "anthropic": "anthropic",
    "langchain": "langchain_openai",
    "instructor": "instructor",
    "pydantic_ai": "pydantic_ai",
}


@pytest.mark.trio
@pytest.mark.parametrize("program", NEEDS)
async def test_a_program_with_tools_runs_unchanged(
    program: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    if importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed; pip install {NEEDS[program].replace('_', '-')}")
    torch.set_num_threads(1)
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model")
    engine = EngineOptions(model_path=str(model), dtype="float32", n_gpu_layers=0, n_ctx=4096)
    with trio.fail_after(PATIENCE_S):
        async with open_service(engine, BatcherOptions(batch_timeout=1.0), ServiceOptions(http=":0")) as service:
            command = [sys.executable, "-W", "ignore", str(PROGRAMS), program, f"{service.addresses[0]}/v1"]
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
