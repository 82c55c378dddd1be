"""Downloads from a hub that speaks the real one's API: cut, damaged, unknown, offline, and larger than the disk."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants

from genbatch.nif.errors import ModelError
from genbatch.nif.models import hub
from tests.hub_server import COMMIT, HubServer

NAME = "someone/model"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"a pickle",
    "README.md": b"# no",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(NAME, FILES) as server:
        use(server.url, tmp_path / "hub", monkeypatch)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        yield server
        huggingface_hub.close_session()


def use(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def test_a_model_is_downloaded_once_with_progress_listed_and_deleted(server: HubServer) -> None:
    steps: list[tuple[str, int, int]] = []
    hub.check_room(NAME)
    found = hub.download(NAME, lambda *step: steps.append(step))
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    total = sum(len(FILES[path.name]) for path in found.iterdir())
    assert steps[0] == ("download", 0, 0) and steps[-1] == ("download", total, total)
    assert hub.download(NAME, lambda *_: None) == found
    assert server.downloads("model.safetensors") == [""] and server.downloads("pytorch_model.bin") == []
    [model] = hub.cached_models()
    assert model.name == NAME and model.num_bytes >= total and model.used_at > 0
    with pytest.raises(ModelError, match="it is not in the cache"):
        hub.delete([NAME, "other/model"])
    assert hub.cached_models() == [model]
    hub.delete([NAME])
    assert hub.cached_models() == [] and not found.exists()


def test_a_download_that_is_cut_goes_on_where_it_was(server: HubServer) -> None:
    server.cuts["model.safetensors"] = 40_000
    found = hub.download(NAME, lambda *_: None)
    assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    whole, rest = server.downloads("model.safetensors")
    assert whole == "" and rest.startswith("bytes=") and 0 < int(rest[6:].rstrip("-")) <= 40_000


def test_complete_files_of_an_interrupted_download_are_kept(server: HubServer) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(stage: str, done: int, total: int) -> None:
        if done > 50_000:
            raise Interrupted

    with pytest.raises(Interrupted):
        hub.download(NAME, interrupt)
    known = [file for file in ("config.json", "tokenizer.json") if server.downloads(file)]
    hub.download(NAME, lambda *_: None)
    assert all(len(server.downloads(file)) <= 2 for file in known)
    assert len(server.downloads("model.safetensors")) == 2


def test_a_damaged_file_is_refused_and_downloaded_anew(server: HubServer) -> None:
    for file in ("model.safetensors", "config.json"):
        server.sent[file] = FILES[file][:-1] + b"!"
        with pytest.raises(ModelError, match=r"a file was damaged during the download.*try again"):
            hub.download(NAME, lambda *_: None)
        server.sent.clear()
        found = hub.download(NAME, lambda *_: None)
        assert (found / file).read_bytes() == FILES[file]
        hub.delete([NAME])


def test_an_unknown_name_is_told(server: HubServer) -> None:
    hub.check_room("no/body")
    with pytest.raises(ModelError, match=r"no/body.*refused it"):
        hub.download("no/body", lambda *_: None)


def test_without_the_hub_a_model_in_the_cache_is_taken_and_another_one_told(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub.download(NAME, lambda *_: None)
    with HubServer("gone", {}) as gone:
        pass
    use(gone.url, tmp_path / "hub", monkeypatch)
    assert hub.download(NAME, lambda *_: None) == found
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:\d+ cannot be reached.*hf download other/model"):
        hub.download("other/model", lambda *_: None)


def test_a_model_larger_than_the_disk_is_refused_before_its_download(server: HubServer) -> None:
    server.sizes["model.safetensors"] = 10**18
    with pytest.raises(ModelError, match=r"the download needs 1000000000000\.0 MB, and .* MB free"):
        hub.check_room(NAME)
    assert server.downloads("model.safetensors") == []


def test_a_disk_that_fills_up_is_told(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"its files cannot be written to .*hub: No space left on device"):
        hub.download(NAME, lambda *_: None)


def test_the_stand_in_is_asked_for_one_commit(server: HubServer) -> None:
    hub.download(NAME, lambda *_: None)
    assert all(COMMIT in path for method, path, _ in server.log if "/resolve/" in path)
    assert httpx2.get(f"{server.url}/api/models/{NAME}").json()["sha"] == COMMIT
