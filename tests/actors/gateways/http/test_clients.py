"""The clients that people use, unchanged, over a tiny model; docs/clients.md says what was tried.

Clients that want older packages than the others have an environment of their own. `make clients` makes it, and writes
the table anew with what was measured.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.gateways.http.client_programs import TRIED
from tests.actors.gateways.threaded_service import threaded_service
from tests.tool_models import tool_model

ROOT = Path(__file__).resolve().parents[4]
TABLE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->\n"
PROGRAMS = Path(__file__).with_name("client_programs.py")
# By the environment that they are in: the tests' own, and the one that `make clients` makes.
OTHERS = ROOT / ".venv-clients" / "bin" / "python"
MODULES = {"openai": "openai", "anthropic": "anthropic", "langchain-openai": "langchain_openai",
           "pydantic-ai": "pydantic_ai"}  # fmt: skip
ELSEWHERE = ("litellm", "llama-index", "instructor")


@pytest.fixture(scope="module")
def url(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("clients") / "model")
    with threaded_service(model, http=":0") as service:
        yield f"{service.addresses[0]}/v1"


def run_client(client: str, url: str) -> dict[str, Any]:
    """What a client's programs say, in an environment that has it; skips where none does."""
    python = sys.executable
    if client in ELSEWHERE:
        if not OTHERS.exists():
            pytest.skip(f"{client} needs an older openai package than the other clients; make clients")
        python = str(OTHERS)
    elif importlib.util.find_spec(MODULES[client]) is None:
        pytest.skip(f"{client} is not installed; pip install {client}")
    # litellm would fetch its list of prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    command = [python, "-W", "ignore", str(PROGRAMS), client, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def with_row(text: str, client: str, said: dict[str, Any]) -> str:
    """`text` with a client's row as it was measured, in the order of the programs."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    head, rule, *rows = table.splitlines()
    named = {row.split(" | ")[0].removeprefix("| "): row for row in rows}
    named[client] = f"| {client} | {said['version']} | {'; '.join(said['passed'])} |"
    return "\n".join([before + BEGIN + head, rule, *(named[each] for each in TRIED if each in named), END + after])


@pytest.mark.parametrize("client", TRIED)
def test_a_client_runs_unchanged_and_its_row_says_what_was_tried(client: str, url: str) -> None:
    said = run_client(client, url)
    assert not said["failed"], "\n".join(f"{what}: {why}" for what, why in said["failed"].items())
    assert said["passed"] == list(TRIED[client])
    if os.environ.get("WRITE_CLIENTS"):
        TABLE.write_text(with_row(TABLE.read_text(), client, said))
    (row,) = re.findall(rf"^\| {re.escape(client)} \| [^|]+ \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    assert row == "; ".join(said["passed"]), "make clients writes it anew"


def test_every_client_of_the_table_is_tried() -> None:
    _, _, rest = TABLE.read_text().partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert end and re.findall(r"^\| ([\w-]+) \| \d", table, re.MULTILINE) == list(TRIED)
