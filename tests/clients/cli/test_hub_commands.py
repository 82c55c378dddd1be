"""`genbatch pull`, `list` and `rm` as a user types them, against a hub on a loopback port."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genbatch.clients.cli.hub import _ago, _size
from tests.hub_server import HubServer

FILES = {"config.json": b"{}", "model.safetensors": b"x" * 100_000}


def genbatch(server: HubServer, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from genbatch.clients.cli.main import main; main()", *arguments]
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_a_model_is_pulled_listed_and_removed(tmp_path: Path) -> None:
    with HubServer("someone/model", FILES) as server:
        pulled = genbatch(server, tmp_path, "pull", "someone/model")
        assert (pulled.returncode, pulled.stdout) == (0, "someone/model is downloaded\n"), pulled.stderr
        assert "download" in pulled.stderr.lower()
        [listed] = genbatch(server, tmp_path, "list").stdout.splitlines()
        assert listed.split()[0] == "someone/model" and "0.1 MB" in listed and "used just now" in listed
        asked = genbatch(server, tmp_path, "rm", "someone/model")
        assert asked.returncode == 2 and "--yes" in asked.stderr
        [row] = json.loads(genbatch(server, tmp_path, "list", "--json").stdout)
        assert row["name"] == "someone/model" and row["num_bytes"] >= 100_000
        removed = genbatch(server, tmp_path, "rm", "--yes", "someone/model")
        assert (removed.returncode, removed.stdout) == (0, "someone/model is deleted\n")
        again = genbatch(server, tmp_path, "rm", "--yes", "someone/model")
        assert again.returncode == 2 and "it is not in the cache" in again.stderr
        unknown = genbatch(server, tmp_path, "pull", "no/body")
        assert unknown.returncode == 2 and "no/body" in unknown.stderr and "refused it" in unknown.stderr
        local = genbatch(server, tmp_path, "pull", "smollm2")
        assert local.returncode == 2 and "pull downloads Hugging Face ids" in local.stderr


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (90_000, "1 day ago")]
)
def test_a_last_use_is_told_as_people_do(seconds: float, words: str) -> None:
    assert _ago(1e9, 1e9 + seconds) == words
    assert _ago(1e9, 1e9 + 90 * 86400).startswith("on 2001-09-")


def test_sizes_have_units() -> None:
    assert (_size(2_500_000), _size(3_200_000_000)) == ("2.5 MB", "3.2 GB")
