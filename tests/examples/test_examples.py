"""Every example runs as it stands, over a tiny model: one service, with the examples' own options and scheduler."""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from genbatch.clients.cli.settings import read_settings
from genbatch.proto.validation import RequestLimits
from tests.actors.service.running_service import RunningService
from tests.tool_models import FILL_IN_MARKS, add_marks, tool_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONTAINER = EXAMPLES / "Containerfile"


class Examples:
    """What the examples print; those of one service run side by side."""

    def __init__(self, service: RunningService, model: Path) -> None:
        (self.url,) = re.findall(r"http://127\.0\.0\.1:\d+", service.log)[:1]
        api = (f"{self.url}/v1", "model")
        asked = {
            "own_program": (str(model),),
            # An environment that was made before this example has no uvloop.
            "asyncio_program": (str(model), "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"),
            "anyio_program asyncio": (str(model), "asyncio"),
            "anyio_program trio": (str(model), "trio"),
            "structured_output": (service.address,),
            "zeromq_client": (service.address, "Name a colour."),
            "agent": api,
            "langchain_chain": api,
            "editor": api,
        }
        self._pool = ThreadPoolExecutor(2)
        self._runs: dict[str, Future[str]] = {
            name: self._pool.submit(self._run, name, arguments) for name, arguments in asked.items()
        }

    def _run(self, name: str, arguments: tuple[str, ...]) -> str:
        program = str(EXAMPLES / f"{name.split()[0]}.py")
        command = [sys.executable, "-W", "error::ResourceWarning", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def printed(self, name: str) -> str:
        """What an example printed, once it has ended well."""
        return self._runs[name].result()

    def close(self) -> None:
        """Waits for all of them."""
        self._pool.shutdown()


@pytest.fixture(scope="module")
def examples(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    directory = tmp_path_factory.mktemp("examples")
    model = tool_model(tiny_model_dir("llama"), directory / "model")
    add_marks(model)
    shutil.copy(EXAMPLES / "shortest_first.py", directory)  # which is on the service's path
    flags = ("--scheduler", "shortest_first:ShortestFirst", "--log-format", "text", "--http", ":0")
    with RunningService(model, directory, "--config", str(EXAMPLES / "service.toml"), *flags) as service:
        running = Examples(service, model)
        try:
            yield running
        finally:
            running.close()


def test_a_program_of_ones_own(examples: Examples) -> None:
    printed = examples.printed("own_program")
    assert len(re.findall(r"^Name a \w+\. '.*' \((?:stop|length)\)$", printed, re.MULTILINE)) == 3, printed
    assert re.search(r"^a story of [1-9]\d* tokens$", printed, re.MULTILINE), printed


def test_structured_output(examples: Examples) -> None:
    found = ast.literal_eval(examples.printed("structured_output"))
    assert found["country"] in ("France", "Japan", "Peru") and isinstance(found["capital"], bool), found


def test_many_callers_on_asyncio_with_uvloop(examples: Examples) -> None:
    answers, out_of_time, piece, freed = examples.printed("asyncio_program").splitlines()
    assert (answers, out_of_time) == ("64 answers", "out of time")
    assert re.fullmatch(r"the first piece: '.*'", piece)
    assert re.fullmatch(r"cancelled: [12], blocks in use: 0", freed)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_program_for_both_event_loops(examples: Examples, backend: str) -> None:
    *answers, cancelled = examples.printed(f"anyio_program {backend}").splitlines()
    assert len(answers) == 2 and cancelled == "cancelled: True"


def test_a_zeromq_client_without_genbatch(examples: Examples) -> None:
    text, _, usage = examples.printed("zeromq_client").rpartition("\n")[0].rpartition("\n")
    assert text and re.fullmatch(r"(stop|length) \{'prompt_tokens': \d+, .*\}", usage)
    source = (EXAMPLES / "zeromq_client.py").read_text()
    assert "genbatch" not in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert len(source.split('"""')[2].strip().splitlines()) <= 24


def test_an_agent_with_a_tool(examples: Examples) -> None:
    first, *_ = examples.printed("agent").splitlines()
    assert first in ('in_stock({"thing": "tea"}) -> 12', 'in_stock({"thing": "coffee"}) -> 0')


def test_a_langchain_chain(examples: Examples) -> None:
    assert re.search(r"^\[.*\]$", examples.printed("langchain_chain"), re.MULTILINE)


def test_an_editors_completions(examples: Examples) -> None:
    printed = examples.printed("editor")
    said = dict(re.findall(r"^(whole|shown|between): (.*)$", printed, re.MULTILINE))
    assert len(said) == 3, printed
    # The gap is filled as the prompt that the model was made for is continued.
    prefix, suffix, middle = FILL_IN_MARKS
    client = openai.OpenAI(base_url=f"{examples.url}/v1", api_key="none", max_retries=0)
    marked = f"{prefix}def add(a, b):\n    {suffix}\n\nprint(add(1, 2)){middle}"
    # Continue asks so, with a template of its own.
    asked = client.completions.create(
        model="model", prompt=marked, temperature=0, top_p=1, frequency_penalty=0, presence_penalty=0,
        max_tokens=24, stop=["\n\n", "```", "/src/"], stream=True,
    )  # fmt: skip
    assert said["between"] == repr("".join(chunk.choices[0].text for chunk in asked))


def test_the_services_file_says_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GENBATCH_")]:
        monkeypatch.delenv(name)
    said = tomllib.loads((EXAMPLES / "service.toml").read_text())
    settings = read_settings({}, config=EXAMPLES / "service.toml")
    limits = said.pop("limits")
    assert settings.batcher().limits == RequestLimits(**limits)
    for name, value in said.items():
        assert settings.value(name) == (tuple(value) if isinstance(value, list) else value)
        assert "service.toml, line" in settings.origin(name)


# The container file, as far as it goes without a container


def instructions() -> list[tuple[str, str]]:
    """Instruction and rest, a line each."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def test_the_containers_instructions_are_those_that_there_are_and_its_commands_are_shells() -> None:
    found = instructions()
    assert found[0][0] == "FROM" and {name for name, _ in found} <= {
        *("FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"),
    }
    for name, rest in found:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
    packages = " ".join(rest for name, rest in found if name == "RUN")
    makefile = (ROOT / "Makefile").read_text()
    for pinned in re.findall(r'"([\w-]+==[\w.]+)"', packages):
        assert pinned in makefile, pinned
    assert '"."' in packages


def test_what_the_container_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    for name, rest in instructions():
        if name != "COPY":
            continue
        *sources, target = rest.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, symlinks=True)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    assert list((tmp_path / "out").glob("genbatch-*.whl"))


def test_what_the_container_runs_is_a_command_of_ours() -> None:
    (run,) = re.findall(r"#\s+podman run .*?genbatch \\\n#\s+(serve .*)", CONTAINER.read_text())
    command, model, *flags = shlex.split(run)
    assert command == "serve"
    # `config` takes what `serve` does, and starts nothing.
    start = "from genbatch.clients.cli.main import main; main()"
    asked = [sys.executable, "-c", start, "config", model, *flags, "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rest = dict(instructions())
    assert (rest["ENTRYPOINT"], rest["CMD"]) == ('["genbatch"]', '["serve", "--help"]')
