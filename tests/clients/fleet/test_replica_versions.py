"""Which of two versions of a fleet's replicas is the later one."""

import time

import pytest

from genbatch.clients.fleet.ray_replicas import new_version


def test_a_new_version_is_the_latest_also_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000 * 10**9)
    first = new_version((), "a")
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000 * 10**9)
    second = new_version({first}, "b")
    assert first < second < new_version({first, second}, "c")
