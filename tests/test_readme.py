"""The examples of the README and of docs/guide.md run as they stand there, on the real model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for page in ("README.md", "docs/guide.md")
}
HTTP = "http://127.0.0.1:8000"
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def test_the_readme_says_where_make_demo_puts_the_command() -> None:
    assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text()
    assert re.search(r"^make demo +# .*\.venv/bin/genbatch", (ROOT / "README.md").read_text(), re.MULTILINE)


def run(example: str, runtime: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", example],
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT if runtime is None else {**ENVIRONMENT, "XDG_RUNTIME_DIR": str(runtime)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(runtime: Path, *flags: str) -> Iterator[list[str]]:
    """`genbatch serve` as the README starts it, in another runtime directory; what it has printed."""
    start = "from genbatch.clients.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "serve", "smollm2", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(runtime), "XDG_CONFIG_HOME": str(runtime)},
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
    kinds = {
        "README.md": ("open_batcher", "SyncZeroMQClient", "OpenAI"),
        "docs/guide.md": ("open_batcher", "open_batcher", "SyncZeroMQClient", "OfflineScheduler"),
    }
    for page, names in kinds.items():
        assert [name in example for name, example in zip(names, EXAMPLES[page], strict=True)] == [True] * len(names)


@pytest.mark.long
def test_the_embedding_examples() -> None:
    assert "The capital of France is Paris. stop" in run(EXAMPLES["README.md"][0])
    assert run(EXAMPLES["docs/guide.md"][0]).startswith(" Paris")
    assert run(EXAMPLES["docs/guide.md"][1]).startswith(" Paris")


def test_the_examples_of_the_service(tmp_path: Path) -> None:
    (_, over_zeromq, over_http), (_, _, guides, _) = EXAMPLES["README.md"], EXAMPLES["docs/guide.md"]
    assert HTTP in over_http
    with served(tmp_path, "--http", "127.0.0.1:0") as printed:
        for example in {over_zeromq, guides}:
            assert "Usage(prompt_tokens=" in run(example, tmp_path)
        [http] = re.findall(r"http://127\.0\.0\.1:\d+", "".join(printed))
        assert run(over_http.replace(HTTP, http)) == "The capital of France is Paris."


def test_r06_the_offline_example() -> None:
    printed = run(EXAMPLES["docs/guide.md"][3])
    assert printed.startswith("{0: ' Paris")


def test_no_page_points_at_a_file_that_is_not_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "ADRs").glob("*.md")]
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not dead


def test_the_readme_fits_on_two_pages() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
