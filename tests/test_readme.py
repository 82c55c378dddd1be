"""The README's examples run as they stand there, on the real model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
ADDRESS = "ipc:///tmp/genbatch/zeromq.sock"
HTTP = "http://127.0.0.1:8000"
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def run(example: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", example],
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(address: str, *flags: str) -> Iterator[list[str]]:
    """`genbatch serve` as the README starts it, at another address; what it has printed."""
    start = "from genbatch.clients.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "serve", "smollm2", "--bind", address, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("╰"):  # the end of the banner
                break
        else:
            pytest.fail("".join(printed))
        yield printed
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
        assert process.returncode == 0


def test_every_kind_of_example_is_there() -> None:
    kinds = ("open_batcher", "SyncZeroMQClient", "OpenAI", "OfflineScheduler")
    assert len(EXAMPLES) == len(kinds)
    assert [name in example for name, example in zip(kinds, EXAMPLES, strict=True)] == [True] * len(kinds)


def test_the_embedding_example() -> None:
    assert "The capital of France is Paris. stop" in run(EXAMPLES[0])


def test_the_examples_of_the_service(tmp_path: Path) -> None:
    assert ADDRESS in EXAMPLES[1] and HTTP in EXAMPLES[2]
    address = f"ipc://{tmp_path}/zeromq.sock"
    with served(address, "--http", "127.0.0.1:0") as printed:
        assert "Usage(prompt_tokens=" in run(EXAMPLES[1].replace(ADDRESS, address))
        [http] = re.findall(r"http://127\.0\.0\.1:\d+", "".join(printed))
        assert run(EXAMPLES[2].replace(HTTP, http)) == "The capital of France is Paris."


def test_r06_the_offline_example() -> None:
    printed = run(EXAMPLES[3])
    assert printed.startswith("{0: ' Paris")
