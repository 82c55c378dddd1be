"""The FastAPI example under uvicorn: answers are streamed, and a client that goes away frees its sequence."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.tool_models import tool_model
from tests.waiting import ENGINE_PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fastapi_app.py"


@pytest.fixture(scope="module")
def port(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    model = tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("fastapi") / "model")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    with subprocess.Popen([sys.executable, str(EXAMPLE), str(model), str(port)]) as server:
        try:
            until(lambda: is_up(port))
            assert server.poll() is None
            yield port
        finally:
            server.terminate()
            assert server.wait(30) in (0, -15)


def until(is_true: Callable[[], bool]) -> None:
    """Waits beside a real engine."""
    end = time.monotonic() + ENGINE_PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_up(port: int) -> bool:
    try:
        get(port, "/stats")
    except ConnectionError:
        return False
    return True


def get(port: int, path: str) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        body = connection.getresponse().read()
    finally:
        connection.close()
    return json.loads(body) if path == "/stats" else body.decode()


def test_an_answer_is_streamed_and_is_the_same_again(port: int) -> None:
    first = get(port, "/ask?question=Hello&max_tokens=8")
    assert first and first == get(port, "/ask?question=Hello&max_tokens=8")


def test_a_client_that_goes_away_frees_its_sequence(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/ask?question=Hello&max_tokens=100000")
    response = connection.getresponse()
    assert response.read(1)
    response.close()
    connection.close()
    until(lambda: get(port, "/stats")["finished"].get("cancelled") == 1)
    assert get(port, "/stats")["requests_running"] == 0
