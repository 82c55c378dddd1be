"""The clients that people use, unchanged, over a tiny model; docs/clients.md says what was tried.

Clients that want older packages than the others have an environment of their own. `make clients` makes it, and writes
the table anew with what was measured.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.actors.gateways.http.agent_programs import AGENTS, installed
from tests.actors.gateways.threaded_service import threaded_service
from tests.agent_model import ANSWER, POSITIONS, agent_model
from tests.tool_models import tool_model

ROOT = Path(__file__).resolve().parents[4]
TABLE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->\n"
PROGRAMS = Path(__file__).with_name("client_programs.py")
sys.path.append(str(PROGRAMS.parent))  # the programs run as scripts, so they import each other by bare names
from client_programs import TRIED  # noqa: E402

AGENT_PROGRAMS = Path(__file__).with_name("agent_programs.py")
# By the environment that they are in: the tests' own, and the one that `make clients` makes.
OTHERS = ROOT / ".venv-clients" / "bin" / "python"
# By the client, its program for node, and the package that the program needs.
NODE_PROGRAMS = {"ai": ("ai_sdk.mjs", "@ai-sdk/openai-compatible"), "ollama-js": ("ollama_sdk.mjs", "ollama")}
NODE = {
    "ai": ("Output.object with tools", "Output.object with tools, streamed"),
    "ollama-js": ("chat, whole and streamed", "generate, structured", "a stream that is aborted", "list, ps and show"),
}
ROWS: dict[str, Any] = {**TRIED, **NODE, **AGENTS}
MODULES = {"openai": "openai", "anthropic": "anthropic", "langchain-openai": "langchain_openai",
           "pydantic-ai": "pydantic_ai", "langchain": "langchain", "langgraph": "langgraph",
           "openai-agents": "agents"}  # fmt: skip
ELSEWHERE = (
    *("smolagents", "litellm", "llama-index", "instructor", "haystack", "semantic-kernel", "ollama", "mistralai"),
)
APART = ("dspy", "autogen-agentchat", "crewai")  # each in an environment of its own
# A tiny model's tokens are single letters, and the prompts of agents have thousands of these.
POSITIONS_OF_PROMPTS = 16384


@pytest.fixture(scope="module")
def url(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    model = tool_model(tiny_model_dir("llama"), folder / "model", positions=POSITIONS_OF_PROMPTS)
    with threaded_service(model, http=":0") as service:
        yield f"{service.addresses[0]}/v1"


@pytest.fixture(scope="module")
def agent_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = agent_model(tmp_path_factory.mktemp("agents") / "model")
    with threaded_service(model, n_ctx=POSITIONS, http=":0") as service:
        yield f"{service.addresses[0]}/v1"


def run_client(client: str, url: str) -> dict[str, Any]:
    """What a client's programs say, in an environment that has it; skips where none does."""
    python = sys.executable
    if client in ELSEWHERE or client in APART:
        found = OTHERS.parents[1] / client / "bin" / "python" if client in APART else OTHERS
        if not found.exists():
            pytest.skip(f"{client} has an environment of its own; make clients")
        python = str(found)
    elif importlib.util.find_spec(MODULES[client]) is None:
        pytest.skip(f"{client} is not installed; pip install {client}")
    # litellm would fetch its list of prices, and haystack and crewai would tell their makers.
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False", "PYTHONPATH": ""}
    own |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}
    environment = {**os.environ, **own}
    command = [python, "-W", "ignore", str(PROGRAMS), client, url]
    return _said(command, environment)


def run_agent(agent: str, url: str) -> dict[str, Any]:
    """What an agent's programs say; skips where they are not installed."""
    folder = OTHERS.parents[1]
    if not installed(agent, folder):
        pytest.skip(f"{agent} is not installed; make clients, with npm")
    return _said([str(OTHERS), str(AGENT_PROGRAMS), agent, url, str(folder)], {**os.environ, "PYTHONPATH": ""})


def run_node(client: str, url: str) -> dict[str, Any]:
    """What a program for node says; skips where node or the client is missing."""
    program, package = NODE_PROGRAMS[client]
    node, folder = shutil.which("node"), OTHERS.parents[1] / "npm"
    if node is None or not (folder / "node_modules" / package).exists():
        pytest.skip(f"the npm package {package} is not installed; make clients, with npm")
    command = [node, str(Path(__file__).with_name(program)), url, str(folder)]
    return _said(command, {**os.environ, "NO_PROXY": "127.0.0.1"})


def _said(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
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
    return "\n".join([before + BEGIN + head, rule, *(named[each] for each in ROWS if each in named), END + after])


@pytest.mark.parametrize("client", TRIED)
def test_a_client_runs_unchanged_and_its_row_says_what_was_tried(client: str, url: str) -> None:
    check_row(client, run_client(client, url))


@pytest.mark.parametrize("client", NODE)
def test_a_client_for_node_runs_unchanged_and_its_row_says_what_was_tried(client: str, url: str) -> None:
    check_row(client, run_node(client, url))


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_program_ends_a_turn_and_its_row_says_what_was_tried(agent: str, agent_url: str) -> None:
    check_row(agent, run_agent(agent, agent_url))


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("chat/completions", {}, {"type": "function", "function": {"name": "bash"}}),
        ("responses", {}, {"type": "function", "name": "exec_command"}),
        ("messages", {"max_tokens": 32000}, {"name": "Bash", "input_schema": {"type": "object"}}),
    ],
)
def test_the_agents_model_asks_for_a_tool_that_is_offered_and_else_ends_the_turn(
    path: str, body: dict[str, Any], tool: dict[str, Any], agent_url: str
) -> None:
    messages = [{"role": "user", "content": "Well?"}]
    body |= {"input": messages} if path == "responses" else {"messages": messages}
    with httpx2.Client(trust_env=False, timeout=60) as client:
        asked, told = [client.post(f"{agent_url}/{path}", json=body | more) for more in ({"tools": [tool]}, {})]
    assert "touch was-here" in asked.text and ANSWER not in asked.text
    assert ANSWER in told.text and "touch was-here" not in told.text


def check_row(client: str, said: dict[str, Any]) -> None:
    """Writes or compares a client's row of the table."""
    assert not said["failed"], "\n".join(f"{what}: {why}" for what, why in said["failed"].items())
    assert said["passed"] == list(ROWS[client])
    if os.environ.get("WRITE_CLIENTS"):
        TABLE.write_text(with_row(TABLE.read_text(), client, said))
    (row,) = re.findall(rf"^\| {re.escape(client)} \| [^|]+ \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    assert row == "; ".join(said["passed"]), "make clients writes it anew"


def test_every_client_of_the_table_is_tried() -> None:
    _, _, rest = TABLE.read_text().partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert end and re.findall(r"^\| ([\w-]+) \| \d", table, re.MULTILINE) == list(ROWS)
