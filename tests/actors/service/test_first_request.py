"""The first requests of a service find everything built: they import nothing, and their step has its memory."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import SyncZeroMQClient
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.plan import RehearsedStep, StepWork
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.runner import NativeRunner, native_runner
from tests.actors.service.running_service import TIMEOUT_S, RunningService

# Each process of the service writes the names of its imports to a file.
NOTES_IMPORTS = """
import os, sys
from importlib.abc import MetaPathFinder

class Notes(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        with open(os.path.join({folder!r}, f"{{os.getpid()}}.imports"), "a") as file:
            file.write(name + "\\n")

sys.meta_path.insert(0, Notes())
"""
# The last imports for grammars: in the engine's process, and in the process that compiles grammars first.
LAST_IMPORTS = {"llguidance.numpy", "genbatch.nif.text.whole_calls"}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "tools": [TOOL]}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ("/api/chat", {"model": "smollm2", "messages": MESSAGES, "options": {"num_predict": 4}}),
]


def imports(folder: Path) -> dict[str, list[str]]:
    """The imports of each process so far."""
    return {file.stem: file.read_text().splitlines() for file in folder.glob("*.imports")}


def until_grammars_are_ready(folder: Path) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while sum(LAST_IMPORTS.issubset(names) for names in imports(folder).values()) < 2:
        assert time.monotonic() < ends, "the service did not get ready for grammars"
        time.sleep(0.05)


def test_no_request_imports_anything_after_the_start(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTES_IMPORTS.format(folder=str(tmp_path)))
    with RunningService(None, tmp_path, "--http", "127.0.0.1:0") as service:
        address = next(word for word in service.log.split() if word.startswith("http://"))
        until_grammars_are_ready(tmp_path)
        before = imports(tmp_path)
        for path, body in REQUESTS:
            request = urllib.request.Request(address + path, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        with SyncZeroMQClient(service.address) as client:
            client.generate(prompt="hi", max_tokens=4)
        assert imports(tmp_path) == before


class Watched(NativeRunner):
    """Notes the reservations and the sizes of the steps, in order."""

    calls: list[tuple[str, int]]

    def reserve(self, num_tokens: int, num_sequences: int) -> None:
        self.calls.append(("reserve", num_tokens))
        super().reserve(num_tokens, num_sequences)

    def _run(self, batch: Any, logits: Any, best: Any) -> None:
        self.calls.append(("step", batch.input_ids.size))
        super()._run(batch, logits, best)


@pytest.fixture
def watched(smollm2: Model) -> Iterator[Watched]:
    plain = native_runner(smollm2)
    runner = Watched(plain._weights)
    runner.calls = []
    yield runner
    runner.close()


@pytest.mark.trio
async def test_a_batcher_reserves_its_largest_step_before_the_first_one(watched: Watched, smollm2: Model) -> None:
    async with trio.open_nursery() as nursery:
        options = BatcherOptions(n_parallel=2, max_batch_tokens=96)
        batcher = Batcher(lambda: Context(smollm2, watched, n_ctx=256, n_parallel=2, n_batch=96), options)
        await start(nursery, batcher, name="batcher")
        assert watched.calls[0] == ("reserve", 96)
        kinds, sizes = zip(*watched.calls[1:], strict=True)
        assert set(kinds) == {"step"} and sizes[0] == 1 < sizes[-1] < 96
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_after_a_crash_no_step_is_rehearsed_and_the_costs_are_those_of_the_last_engine(
    watched: Watched, smollm2: Model
) -> None:
    rehearsed = (RehearsedStep(StepWork(decodes=1, keys=1), 0.25),)
    async with trio.open_nursery() as nursery:
        batcher = Batcher(
            lambda: Context(smollm2, watched, n_ctx=256, n_parallel=2, n_batch=96),
            BatcherOptions(n_parallel=2, max_batch_tokens=96),
            rehearsed=rehearsed,
        )
        await start(nursery, batcher, name="batcher")
        assert watched.calls == [("reserve", 96)]
        assert batcher.times.time is not None
        assert batcher.times.time.seconds(rehearsed[0].work) == pytest.approx(0.25, rel=0.2)
        assert batcher.rehearsed == rehearsed, "the next engine gets them, too"
        nursery.cancel_scope.cancel()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_reserving_takes_the_memory_of_a_step_at_once(smollm2: Model) -> None:
    runner = native_runner(smollm2)
    runner.allocate([16], 16)
    size = runner.step_bytes(512, 2)
    assert size > 8 * 2**20
    before = resident_bytes()
    runner.reserve(512, 2)
    assert resident_bytes() - before > 0.9 * size
    runner.reserve(64, 2)  # a smaller step needs nothing more
    assert resident_bytes() - before < 1.5 * size
    runner.close()
