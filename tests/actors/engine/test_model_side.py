"""How an engine starts: how far it has come is told, and what the one before it had is loaded again."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine import model_side
from genbatch.actors.engine.child_process import AdapterSource, StartEngine, encode_options
from genbatch.actors.engine.model_side import _load_again, open_batcher
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import AdapterError, ModelError


class Adapters:
    """Reads what the test says; implements what `_load_again` needs of an engine's."""

    def __init__(self, digests: dict[str, str]) -> None:
        self.digests = digests
        self.added: list[str] = []

    def read(self, name: str, path: Path) -> Any:
        if name not in self.digests:
            raise AdapterError(name, f"{path} is gone")
        return SimpleNamespace(name=name, digest=self.digests[name])

    def add(self, adapter: Any) -> None:
        self.added.append(adapter.name)


def test_an_adapter_that_is_what_it_was_is_loaded_again_and_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters({"same": "1", "changed": "2"})
    sources = [AdapterSource(name, f"/there/{name}", "1") for name in ("changed", "gone", "same")]
    with caplog.at_level(logging.ERROR):
        _load_again(SimpleNamespace(adapters=adapters), sources)  # type: ignore[arg-type]
    assert adapters.added == ["same"]
    changed, gone = (record.getMessage() for record in caplog.records)
    assert "/there/changed has changed" in changed and "/there/gone is gone" in gone


@pytest.mark.trio
async def test_how_far_a_model_is_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    def load(_: EngineOptions, tell: Callable[[str, int, int], None]) -> None:
        tell("weights", 1, 2)
        tell("weights", 2, 2)
        raise ModelError("m", "that is all")

    monkeypatch.setattr(model_side, "load_engine", load)
    start = StartEngine(encode_options(EngineOptions()), encode_options(BatcherOptions()))
    async with trio.open_nursery() as nursery:
        with pytest.raises(ModelError, match="that is all"):
            await open_batcher(nursery, start, lambda *step: told.append(step), lambda *_: None)
    await wait_all_tasks_blocked()
    assert told == [("weights", 1, 2), ("weights", 2, 2)]
