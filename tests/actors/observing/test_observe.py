"""The log of a service: JSON for machines, text for people, a request's id in its lines, and no prompt in any."""

import io
import json
import logging
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from genbatch.actors.observing import observe as observe_module
from genbatch.actors.observing import tracing
from genbatch.actors.observing.observe import LogFormat, LogLevel, log_event, log_telemetry, start_logging
from genbatch.actors.runtime.telemetry import Telemetry

NAMES = {"request_id": "zeromq:1/7", "client": "zeromq:1", "tenant": "", "model": "tiny"}


@pytest.fixture(autouse=True)
def _plain_logs(logging_restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_LOG_FORMAT", "text")
    monkeypatch.setenv("GENBATCH_LOG_LEVEL", "info")


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def telemetry_of(log_format: LogFormat, level: LogLevel = "info") -> Telemetry:
    start_logging(log_format, level)
    telemetry = Telemetry()
    log_telemetry(telemetry)
    return telemetry


def test_a_request_s_end_is_one_json_object_with_its_id_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = telemetry_of("json")
    telemetry.execute("request.accepted", {"tokenize_s": 0.1}, NAMES)
    telemetry.execute("request.finished", {"e2e_s": 1.23456789}, {**NAMES, "reason": "stop", "code": ""})
    [line] = map(json.loads, written(capsys))
    assert line["event"] == "request.finished" and line["level"] == "info"
    assert (line["request_id"], line["client"], line["reason"]) == ("zeromq:1/7", "zeromq:1", "stop")
    assert line["e2e_s"] == 1.234568
    assert line["timestamp"].endswith("Z")


def test_at_level_debug_every_event_of_a_request_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = telemetry_of("json", "debug")
    for event in ("accepted", "started", "first_token", "preempted", "finished"):
        telemetry.execute(f"request.{event}", {}, NAMES)
    telemetry.execute("step.end", {}, {})
    lines = [json.loads(line) for line in written(capsys)]
    assert [line["event"].removeprefix("request.") for line in lines] == [
        "accepted", "started", "first_token", "preempted", "finished",
    ]  # fmt: skip
    assert all(line["request_id"] == "zeromq:1/7" for line in lines)


def test_libraries_lines_and_warnings_take_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().setLevel(logging.DEBUG)  # as a library may have asked for
    telemetry_of("json")
    logging.getLogger("hypercorn").warning("%d connections", 3)
    logging.getLogger("hypercorn").info("not told")
    logging.getLogger("genbatch.nif").info("told")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("trio").exception("failed")
    lines: list[dict[str, Any]] = [json.loads(line) for line in written(capsys)]
    assert [line["logger"] for line in lines] == ["hypercorn", "genbatch.nif", "py.warnings", "trio"]
    assert lines[0]["event"] == "3 connections"
    assert "careful" in lines[2]["event"]
    assert "ValueError: inside" in lines[3]["exception"]


def test_text_is_one_line_an_event_whatever_a_client_says(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = telemetry_of("text")
    log_event("ready", model="a model", address="ipc:///x")
    telemetry.execute("request.finished", {}, {**NAMES, "tenant": "x\n2026 info forged"})
    logging.getLogger("genbatch").warning("two\nlines")
    first, second, third = written(capsys)
    assert first.endswith("Z info    ready model='a model' address=ipc:///x")
    assert "tenant='x\\n2026 info forged'" in second
    assert third.endswith("warning two\\nlines")


def test_a_process_that_is_started_later_logs_alike(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("json", "error")
    assert (os.environ["GENBATCH_LOG_FORMAT"], os.environ["GENBATCH_LOG_LEVEL"]) == ("json", "error")
    start_logging()
    log_event("not told")
    logging.getLogger("genbatch").error("told")
    [line] = map(json.loads, written(capsys))
    assert line["event"] == "told"


def test_logging_that_is_started_twice_says_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry_of("text")
    telemetry_of("text")
    log_event("once")
    assert len(written(capsys)) == 1


def test_lines_are_dropped_and_counted_while_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read, written_end = os.pipe()
    os.set_blocking(written_end, False)  # else a handler that writes to the full pipe would wait for ever
    with open(read, "rb", buffering=0) as pipe, open(written_end, "w", encoding="utf-8") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        start_logging("text", "info")
        for number in range(5000):
            log_event("asked", number=number)
        before = pipe.read(2**20).decode().splitlines()
        log_event("asked", number=5000)
        after = pipe.read(2**20).decode().splitlines()
    assert all(line.endswith(f"number={number}") for number, line in enumerate(before))
    assert f"{5000 - len(before)} lines of the log were dropped" in after[0]
    assert after[1].endswith("number=5000") and len(after) == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_a_line_takes_the_place_of_a_bar(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    start_logging("text", "info")
    screen.write("Loading the model ━━━━")  # by another process, which draws it again
    logging.getLogger("genbatch").warning("runs in torch")
    assert ("━━━━\r\x1b[2K2" in screen.getvalue()) == is_terminal
    assert screen.getvalue().endswith(" runs in torch\n")


@pytest.mark.trio
@pytest.mark.parametrize("is_on", [False, True])
async def test_requests_are_traced_where_it_was_asked_for_and_the_last_spans_leave(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(observe_module._OTEL_VARIABLE, "1" if is_on else "")
    said: list[str] = []
    provider = SimpleNamespace(shutdown=lambda: said.append("shut down"))
    monkeypatch.setattr(tracing, "open_provider", lambda: said.append("opened") or provider)
    monkeypatch.setattr(tracing, "trace_requests", lambda *_: lambda: said.append("detached"))
    async with trio.open_nursery() as nursery:
        await nursery.start(observe_module.observe, Telemetry())
        assert said == (["opened"] if is_on else [])
        nursery.cancel_scope.cancel()
    assert said == (["opened", "shut down", "detached"] if is_on else [])
