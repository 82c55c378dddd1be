"""`genbatch top`: the screen at two sizes, from a real Batcher's stats, and what a hostile name can do to it."""

import io
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console
from typer.testing import CliRunner

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import start
from genbatch.clients.cli import stats as stats_commands
from genbatch.clients.cli.main import app
from genbatch.clients.cli.stats import TopHistory, stats_table, top_screen
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.messages import GenerateRequest, Token
from genbatch.proto.service_messages import StatsRequest


async def stats_in_mid_run(model: Model) -> dict[str, Any]:
    """A Batcher's stats while two requests of two tenants run."""
    options = BatcherOptions(n_parallel=4, batch_size=2, batch_timeout=1e6)

    def open_context() -> Context:
        return Context(model, TorchRunner(model), n_ctx=512, n_parallel=4, n_held=4, block_size=4, n_batch=64)

    async with trio.open_nursery() as nursery:
        ref = await start(nursery, Batcher(open_context, options), name="batcher")
        seen = trio.Event()

        async def ask(tenant: str) -> None:
            def on_token(token: Token) -> None:
                if token.index == 2:
                    seen.set()

            asked = GenerateRequest(token_ids=[5, 6, 7, 8], max_tokens=120, ignore_eos=True, tenant=tenant)
            await ref.call(Generate(asked, on_token, client="zeromq:7"), timeout=None)

        async with trio.open_nursery() as asking:
            for tenant in ("acme", "umbrella"):
                asking.start_soon(ask, tenant)
            await seen.wait()
            stats: dict[str, Any] = await ref.call(StatsRequest(), control=True)
            asking.cancel_scope.cancel()
        await ref.stop()
    return stats


def drawn(history: TopHistory, width: int, height: int, **options: str) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(top_screen(history, "ipc:///x.sock", width, height, **options))
    lines = console.export_text().splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    return lines


@pytest.mark.trio
async def test_slots_of_a_running_batcher_are_on_the_screen_at_both_sizes(tiny_model: Callable[[str], Model]) -> None:
    stats = await stats_in_mid_run(tiny_model("llama"))
    assert {slot["tenant"] for slot in stats["slots"]} == {"acme", "umbrella"}
    for slot in stats["slots"]:
        assert slot["phase"] == "decoding" and slot["prompt_tokens"] == 4 and 0 < slot["generated_tokens"] < 120
    history = TopHistory()
    history.add({**stats, "generation_tokens": 0}, 0.0)
    history.add({**stats, "generation_tokens": 50}, 2.0)
    for width, height in ((80, 24), (130, 44)):
        screen = drawn(history, width, height)
        text = "\n".join(screen)
        assert "2/4" in text and "25 tok/s decoded" in text and "acme" in text and "umbrella" in text
        assert "…" not in text
        assert ("zeromq:7" in text) is (width == 130), "the client has a column where there is room"
        assert screen[-1].strip() == "q quits"


def a_slot(number: int, **changed: object) -> dict[str, Any]:
    slot = {
        "slot": number,
        "request_id": "r",
        "client": "c",
        "tenant": "",
        "phase": "prefilling",
        "seconds": 0.25,
        "prompt_tokens": 10,
        "computed_tokens": 5,
        "generated_tokens": 0,
        "max_tokens": 9,
        "tokens_per_s": None,
    }
    return {**slot, **changed}


@pytest.fixture
def stats() -> dict[str, Any]:
    tokens = {"requests": 1, "running": 1, "prompt_tokens": 1}
    return {
        "model": "tiny",
        "runner": "torch",
        "requests_running": 1,
        "requests_waiting": 3,
        "n_parallel": 64,
        "kv_blocks_used": 9,
        "kv_blocks_max": 10,
        "finished": {},
        "refused": 0,
        "preemptions": 0,
        "swaps": 0,
        "decode_tokens_per_s": 5.0,
        "prefill_tokens_per_s": 1.0,
        "generation_tokens": 100,
        "slots": [a_slot(0)],
        "ttft_p50": 0.01,
        "ttft_p99": 2.5,
        "latency_p50": None,
        "latency_p99": None,
        "tenants": {"a": {**tokens, "generation_tokens": 75}, "b": {**tokens, "generation_tokens": 25}},
    }


def test_more_slots_than_lines_are_counted_at_the_end(stats: dict[str, Any]) -> None:
    history = TopHistory()
    history.add({**stats, "slots": [a_slot(number) for number in range(64)], "requests_running": 70}, 0.0)
    text = "\n".join(drawn(history, 80, 24))
    shown = sum(f" {number}  prefilling" in text for number in range(64))
    assert 8 < shown < 20 and f"and {70 - shown} more" in text


def test_a_name_cannot_command_the_terminal(stats: dict[str, Any]) -> None:
    history = TopHistory()
    evil = a_slot(0, client="\x1b]0;owned\x07[bold]x", tenant="a\nb\x9b2J")
    history.add({**stats, "slots": [evil], "model": "\x1b[2Jm"}, 0.0)
    output = io.StringIO()
    Console(width=130, height=30, file=output).print(top_screen(history, "ipc:///x", 130, 30, error="\x1b[2Jbad"))
    assert not {"\x1b", "\x07", "\x9b"} & set(output.getvalue())
    assert "[bold]x" in output.getvalue()


def test_shares_and_pace_are_those_since_the_last_look(stats: dict[str, Any]) -> None:
    history = TopHistory()
    history.add(stats, 10.0)
    assert history.shares == [("a", 0.75), ("b", 0.25)] and not history.rates
    later = deepcopy(stats)
    later["tenants"]["b"]["generation_tokens"] += 30
    later["generation_tokens"] += 30
    history.add(later, 12.0)
    assert history.shares == [("b", 1.0)] and list(history.rates) == [15.0]
    history.add(later, 13.0)
    assert history.shares == [("b", 1.0)] and list(history.rates) == [15.0, 0.0]
    history.add(stats, 14.0)  # fewer than before: the service was started anew
    assert history.shares == [("a", 0.75), ("b", 0.25)]


def test_without_an_answer_the_screen_says_why(stats: dict[str, Any]) -> None:
    assert "waiting for the service" in "\n".join(drawn(TopHistory(), 80, 24))
    history = TopHistory()
    history.add(stats, 0.0)
    assert "does not answer" in "\n".join(drawn(history, 80, 24, error="the service does not answer"))


def test_top_needs_a_terminal_and_says_what_else_there_is() -> None:
    result = CliRunner().invoke(app, ["top", "--connect", "ipc:///nowhere"])
    assert result.exit_code == 2 and "genbatch stats --json" in result.stderr


@pytest.mark.trio
async def test_the_stats_table_has_no_raw_structures(tiny_model: Callable[[str], Model]) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(stats_table(await stats_in_mid_run(tiny_model("llama"))))
    text = console.export_text()
    assert "histograms" not in text and "request_id" not in text
    assert "recent decode, tok/s" in text and "swaps" not in text


@pytest.mark.trio
async def test_while_the_engine_is_down_the_screen_keeps_what_it_had(stats: dict[str, Any]) -> None:
    answers = iter((stats, {"engine": "down", "engine_restarts": 1}))

    class Service:
        async def stats(self) -> dict[str, Any]:
            return next(answers)

    history = TopHistory()
    assert not await stats_commands._look(Service(), history)  # type: ignore[arg-type]  # it has no more of a client
    assert await stats_commands._look(Service(), history) == "the engine is down"  # type: ignore[arg-type]
    assert history.stats == stats
    answers = iter(({"engine": "unloaded", "model": "a"},))
    assert await stats_commands._look(Service(), history) == "a is unloaded; a request loads it"  # type: ignore[arg-type]


@pytest.mark.trio
async def test_of_several_models_one_is_watched_and_the_others_are_named(stats: dict[str, Any]) -> None:
    class Service:
        async def stats(self) -> dict[str, Any]:
            return {"by_model": {name: {**stats, "model": name} for name in ("a", "b")}}

    for asked, watched, other in (("", "a", "b"), ("b", "b", "a")):
        history = TopHistory()
        assert not await stats_commands._look(Service(), history, asked)  # type: ignore[arg-type]
        screen = drawn(history, 80, 24)
        assert f" {watched} · " in screen[0] and f"--model shows another: {other}" in screen[-1]
    assert await stats_commands._look(Service(), TopHistory(), "c") == "no model c is served; there are a, b"  # type: ignore[arg-type]


@pytest.mark.trio
@pytest.mark.parametrize("key", [b"q", b"Qx", b""], ids=["q", "Qx", "no terminal any more"])
async def test_q_quits_and_no_other_key_does(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "wb", buffering=0) as keyboard, trio.fail_after(100):
        monkeypatch.setattr(sys, "stdin", stdin)
        async with trio.open_nursery() as nursery:
            screen = trio.CancelScope()
            nursery.start_soon(stats_commands._quit_on_q, screen)
            keyboard.write(b"xq")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not screen.cancel_called
            keyboard.write(key) if key else keyboard.close()
        assert screen.cancel_called


def test_stats_prints_a_table_for_each_model(stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Service:
        def __init__(self, answer: dict[str, Any]) -> None:
            self.answer = answer

        async def __aenter__(self) -> "Service":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def stats(self) -> dict[str, Any]:
            return self.answer

    for answer, models in ((stats, ()), ({"by_model": {"a": stats, "b": stats}}, ("a", "b"))):
        monkeypatch.setattr(stats_commands, "remote_client", lambda *_, answer=answer: Service(answer))
        said = CliRunner().invoke(app, ["stats", "--connect", "tcp://127.0.0.1:1"], env={"COLUMNS": "80"})
        assert said.exit_code == 0, said.output
        assert said.output.count("KV cache") == max(1, len(models))
        assert all(f"─ {model} ─" in said.output for model in models)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0, 7.0])
def test_a_bar_of_progress_is_always_as_wide(share: float) -> None:
    bar = stats_commands._progress(share, "").plain
    assert len(bar) == stats_commands._PROGRESS_WIDTH
    assert bar.count("━") == round(min(share, 1.0) * stats_commands._PROGRESS_WIDTH)


def test_two_looks_at_one_time_give_no_rate() -> None:
    history = TopHistory()
    history.add({"generation_tokens": 0, "tenants": {}}, 1.0)
    history.add({"generation_tokens": 5, "tenants": {}}, 1.0)
    history.add({"generation_tokens": 9, "tenants": {}}, 3.0)
    assert list(history.rates) == [2.0]


@pytest.mark.parametrize(("keys", "screen"), [(True, True), (True, False), (False, True)])
def test_a_screen_needs_a_terminal_for_its_keys_and_for_itself(
    keys: bool, screen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: keys))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: screen))
    assert stats_commands._is_terminal() is (keys and screen)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (1234, "1,234"),
        (0.5, "0.500"),
        ({"stop": 2, "length": 1}, "stop 2, length 1"),
        ({}, "-"),
        ("x", "x"),
    ],
)
def test_a_counter_is_shown_as_a_person_reads_it(value: object, shown: str) -> None:
    assert stats_commands._plain(value) == shown
