"""Telemetry: listeners come and go, and cannot hurt what they listen to."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from genbatch.actors.runtime import telemetry as telemetry_module
from genbatch.actors.runtime.telemetry import Telemetry


def test_every_listener_gets_each_event_until_it_detaches() -> None:
    telemetry = Telemetry()
    first: list[object] = []
    second: list[object] = []
    assert not telemetry.handlers
    detach = telemetry.attach(lambda *event: first.append(event))
    telemetry.attach(lambda *event: second.append(event))
    telemetry.execute("actor.stop", {"duration_s": 1.5}, {"name": "a"})
    detach()
    detach()
    telemetry.execute("actor.start", {}, {"name": "b"})
    assert first == [("actor.stop", {"duration_s": 1.5}, {"name": "a"})]
    assert second == [*first, ("actor.start", {}, {"name": "b"})]
    assert telemetry.handlers


def test_a_failing_listener_is_logged_and_detached_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = Telemetry()
    heard: list[str] = []

    def broken(event: str, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
        raise ValueError("a bug in the listener")

    telemetry.attach(broken)
    telemetry.attach(lambda event, measurements, metadata: heard.append(event))
    with caplog.at_level(logging.ERROR):
        telemetry.execute("one", {}, {})
        telemetry.execute("two", {}, {})
    assert heard == ["one", "two"]
    assert len(caplog.records) == 1
    assert "a bug in the listener" in caplog.text


def test_the_documented_events_are_those_the_runtime_emits() -> None:
    documented = set(re.findall(r"^    ((?:actor|supervisor)\.\w+)", telemetry_module.__doc__ or "", re.MULTILINE))
    emitted: set[str] = set()
    for stem in ("actor", "supervisor", "worker"):
        source = Path(telemetry_module.__file__).with_name(f"{stem}.py").read_text()
        emitted.update(re.findall(r'"((?:actor|supervisor)\.\w+)"', source))
    assert documented == emitted
