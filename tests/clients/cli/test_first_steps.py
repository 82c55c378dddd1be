"""What somebody meets in the first minutes: the service is found, and a mistake is told at once, with what to do."""

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from typer.testing import CliRunner

from genbatch import SyncRPCClient, SyncZeroMQClient
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.service.gateway_process import Listeners, check_start
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.main import COMMANDS, app, load
from genbatch.clients.transports import no_address
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError, OptionError
from genbatch.proto.errors import Unavailable
from tests.actors.gateways import scripted_batcher
from tests.actors.gateways.scripted_batcher import served

# What takes long to import, and is not for the first answer: each is worth some hundredths of a second or more.
HEAVY = {
    *("torch", "transformers", "numpy", "zmq", "trio", "pydantic_settings", "structlog", "prometheus_client"),
    *("rich.console", "rich.progress"),
}
# Runs a command as `genbatch` does, and says on the last line which of those, and which other commands, it took.
COMMAND = f"""
import sys
from genbatch.clients.cli.main import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
commands = {{name for name in sys.modules if name.startswith("genbatch.clients.cli.")}}
print("imported:", *sorted({HEAVY!r} & set(sys.modules) | commands), file=sys.stderr)
sys.exit(code)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", COMMAND, *arguments]


def imported(told: str) -> set[str]:
    """What a command's last line says; its own modules without the folder."""
    said, _, names = told.splitlines()[-1].partition(":")
    assert said == "imported"
    return {name.removeprefix("genbatch.clients.cli.") for name in names.split()}


ENGINE = {"torch", "transformers"}

# Mistakes

MISTAKES = {
    ("serve", "smolm2"): "did you mean smollm2?",
    ("serve", "./nosuch"): "no such file or directory",
    ("serve", "--dtype", "fp32"): "did you mean float32?",
    ("serve", "--n-gpu-layers", "7"): "Take -1 for all of them on the GPU, or 0 for none",
    ("serve", "--scheduler", "nosuch"): '"module:Class"',
    ("serve", "--chat-template", "./nosuch"): "there is no file ./nosuch",
    ("serve", "--draft", "./nosuch"): "draft: cannot load model './nosuch': there is no such file or directory",
    ("generate", "x", "--draft", "smolm2"): "did you mean smollm2?",
    ("serve", "--record", "/no/such/folder/x"): "/no/such/folder",
    ("serve", "--engine", "thread", "--bind", "nowhere"): "must start with ipc:// or tcp://",
    ("demo", "smolm2"): "did you mean smollm2?",
    ("generate", "x", "--model", "./nosuch"): "no such file or directory",
    ("generate", "x", "--temperature", "-1"): "temperature: must be at least 0",
    ("generate", "x", "--json-schema", "{bad"): "response_format.schema: ",
    ("generate", "x", "--grammar", 'root ::= "a'): "grammar: ",
    ("generate", "x", "--regex", "a("): "regex: ",
    ("generate", "x", "--connect", "http://127.0.0.1:8000"): "HTTP is for OpenAI's clients",
    ("generate", "x", "--connect", "ipc:///no/such/socket"): "no service is running at ipc:///no/such/socket",
    ("generate", "x", "--model", "~nobody-of-this-name/model"): "no such file or directory",
    ("chat", "--temperature", "-1"): "temperature: must be at least 0",
    ("replay", "./nosuch"): "No such file",
    ("stats", "--connect", "ipc:///no/such/socket"): "no service is running at ipc:///no/such/socket",
}


def test_every_mistake_that_can_be_known_at_once_is_told_before_torch_is_imported() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from genbatch.clients.cli.main import app
for arguments, reason in {MISTAKES!r}.items():
    said = CliRunner().invoke(app, arguments)
    text = " ".join(said.stderr.split())
    assert said.exit_code and reason in text and "Traceback" not in text, (arguments, said.exit_code, text)
    assert not {{"torch", "transformers"}} & set(sys.modules), arguments
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_neither_the_gateway_nor_the_supervisor_imports_torch() -> None:
    modules = "genbatch.actors.service.gateway_process, genbatch.actors.service.processes"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@contextmanager
def listening(kind: str, directory: Path) -> Iterator[str]:
    """Somebody else, at an address of this kind."""
    if kind == "file":
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(directory / "taken"))
            other.listen()
            yield str(directory / "taken")
        return
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.mark.parametrize(
    ("option", "kind", "address"),
    [
        ("bind", "port", "tcp://{}"),
        ("bind", "file", "ipc://{}"),
        ("rpc_bind", "port", "tcp://{}"),
        ("rpc_bind", "file", "unix://{}"),
        ("http", "port", "{}"),
        ("http", "port", "localhost:{}"),
    ],
)
def test_an_address_that_is_taken_is_refused_before_the_model_is_loaded(
    option: str, kind: str, address: str, tmp_path: Path
) -> None:
    with listening(kind, tmp_path) as taken:
        wanted = address.format(taken.rpartition(":")[2] if "localhost" in address else taken)
        options = ServiceOptions(**{option: wanted})  # type: ignore[arg-type]  # all are strings
        with pytest.raises(AddressError, match="listens there; stop it, or take another address"):
            check_start(EngineOptions(), BatcherOptions(), options)
    check_start(EngineOptions(), BatcherOptions(), options)  # what a dead service left is no obstacle


def test_two_protocols_at_one_address_are_refused() -> None:
    options = ServiceOptions(bind="tcp://127.0.0.1:18765", http="127.0.0.1:18765")
    with pytest.raises(AddressError, match="given twice"):
        check_start(EngineOptions(), BatcherOptions(), options)


def test_what_options_name_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(batcher: BatcherOptions | None = None, **engine: str) -> None:
        check_start(EngineOptions(**engine), batcher or BatcherOptions(), ServiceOptions())  # type: ignore[arg-type]

    with pytest.raises(ModelError, match="did you mean"):
        start(model_path="Smollm2")
    with pytest.raises(OptionError, match="chat_template"):
        start(chat_template=str(tmp_path / "nosuch"))
    with pytest.raises(SchedulerError, match="cannot be imported"):
        start(BatcherOptions(scheduler="no_such_module:Scheduler"))
    with pytest.raises(OptionError, match="there is no folder"):
        start(BatcherOptions(record=str(tmp_path / "nosuch" / "flight")))
    start(BatcherOptions(record=str(tmp_path / "flight")))
    with monkeypatch.context() as closed:
        closed.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
        with pytest.raises(OptionError, match="no file can be made in"):
            start(BatcherOptions(record=str(tmp_path / "flight")))
    start(model_path="someone/smollm2-large")  # may well be an id of Hugging Face


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://somewhere", "OpenAI's clients"),
        ("127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("/tmp/socket", "ipc:///tmp/socket"),
        ("nowhere", "it must be ipc://PATH or tcp://HOST:PORT"),
        ("ftp://x", "it must be ipc://PATH or tcp://HOST:PORT"),
    ],
)
def test_what_is_no_address_is_told_with_what_was_meant(address: str, advice: str) -> None:
    with pytest.raises(Unavailable, match="is not an address of a service") as caught, SyncZeroMQClient(address):
        pass
    assert advice in str(caught.value)
    with pytest.raises(Unavailable, match="is not an address"), SyncRPCClient(address):
        pass
    assert address in str(no_address(address, "x"))


# The service that runs


def test_the_address_of_the_counters_is_told_apart_from_the_doors() -> None:
    options = ServiceOptions(http="127.0.0.1:18001", metrics="127.0.0.1:18002")
    listeners = Listeners(None, options, Telemetry())  # type: ignore[arg-type]
    for child in listeners.gateways():
        child.start()
    assert listeners.addresses == ("http://127.0.0.1:18001", "http://127.0.0.1:18002/metrics")


@pytest.mark.trio
async def test_commands_find_the_running_service_and_import_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    monkeypatch.setattr(scripted_batcher, "CARD", msgspec.structs.replace(scripted_batcher.CARD, sampling=own))
    async with served(tmp_path) as service:
        # In a narrow terminal, too, an address is one piece that can be copied.
        narrow = {"COLUMNS": "40"}
        environment = {**os.environ, "GENBATCH_BIND": service.address, "XDG_CONFIG_HOME": str(tmp_path), **narrow}

        async def said(*arguments: str, stdin: str = "") -> tuple[str, str]:
            done = await trio.run_process(
                command(*arguments), env=environment, capture_stdout=True, capture_stderr=True, stdin=stdin.encode()
            )
            return done.stdout.decode(), done.stderr.decode()

        out, told = await said("generate", "a b c", "--raw")
        assert out == "abc\n"
        assert f"using the service at {service.address}" in told and not ENGINE & imported(told)
        out, told = await said("chat", stdin="hello\n")
        assert service.address in told and not ENGINE & imported(told)
        assert service.batcher.requests[-1].request.messages[-1].content == "hello"  # type: ignore[index]
        # What no flag says is left to the model's files, and an answer has an end.
        asked = service.batcher.requests[-1].request
        assert (asked.temperature, asked.top_k, asked.top_p, asked.max_tokens) == (None, None, None, 1024)
        await said("chat", "--temperature", "0", "--max-tokens", "5", stdin="hello\n")
        asked = service.batcher.requests[-1].request
        assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, None, 5)
        out, told = await said("stats", "--json")
        assert '"steps":7' in out and not ENGINE & imported(told)


def test_the_list_of_commands_imports_what_draws_it_and_no_command() -> None:
    done = subprocess.run(command("--help"), capture_output=True, text=True, check=True)
    assert imported(done.stderr) == {"main", "rich.console"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_begins_with(name: str) -> None:
    real = load(name)
    [text, *_] = real.help.split("\n\n")
    assert COMMANDS[name][1] == " ".join(text.split())
    assert real.name == name


@pytest.mark.trio
async def test_a_question_to_a_service_imports_neither_other_commands_nor_what_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("GENBATCH_")]:
        monkeypatch.delenv(name)
    (tmp_path / "genbatch").mkdir(mode=0o700)
    async with served(tmp_path) as service:
        # Where it is looked for without --connect.
        (tmp_path / "genbatch" / "zeromq.sock").symlink_to(service.address.removeprefix("ipc://"))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        for arguments, more in [
            (("--connect", service.address), set()),
            ((), {"settings", "rich.console"}),  # which service it asks is looked up, and told
        ]:
            done = await trio.run_process(
                command("generate", "a b c", "--raw", *arguments),
                env=environment,
                capture_stdout=True,
                capture_stderr=True,
            )
            assert done.stdout == b"abc\n"
            ours = {"main", "generate", "command", "connection", "option_flags"}
            assert imported(done.stderr.decode()) == {"zmq", "trio"} | ours | more, arguments


def test_a_user_without_a_home_is_told_what_has_no_place_and_all_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CONFIG_HOME", "GENBATCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert CliRunner().invoke(app, ["config"]).exit_code == 0
    assert "no service is running" in CliRunner().invoke(app, ["stats"]).stderr
    refused = CliRunner().invoke(app, ["keys", "new"])
    assert refused.exit_code == 2 and "this user has no home folder" in refused.stderr
    assert CliRunner().invoke(app, ["keys", "new", str(tmp_path / "keys")]).exit_code == 0


@pytest.mark.parametrize("name", ["stats", "top"])
def test_without_a_service_it_is_said_how_to_start_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("genbatch.clients.cli.stats._is_terminal", lambda: True)
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert f"no service is running at ipc://{tmp_path}/genbatch/zeromq.sock" in told and "`genbatch serve`" in told
