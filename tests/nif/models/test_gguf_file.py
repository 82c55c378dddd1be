"""GGUF files read as they are: their configuration and tokenizer are transformers', and no bad file gets through."""

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError
from genbatch.nif.models.gguf_config import _rope_factors, _yarn, gguf_config, gguf_tokenizer
from genbatch.nif.models.gguf_file import GgufFile
from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.models.weight_source import SafetensorsWeights, StoredTensor
from tests.nif.models.gguf_files import write_llama

_HEADER = struct.calcsize("<4sIQQ")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_llama(tmp_path_factory.mktemp("gguf") / "good.gguf")


def read_all(path: Path) -> None:
    """All that loading reads; raises ModelError if anything is wrong."""
    model = describe_model(str(path), dtype="float32")
    assert model is not None
    assert model.weights is not None
    for name in model.weights.names():
        model.weights.tensor(name).floats()


# What transformers makes of a file


def test_smollm2s_configuration_and_tokenizer_are_those_of_transformers() -> None:
    path = resolve_model("smollm2").path
    file = GgufFile("smollm2", path)
    ours, theirs = gguf_config(file).to_dict(), AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    assert {key for key in theirs if ours.get(key) != theirs[key]} <= {"_model_name_or_path", "_name_or_path"}
    tokenizer = gguf_tokenizer(file)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # As in the model's own tokenizer.json. transformers splits the text of all such GGUF files as GPT-2 does.
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    assert tokenizer.chat_template == reference.chat_template
    assert tokenizer.special_tokens_map == reference.special_tokens_map

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def same_ids(text: str) -> None:
        ids = reference(text).input_ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == reference.decode(ids)

    same_ids()
    for text in ("<|im_start|>user\nHi 123  4567<|im_end|>", " leading", "def f(x):\n\treturn x  # é漢😀"):
        assert tokenizer(text).input_ids == reference(text).input_ids


def test_the_tensors_are_those_that_transformers_loads(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", "Q5_1")
    model = describe_model(str(tmp_path / "tiny.gguf"), dtype="float32")
    assert model is not None
    assert model.weights is not None
    assert all(parameter.is_meta for parameter in model.hf.parameters())
    loaded = load_model(str(tmp_path / "tiny.gguf"), dtype="float32", n_gpu_layers=0)
    for name, value in loaded.hf.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(model.weights.tensor(name).whole(), value)
    assert (model.layers, model.groups, model.vocab_size) == (loaded.layers, loaded.groups, loaded.vocab_size)
    assert model.eos_token_ids == loaded.eos_token_ids == {1}


# Bad files


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_by_name_or_read(good: bytes, data: st.DataObject, tmp_path_factory: Any) -> None:
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(good), 3000) - 8))
        value = data.draw(st.sampled_from([b"\xff" * 8, bytes(8), b"\x01", b"\xff" * 4, b"\x00\x00\x00\x80"]))
        damaged[at : at + len(value)] = value
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        read_all(path)
    except ModelError as refused:
        assert "damaged.gguf" in str(refused) or "weights" in str(refused)
        assert "\n" not in str(refused)


def test_a_file_cut_short_names_the_tensor(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(good[:-200])
    with pytest.raises(ModelError, match=r"cut\.gguf: tensor \S+ (ends|begins) at byte \d+"):
        read_all(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"GGML", "is not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (8, struct.pack("<Q", 2**63), "has 0 dimensions|goes beyond|ends within"),
        (16, struct.pack("<Q", 2**63), "occurs twice|goes beyond|unknown type|ends within|no UTF-8"),
        (_HEADER, struct.pack("<Q", 2**64 - 1), "goes beyond the file's end"),
    ],
)
def test_hostile_numbers_are_refused(good: bytes, tmp_path: Path, at: int, value: bytes, reason: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(good[:at] + value + good[at + len(value) :])
    with pytest.raises(ModelError, match=rf"bad\.gguf: .*({reason})"):
        GgufFile("bad", tmp_path / "bad.gguf")


def table_line(good: bytes, name: bytes) -> int:
    """Where the table says the number of dimensions of a tensor."""
    return good.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (0, struct.pack("<I", 9), "has 9 dimensions"),
        (4, struct.pack("<Q", 2**62), "do not fill blocks|cut short|beyond the beginning"),
        (4, struct.pack("<Q", 0), r"has the shape \[96, 0\]"),
        (4, struct.pack("<Q", 63), "rows of 63 elements do not fill blocks of Q4_0"),
        (20, struct.pack("<I", 24), "is of type I8"),
        (20, struct.pack("<I", 9999), "is of type 9999"),
        (20, struct.pack("<I", 43), "is of type 43; supported are BF16, F16, F32, IQ1_M"),
        (24, struct.pack("<Q", 7), "begins at offset 7, not a multiple of 32"),
        (24, struct.pack("<Q", 2**63), "begins at byte"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(
    good: bytes, tmp_path: Path, field: int, value: bytes, reason: str
) -> None:
    at = table_line(good, b"blk.0.ffn_up.weight") + field
    (tmp_path / "bad.gguf").write_bytes(good[:at] + value + good[at + len(value) :])
    with pytest.raises(ModelError, match=rf"bad\.gguf: tensor blk\.0\.ffn_up\.weight.*({reason})"):
        read_all(tmp_path / "bad.gguf")


def test_blocks_of_128_under_the_number_of_q2_0_are_refused_with_the_file_to_take(good: bytes, tmp_path: Path) -> None:
    at = table_line(good, b"blk.0.ffn_up.weight") + 12
    # As PrismML's fork wrote them, a row takes less than mainline's blocks of 64: here by rows that are too many.
    (tmp_path / "old.gguf").write_bytes(good[:at] + struct.pack("<QI", 3 * 96, 42) + good[at + 12 :])
    with pytest.raises(
        ModelError, match=r"ffn_up\.weight ends at .* beyond the beginning .*; Q2_0 has blocks of 64 .* g64"
    ):
        read_all(tmp_path / "old.gguf")


@pytest.mark.parametrize(("kind", "name"), [(24, "I8"), (43, "43")])
def test_types_of_newer_files_are_refused_before_a_weight_is_read(
    good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, name: str
) -> None:
    def read(self: StoredTensor, *_: object) -> NoReturn:
        raise AssertionError(f"{self.name} is read")

    at = table_line(good, b"blk.0.ffn_up.weight") + 20
    (tmp_path / "new.gguf").write_bytes(good[:at] + struct.pack("<I", kind) + good[at + 4 :])
    for method in ("floats", "addresses"):
        monkeypatch.setattr(StoredTensor, method, read)
    for runner in ("native", "torch"):
        options = EngineOptions(model_path=str(tmp_path / "new.gguf"), n_gpu_layers=0, runner=runner)
        with pytest.raises(ModelError, match=rf"blk\.0\.ffn_up\.weight is of type {name}"):
            load_engine(options)


_TEXT = "I'VE 12345 a.b\n\n  中文1"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("glm4", ["I", "'VE", " ", "123", "45", " a", ".b", "\n\n", " ", " 中文", "1"]),
        ("hunyuan", ["I", "'VE", " ", "1", "2", "3", "4", "5", " a", ".b", "\n\n", " ", " 中文", "1"]),
        ("deepseek-v3", ["I", "'VE", " ", "123", "45", " a", ".b", "\n\n", "  ", "中文", "1"]),
        ("deepseek-llm", ["I", "'", "VE", " ", "12345", " a", ".", "b", "\n", "\n", "  ", "中文", "1"]),
        ("deepseek-coder", ["I", "'", "VE", " ", *"12345", " a", ".", "b", "\n", "\n", " ", " ", "中文", "1"]),
        ("smollm", ["I", "'", "VE", " ", *"12345", " a", ".", "b", "\n\n ", " 中文", "1"]),
        ("seed-coder", ["I", "'VE", " ", *"12345", " a", ".b", "\n\n", " ", " 中文", "1"]),
        ("gpt-2", ["I", "'", "VE", " 12345", " a", ".", "b", "\n\n ", " 中文", "1"]),
    ],
)
def test_text_is_split_as_the_merges_were_learned(tmp_path: Path, pre: str, words: list[str]) -> None:
    """llama.cpp gave the same ids, with a vocabulary of which the merges cross all of these borders."""
    write_llama(tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": (pre, gguf.GGUFValueType.STRING)})
    backend = gguf_tokenizer(GgufFile("m", tmp_path / "m.gguf")).backend_tokenizer
    found = backend.pre_tokenizer.pre_tokenize_str(_TEXT)
    assert [_TEXT[start:end] for _, (start, end) in found] == words


def test_a_missing_tensor_is_named(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(good.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_XX.weight"))
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.mlp\.up_proj\.weight"):
        read_all(tmp_path / "bad.gguf")


def test_a_shape_that_contradicts_the_metadata_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "bad.gguf", feed_forward_length=128)
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.weight has the shape \[\d+, \d+\], the configuration says"):
        read_all(tmp_path / "bad.gguf")


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "bad.gguf", **{"attention.head_count": 5, "attention.head_count_kv": 5})
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        read_all(tmp_path / "bad.gguf")


def test_a_family_without_a_reader_says_why_it_is_converted(
    good: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other.gguf").write_bytes(
        good.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05" + bytes(7) + b"bloom", 1)
    )
    with caplog.at_level("INFO"), pytest.raises(ModelError, match=r"other\.gguf cannot be converted"):
        resolve_model(str(tmp_path / "other.gguf"))
    assert "other.gguf is converted to safetensors: files of the architecture bloom" in caplog.text


# Safetensors


def test_a_safetensors_directory_is_read_tensor_by_tensor(tiny_model_dir: Callable[[str], Path]) -> None:
    directory = tiny_model_dir("llama")
    loaded, weights = load_model(str(directory), n_gpu_layers=0), SafetensorsWeights("llama", directory)
    for name, value in loaded.hf.state_dict().items():
        if name in weights.names():
            assert torch.equal(weights.tensor(name).whole(), value)
    with pytest.raises(ModelError, match="lack nothing"):
        weights.tensor("nothing")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_safetensors_are_refused_or_read(
    tiny_model_dir: Callable[[str], Path], data: st.DataObject, tmp_path_factory: Any
) -> None:
    good = bytearray((tiny_model_dir("llama") / "model.safetensors").read_bytes())
    directory = tmp_path_factory.getbasetemp() / "damaged"
    directory.mkdir(exist_ok=True)
    at = data.draw(st.integers(0, 600))
    good[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    (directory / "model.safetensors").write_bytes(good[: data.draw(st.sampled_from([len(good), 700, 5]))])
    try:
        weights = SafetensorsWeights("damaged", directory)
        for name in weights.names():
            weights.tensor(name).floats()
    except ModelError as refused:
        assert "\n" not in str(refused)


@pytest.mark.parametrize(("rotated", "is_refused"), [(None, False), (6, False), (8, True)])
def test_as_many_factors_of_positions_are_read_as_pairs_are_rotated(rotated: int | None, is_refused: bool) -> None:
    tensor = SimpleNamespace(whole=lambda: torch.tensor([1.0, 2.0, 4.0]))
    file: Any = SimpleNamespace(tensor=lambda name: tensor, fault=lambda reason: ModelError("m", reason))
    if is_refused:
        with pytest.raises(ModelError, match="3 factors for 8 rotated elements"):
            _rope_factors(file, "rope_freqs.weight", rotated)
    else:
        assert _rope_factors(file, "rope_freqs.weight", rotated) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("metadata", "names", "reason"),
    [
        ({"x.factor": 4.0}, [], None),
        ({}, [], "x.factor is missing"),
        ({"x.factor": 4.0}, ["rope_freqs.weight"], "only one of them is supported"),
        ({"x.factor": 4.0, "x.yarn_attn_factor": 2.0}, [], "only 1 is supported"),
        ({"x.factor": -1.0}, [], "not a positive number"),
    ],
)
def test_yarn_is_read_where_it_is_whole_and_alone(
    metadata: dict[str, Any], names: list[str], reason: str | None
) -> None:
    file: Any = SimpleNamespace(
        architecture="x", metadata=metadata, names=lambda: names, fault=lambda reason: ModelError("m", reason)
    )
    if reason is not None:
        with pytest.raises(ModelError, match=reason):
            _yarn(file, "x.", {"max_position_embeddings": 64})
    else:
        read = _yarn(file, "x.", {"max_position_embeddings": 64})
        assert (read["rope_type"], read["factor"], read["original_max_position_embeddings"]) == ("yarn", 4.0, 64)
