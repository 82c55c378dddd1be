"""`genbatch keys` as a user types it, down to a service that lets its clients in."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genbatch.actors.security.curve_keys import ClientKeys, ServerKeys
from genbatch.actors.security.key_files import TokenFile
from genbatch.clients.cli.connection import AddressFlags, remote_client
from genbatch.clients.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "genbatch" / "keys"


def test_what_is_made_is_what_service_and_client_read(home: Path) -> None:
    assert f"--keys {home}" in run("new").stdout
    made = run("client", "alice").stdout
    path = home / "clients" / "alice.key_secret"
    assert str(path) in made
    keys = ClientKeys.load(str(path))
    assert ServerKeys(home).client_name(keys.pair.public.decode()) == "alice"
    token = run("token", "alice").stdout.strip()
    assert TokenFile(home / "tokens").tenant(token) == "alice"
    listed = run("list").stdout
    assert keys.pair.public.decode() in listed
    assert token not in listed
    assert run("revoke", "alice").exit_code == 0
    assert ServerKeys(home).client_name(keys.pair.public.decode()) is None
    assert TokenFile(home / "tokens").tenant(token) is None


def test_a_key_with_brackets_is_listed_in_full() -> None:
    key = "[arGRMl{S]qM/Abn$?7/cD)fL0w<gTAZ=J%mu?HW"  # to rich, its beginning is markup
    assert run("new").exit_code == run("authorise", "bob", key).exit_code == 0
    assert key in run("list").stdout


def test_another_folder_may_be_named(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "elsewhere"
    made = run("new", str(folder))
    assert made.exit_code == 0
    # What it says to do next is about that folder, too.
    [_, advice] = made.stdout.split("let a client in: genbatch keys ")
    assert run(*advice.replace("NAME", "alice").split()).exit_code == 0
    assert (folder / "clients" / "alice.key_secret").exists()
    assert run("authorise", "bob", str(folder / "server.key"), "--dir", str(folder)).exit_code == 0
    assert "bob" in run("list", "--dir", str(folder)).stdout
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["new"], "exists already"),
        (["client", "../x"], "is no name"),
        (["revoke", "nobody"], "no key or token"),
        (["authorise", "bob", "nonsense"], "neither a file nor a key"),
        (["list", "--dir", "/no/such/folder"], "genbatch keys new"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], reason: str) -> None:
    run("new")
    result = run(*arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--bind", "tcp://0.0.0.0:5555"], "genbatch keys new"),
        (["serve", "--bind", "ipc:///tmp/x", "--keys", "/no/such/folder"], "/no/such/folder"),
        (["serve", "--tls-cert", "x.pem"], "tls_key"),
        (["stats", "--connect", "tcp://127.0.0.1:1", "--server-key", "x"], "--client-key"),
        (["stats", "--connect", "tcp://127.0.0.1:1", "--client-key", "/no/such/file"], "/no/such/file"),
        (["stats", "--client-key", "x"], "--connect"),
    ],
)
def test_an_unsafe_or_contradictory_start_is_refused_at_once(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where no service runs
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_service_that_encrypts_is_reached_with_its_ca_and_another_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("genbatch.clients.remote.RPCClient", lambda address, **options: asked.append(options))
    monkeypatch.setattr("genbatch.actors.security.key_files.client_context", lambda ca: ("trusts", ca))
    for ca in (None, "ca.pem"):
        remote_client("rpc://127.0.0.1:1", AddressFlags(tls_ca=ca, token="t"))
    assert asked == [{"token": "t", "tls": None}, {"token": "t", "tls": ("trusts", Path("ca.pem"))}]
