"""What a request does not say of drawing is the same at every door: as the model's files say."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import trio

from genbatch import open_batcher
from tests.actors.gateways.threaded_service import threaded_service

DRAWS = {"do_sample": True, "temperature": 1.5, "top_k": 40}


@pytest.mark.parametrize("said", [DRAWS, {}], ids=["files that say it", "files that say nothing"])
def test_http_library_and_command_line_agree(
    said: dict[str, float], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(said))

    async def library() -> tuple[str, str]:
        async with open_batcher(str(model), dtype="float32", n_gpu_layers=0, n_ctx=256) as batcher:
            plain = await batcher.generate("once", max_tokens=12, seed=5)
            greedy = await batcher.generate("once", max_tokens=12, seed=5, temperature=0.0)
            return plain.text, greedy.text

    in_program, greedy = trio.run(library)
    assert (in_program != greedy) == bool(said)
    with threaded_service(model, n_ctx=256, http=":0", bind=f"ipc://{tmp_path}/socket") as service:
        zeromq, http = sorted(service.addresses, key=lambda address: address.startswith("http"))
        body = {"prompt": "once", "max_tokens": 12, "seed": 5}
        answer = httpx2.post(f"{http}/v1/completions", json=body, trust_env=False, timeout=60).json()
        assert answer["choices"][0]["text"] == in_program
        command = [sys.executable, "-W", "error", "-c", "from genbatch.clients.cli.main import main; main()"]
        command += ["generate", "once", "--raw", "--max-tokens", "12", "--seed", "5", "--connect", zeromq]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ.copy()).stdout
        assert shown == in_program + "\n"
