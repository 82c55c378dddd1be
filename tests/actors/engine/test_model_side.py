"""What a new engine loads of what the one before it had."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genbatch.actors.engine.child_process import AdapterSource
from genbatch.actors.engine.model_side import _load_again
from genbatch.nif.errors import AdapterError


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
    assert "/there/changed is not what it was" in changed and "/there/gone is gone" in gone
