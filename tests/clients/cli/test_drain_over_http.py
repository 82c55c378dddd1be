"""SIGTERM while streams of all four HTTP APIs run: each stream ends in its API's shape, and the service exits."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from tests.actors.service.running_service import TIMEOUT_S, RunningService, kill
from tests.tool_models import tool_model

Events = list[dict[str, Any]]
TOKENS = 800
# While there is a file "slow" beside it the streams take 80 s and more; without it they take two.
SCHEDULER = """
import time
from pathlib import Path

from genbatch.actors.scheduling.scheduler import FIFOScheduler

SLOW = Path(__file__).with_name("slow")

class Slowed(FIFOScheduler):
    def schedule(self, fitting_requests, inflight_request_ids):
        if SLOW.exists():
            time.sleep(0.1)
        return super().schedule(fitting_requests, inflight_request_ids)
"""
USER = [{"role": "user", "content": "to be"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "to be", "max_tokens": TOKENS},
    "/v1/chat/completions": {"messages": USER, "max_tokens": TOKENS},
    "/v1/responses": {"input": "to be", "max_output_tokens": TOKENS},
    "/v1/messages": {"messages": USER, "max_tokens": TOKENS},
}


def text_and_end(path: str, events: Events) -> tuple[str, str, int]:
    """The text of a stream's events, why it ended, and the completion tokens it was charged for.

    Raises:
        KeyError, AssertionError: the stream does not end as the API asks.
    """
    last = events[-1]
    if path == "/v1/completions":
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return text, reasons[-1], last["usage"]["completion_tokens"]
    if path == "/v1/chat/completions":
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, choices[-1]["finish_reason"], last["usage"]["completion_tokens"]
    if path == "/v1/responses":
        assert last["type"] == "response.incomplete", last
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        answer = last["response"]
        assert answer["output"][0]["content"][0]["text"] == text
        return text, answer["incomplete_details"]["reason"], answer["usage"]["output_tokens"]
    assert last["type"] == "message_stop", last
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    (delta,) = [event for event in events if event["type"] == "message_delta"]
    return text, delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]


ENDS = dict(zip(ASKED, ("length", "length", "max_output_tokens", "max_tokens"), strict=True))


async def stream(client: httpx2.AsyncClient, path: str, begun: Callable[[], None]) -> Events:
    """All events of a stream; `begun` is called at the first one with text."""
    more: dict[str, Any] = {"temperature": 0, "stream": True}
    if path in ("/v1/completions", "/v1/chat/completions"):
        more |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    events: Events = []
    async with client.stream("POST", path, json=ASKED[path] | more) as response:
        assert response.status_code == 200, await response.aread()
        is_done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if re.search(r'"(text|content|delta)": ?"[^"]', line):
                    begun()
        assert is_done == ("stream_options" in more)
    return events


async def refused(client: httpx2.AsyncClient, path: str) -> None:
    """Asks until the service drains, and looks at the refusal."""
    body = ASKED[path] | {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 16}
    while (response := await client.post(path, json=body)).status_code == 200:
        pass  # the signal is still on its way to the gateway
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert error["message"], error


@pytest.mark.trio
@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_drain_ends_the_streams_of_every_api_in_their_shape_and_refuses_what_is_new(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, is_cut: bool
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    (tmp_path / "slowed_scheduler.py").write_text(SCHEDULER)
    timeout = "0.5" if is_cut else "3600"
    flags = ("--http", ":0", "--scheduler", "slowed_scheduler:Slowed", "--shutdown-timeout-s", timeout)
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model")
    with RunningService(model, tmp_path, *flags) as service:
        port = int(re.search(r"http://[\d.]+:(\d+)", service.log)[1])  # type: ignore[index]
        events: dict[str, Events] = {}
        all_begun = trio.Event()
        begun: set[str] = set()

        async def ask(path: str) -> None:
            def note() -> None:
                begun.add(path)
                if len(begun) == len(ASKED):
                    all_begun.set()

            events[path] = await stream(client, path, note)

        with trio.fail_after(TIMEOUT_S):
            async with (
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=TIMEOUT_S) as client,
                trio.open_nursery() as nursery,
            ):
                for path in ASKED:
                    nursery.start_soon(ask, path)
                await all_begun.wait()
                kill(service.process.pid, signal.SIGTERM)
                await trio.to_thread.run_sync(service.wait_for, " stopping ")
                if not is_cut:
                    for path in ASKED:
                        await refused(client, path)
                    slow.unlink()
            assert await trio.to_thread.run_sync(service.process.wait, TIMEOUT_S) == 0
    assert "Traceback" not in service.log
    for path, reason in ENDS.items():
        text, end, num_tokens = text_and_end(path, events[path])
        assert end == reason and text and (0 < num_tokens < TOKENS) == is_cut and num_tokens <= TOKENS, path
