"""Tokenizers with expressions of their own: exact, in a process that ends where a text takes too long."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from genbatch.nif.models.model import load_model
from genbatch.nif.models.model_source import ModelError
from genbatch.nif.text import tokenizer_process
from genbatch.nif.text.pairs import PairReader
from genbatch.nif.text.tokenizer import Tokenizer, TokenizerError
from genbatch.nif.text.tokenizer_process import KNOWN, TokenizerProcess, check_loading, unchecked

# Each of 3,000 places tries each end and each middle: 15 s. One place takes less than the package's own limit.
ENDLESS, LONG = "x*x*y", "x" * 3_000 + " y"
HARMLESS = "[a-m]+|[n-z]+"


def splitting(expression: str) -> Backend:
    backend = Backend(models.WordLevel({"ab": 0, "xy": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    return backend


def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "ENCODE_S", 0.3)
    monkeypatch.setattr(tokenizer_process, "ENCODE_S_PER_BYTE", 0.0)
    monkeypatch.setattr(tokenizer_process, "LOAD_S", 1.0)


@pytest.mark.usefixtures("short_limit")
def test_a_text_that_takes_too_long_fails_and_the_next_one_is_cut_up() -> None:
    reader = tokenizer(splitting(ENDLESS))
    assert reader.encode("abxy") == [0, 1]
    for text in (LONG + " " * 4096, LONG):  # other tokenizers cut up only the first in a batch of one
        with pytest.raises(TokenizerError, match=r"takes more than 0\.3 s for this text"):
            reader.encode(text)
        assert reader.encode("xy") == [1]
    with pytest.raises(TokenizerError, match="for this text"):
        PairReader(reader).tokens("xy", LONG)
    with pytest.raises(TokenizerError, match="for this text"):
        PairReader(reader).beginning(LONG, 1)


@pytest.fixture(scope="module")
def harmless() -> Tokenizer:
    return tokenizer(splitting(HARMLESS))


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=20), pair=st.none() | st.text("abxyé世 ", max_size=9), added=st.booleans())
def test_its_tokens_are_those_of_the_package(text: str, pair: str | None, added: bool, harmless: Tokenizer) -> None:
    assert harmless._process is not None
    found = harmless.encoding(text, pair, add_special_tokens=added)
    wanted = harmless.backend.encode(text, pair, add_special_tokens=added)
    assert (found.ids, found.type_ids) == (wanted.ids, wanted.type_ids)
    assert list(map(tuple, found.offsets)) == wanted.offsets


def test_a_process_that_was_killed_from_outside_is_replaced(harmless: Tokenizer) -> None:
    assert harmless.encode("ab") == [0]
    process = harmless._process
    assert process is not None
    process._child._running[0].kill()
    process._child._running[0].wait()
    assert harmless.encode("ab") == [0]


def test_a_process_ends_with_its_tokenizer() -> None:
    process = TokenizerProcess(splitting(HARMLESS).to_str())
    process.load()
    (child,) = process._child._running
    del process
    gc.collect()
    assert child.returncode is not None


def test_a_fault_of_the_package_is_an_error_of_this_text_alone(harmless: Tokenizer) -> None:
    reader = tokenizer(splitting("(z+z+)+y"))
    with pytest.raises(TokenizerError, match=r"failed: .*retry-limit"):
        reader.encode("z" * 40)
    assert reader.encode("ab") == [0]
    with pytest.raises(TokenizerError):
        harmless.encode("\ud83d")


def test_only_what_may_take_long_has_a_process_of_its_own(tiny_model_dir: Callable[[str], Path]) -> None:
    assert all(tokenizer(splitting(known))._process is None for known in KNOWN)
    described = json.loads((tiny_model_dir("llama") / "tokenizer.json").read_text())
    assert unchecked(described) == []
    steps: Any = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": ENDLESS}}]}
    assert unchecked({"normalizer": steps, "model": {"max_input_chars_per_word": 10**9}}) == [
        ENDLESS,
        "max_input_chars_per_word 1000000000",
    ]
    assert unchecked({"normalizer": {"type": "Replace", "pattern": {"String": "x+"}}, "model": {}}) == []
    words = Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]", max_input_chars_per_word=10**6))
    assert tokenizer(words)._process is not None


def test_a_decoder_with_an_expression_is_refused_by_name() -> None:
    backend = splitting(HARMLESS)
    backend.decoder = decoders.Replace(Regex(ENDLESS), "")
    with pytest.raises(TokenizerError, match=r"its decoder has the expression 'x\*x\*y'"):
        tokenizer(backend)


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_model_that_takes_too_long_to_load_its_tokenizer_is_refused(
    name: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.symlink_to(tiny_model_dir("llama"))
    directory = tmp_path / "damaged"
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    backend = Backend.from_file(str(model / "tokenizer.json"))
    backend.normalizer = normalizers.Replace(Regex(ENDLESS), "")
    described = json.loads(backend.to_str())
    token = {"content": LONG, "special": False, "normalized": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    config = json.loads((model / "tokenizer_config.json").read_text())
    if name == "tokenizer.json":
        described["added_tokens"].append({"id": len(described["model"]["vocab"]), **token})
    else:
        config["added_tokens_decoder"] = {"9999": token}
    for file, content in (("tokenizer.json", described), ("tokenizer_config.json", config)):
        (directory / file).unlink()
        (directory / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"takes more than 1 s to be read"):
        load_model(str(directory))


@pytest.mark.parametrize("place", ["vocabulary", "added tokens"])
def test_an_id_beyond_every_vocabulary_is_refused(
    place: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """`tokenizers` would walk over two thousand million ids when the tokenizer is written down."""
    model = shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")
    said = json.loads((model / "tokenizer.json").read_text())
    if place == "vocabulary":
        said["model"]["vocab"]["odd"] = 2**31
    else:
        said["added_tokens"].append({**said["added_tokens"][0], "content": "odd", "id": 2**31})
    (model / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="token 'odd' has the id 2147483648"):
        load_model(str(model), dtype="float32", n_gpu_layers=0)


def test_files_that_are_no_tokenizers_are_left_to_transformers(tmp_path: Path) -> None:
    for text in ("[", "[]", "{}", '"x"', "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(text)
        check_loading(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("expression", sorted(KNOWN))
def test_a_known_expression_takes_a_time_in_proportion_to_the_text(expression: str) -> None:
    process = TokenizerProcess(splitting(expression).to_str())
    for run in (" ", "\n", "\r\n", "a", "A", "1", "!", "ª", "̀", "世", "!A", " 1", "A\n"):
        for end in ("", "a", "!", "1", "\n", " "):
            process.encode(run * (30_000 // len(run)) + end)
