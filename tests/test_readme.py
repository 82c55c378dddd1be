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
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def run(example: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", example],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(address: str) -> Iterator[None]:
    """`genbatch serve` as the README starts it, at another address."""
    start = "from genbatch.clients.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "serve", "smollm2", "--bind", address],
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
            if address in line:
                break
        else:
            pytest.fail("".join(printed))
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_every_kind_of_example_is_there() -> None:
    assert len(EXAMPLES) == 3
    assert [
        name in example
        for name, example in zip(("open_batcher", "SyncZeroMQClient", "OfflineScheduler"), EXAMPLES, strict=True)
    ] == [True] * 3


def test_the_embedding_example() -> None:
    assert "The capital of France is Paris. stop" in run(EXAMPLES[0])


def test_the_zeromq_example(tmp_path: Path) -> None:
    assert ADDRESS in EXAMPLES[1]
    address = f"ipc://{tmp_path}/zeromq.sock"
    with served(address):
        printed = run(EXAMPLES[1].replace(ADDRESS, address))
    assert "Usage(prompt_tokens=" in printed


def test_r06_the_offline_example() -> None:
    printed = run(EXAMPLES[2])
    assert printed.startswith("{0: ' Paris")
