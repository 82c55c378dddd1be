"""Agents' programs as people run them: python agent_programs.py CLIENT URL FOLDER.

FOLDER is what `make clients` makes: programs from npm in FOLDER/npm, LiteLLM's proxy in FOLDER/bin. Each program gets
a home of its own, is told not to report anything, and runs unchanged. The model of `tests/agent_model.py` asks for a
tool, the program runs it and sends the result, and the model ends the turn. As `client_programs.py` it prints JSON.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROOF, ANSWER = "was-here", "The work is done."
ASKED = "Make a file"
TIMEOUT_S = 300
Program = Callable[[str, Path], None]
AGENTS: dict[str, dict[str, Program]] = {}
# Where each program is, and where its version stands, below FOLDER.
_NPM = "npm/node_modules"
FILES = {
    "claude-code": (f"{_NPM}/.bin/claude", f"{_NPM}/@anthropic-ai/claude-code/package.json"),
    "codex": (f"{_NPM}/.bin/codex", f"{_NPM}/@openai/codex/package.json"),
    "opencode": (f"{_NPM}/.bin/opencode", f"{_NPM}/opencode-ai/package.json"),
    "llm": ("bin/llm", ""),
    "aider-chat": ("aider/bin/aider", "aider/bin/python"),
    "litellm-proxy": ("bin/litellm", ""),
    "open-webui": ("open-webui/bin/open-webui", "open-webui/bin/python"),
}
# These programs call home otherwise; only loopback is reached here.
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OFFLINE_MODE": "true",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


def tries(agent: str, what: str) -> Callable[[Program], Program]:
    """Puts a function among what is tried with an agent's program."""

    def add(function: Program) -> Program:
        AGENTS.setdefault(agent, {})[what] = function
        return function

    return add


@contextmanager
def home(**more: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """An empty home with a place to work in, and an environment that points to it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        work = Path(directory) / "work"
        work.mkdir()
        yield work, {"PATH": os.environ["PATH"], "HOME": directory, **QUIET, **more}


def run(work: Path, environment: dict[str, str], *command: str) -> str:
    """What a program says; it must end well and have run its tool."""
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert (work / PROOF).exists(), said[-3000:]
    return done.stdout


# Claude Code


def claude_code(url: str, folder: Path, model: str = "model", key: str = "none") -> None:
    """One question, answered after a tool call."""
    with home(ANTHROPIC_BASE_URL=url.removesuffix("/v1"), ANTHROPIC_AUTH_TOKEN=key) as (work, environment):
        said = run(
            work, environment, str(folder / FILES["claude-code"][0]), "-p", ASKED, "--model", model,
            "--output-format", "json", "--allowedTools", "Bash(touch:*)",
        )  # fmt: skip
    result = json.loads(said)
    assert (result["is_error"], result["num_turns"], result["result"]) == (False, 2, ANSWER), result


@tries("claude-code", "a turn with a tool call")
def _(url: str, folder: Path) -> None:
    claude_code(url, folder)


@tries("claude-code", "the same through LiteLLM's proxy, over OpenAI's API and over Anthropic's")
def _(url: str, folder: Path) -> None:
    with litellm_proxy(url, folder) as (proxy, key):
        for model in ("openai", "anthropic"):
            claude_code(proxy, folder, model, key)


# Codex


@tries("codex", "a turn with a tool call")
def _(url: str, folder: Path) -> None:
    provider = f'model_providers.local={{name="local", base_url="{url}", wire_api="responses"}}'
    settings = ('model="model"', 'model_provider="local"', provider, "analytics.enabled=false")
    flags = [part for setting in settings for part in ("-c", setting)]
    with home() as (work, environment):
        # The container of a test has no sandbox of Codex's own.
        said = run(
            work, environment, str(folder / FILES["codex"][0]), "exec", "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox", *flags, ASKED,
        )  # fmt: skip
    assert said.strip().endswith(ANSWER), said


# opencode


@tries("opencode", "a turn with a tool call")
def _(url: str, folder: Path) -> None:
    options = {"baseURL": url, "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"model": {"name": "model"}}}
    with home() as (work, environment):
        config = {"autoupdate": False, "share": "disabled", "provider": {"local": provider}}
        (work / "opencode.json").write_text(json.dumps(config))
        said = run(work, environment, str(folder / FILES["opencode"][0]), "run", "-m", "local/model", ASKED)
    assert ANSWER in said, said


# llm

RUN = """
import subprocess

def run(command: str) -> str:
    \"\"\"Runs a command.\"\"\"
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""


@tries("llm", "a turn with a tool call, streamed and whole")
def _(url: str, folder: Path) -> None:
    options = ({}, {"can_stream": False})
    for more in options:
        with home() as (work, environment):
            settings = Path(environment["HOME"]) / "llm"
            settings.mkdir()
            model = {"model_id": "local", "model_name": "model", "api_base": url, "supports_tools": True, **more}
            (settings / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
            environment["LLM_USER_PATH"] = str(settings)
            said = run(work, environment, str(folder / FILES["llm"][0]), "-m", "local", "--functions", RUN, ASKED)
        assert said.strip().endswith(ANSWER), said


# aider


@tries("aider-chat", "an edit, a test that fails, and the edit that the failure asks for; streamed and whole")
def _(url: str, folder: Path) -> None:
    test = "test -e tested || { touch tested; echo it is wrong; exit 1; }"
    for stream in ("--stream", "--no-stream"):
        with home(OPENAI_API_BASE=url, OPENAI_API_KEY="none") as (work, environment):
            said = run(
                work, environment, str(folder / FILES["aider-chat"][0]), "--model", "openai/model", "--message", ASKED,
                "--edit-format", "whole", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable",
                "--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--no-fancy-input", stream,
                "--auto-test", "--test-cmd", test, "--map-tokens", "0",
            )  # fmt: skip
            assert (work / PROOF).read_text().strip() == ANSWER, said
            assert (work / "tested").exists() and "it is wrong" in said, said
            assert said.count("Applied edit to") == 2, said


# LiteLLM's proxy


@contextmanager
def litellm_proxy(url: str, folder: Path) -> Iterator[tuple[str, str]]:
    """The proxy in front of the service; its address and its key. The models "openai" and "anthropic" name the API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    apis = {"openai": url, "anthropic": url.removesuffix("/v1")}
    models = [
        {
            "model_name": api,
            "litellm_params": {"model": f"{api}/model", "api_base": base, "api_key": "none"},
            "model_info": {"supports_reasoning": True},
        }
        for api, base in apis.items()
    ]
    key = "sk-" + secrets.token_hex(32)
    with home(LITELLM_MASTER_KEY=key) as (work, environment):
        config = work / "litellm.yaml"
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if "Uvicorn running" in line:
                    break
            else:
                raise AssertionError("".join(said)[-3000:])
            drained = threading.Thread(target=process.stdout.read, daemon=True)
            drained.start()
            yield f"http://127.0.0.1:{port}/v1", key
        finally:
            process.terminate()
            process.wait()


def opened(url: str, key: str, body: dict[str, Any] | None) -> bytes:
    """The answer to a POST of a body; without one to a GET."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT_S) as response:
        content: bytes = response.read()
    return content


def received(url: str, key: str) -> dict[str, Any]:
    """The JSON at an address."""
    found: dict[str, Any] = json.loads(opened(url, key, None))
    return found


def post(url: str, key: str, **body: Any) -> dict[str, Any]:
    """The JSON that answers a body."""
    answer: dict[str, Any] = json.loads(opened(url, key, body))
    return answer


@tries(
    "litellm-proxy", "chat with reasoning_effort; messages with thinking and effort, over OpenAI's API and Anthropic's"
)
def _(url: str, folder: Path) -> None:
    messages = [{"role": "user", "content": "Well?"}]
    with litellm_proxy(url, folder) as (proxy, key):
        said = post(f"{proxy}/chat/completions", key, model="openai", messages=messages, reasoning_effort="low")
        assert said["choices"][0]["message"]["content"] == ANSWER
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}}
        for model in ("openai", "anthropic"):
            said = post(f"{proxy}/messages", key, model=model, messages=messages, max_tokens=2000, **thinking)
            assert (said["content"][0]["text"], said["stop_reason"]) == (ANSWER, "end_turn")


# Open WebUI


@contextmanager
def open_webui(url: str, folder: Path) -> Iterator[str]:
    """Open WebUI with one connection to the service, and without models of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"OPENAI_API_BASE_URLS": url, "OPENAI_API_KEYS": "none", "ENABLE_OLLAMA_API": "false"}
    own |= {"RAG_EMBEDDING_ENGINE": "openai", "WEBUI_SECRET_KEY": secrets.token_hex(16)}
    with home(**own) as (work, environment):
        environment["DATA_DIR"] = str(work / "data")
        log = work / "log"
        command = [str(folder / FILES["open-webui"][0]), "serve", "--host", "127.0.0.1", "--port", str(port)]
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=work, env=environment, stdout=output, stderr=output)
        try:
            began = time.monotonic()
            while True:
                assert process.poll() is None and time.monotonic() - began < TIMEOUT_S, log.read_text()[-3000:]
                try:
                    with socket.create_connection(("127.0.0.1", port)):
                        break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@tries("open-webui", "sign-up, the list of models, and chats, whole and streamed")
def _(url: str, folder: Path) -> None:
    messages = [{"role": "user", "content": "Well?"}]
    with open_webui(url, folder) as page:
        me = {"name": "Me", "email": "me@example.org", "password": secrets.token_hex(12) + "-A1"}
        key = post(f"{page}/api/v1/auths/signup", "", **me)["token"]
        (model,) = [each["id"] for each in received(f"{page}/api/models", key)["data"]]
        said = post(f"{page}/api/chat/completions", key, model=model, messages=messages)
        assert said["choices"][0]["message"]["content"] == ANSWER
        asked = {"model": model, "messages": messages, "stream": True}
        lines = opened(f"{page}/api/chat/completions", key, asked).decode().splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER


def installed(agent: str, folder: Path) -> bool:
    """Whether all is there that is tried with the agent."""
    needed = [FILES[agent][0], *([FILES["litellm-proxy"][0]] if agent == "claude-code" else [])]
    return all((folder / path).exists() for path in needed)


def main(agent: str, url: str, folder: Path) -> None:
    """Prints {"version", "passed": [...], "failed": {what: traceback}}."""
    passed, failed = [], {}
    for what, function in AGENTS[agent].items():
        try:
            function(url, folder)
            passed.append(what)
        except Exception:
            failed[what] = traceback.format_exc()[-4000:]
    if FILES[agent][1].endswith("python"):
        code = f"import importlib.metadata as m; print(m.version({agent!r}))"
        version = subprocess.check_output([str(folder / FILES[agent][1]), "-c", code], text=True).strip()
    elif FILES[agent][1]:
        version = json.loads((folder / FILES[agent][1]).read_text())["version"]
    else:
        from importlib.metadata import version as version_of

        version = version_of(agent.removesuffix("-proxy"))
    print(json.dumps({"version": version, "passed": passed, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
