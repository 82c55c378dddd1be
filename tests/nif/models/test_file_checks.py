"""What a model's files are checked for before anything is built: each fault is a ModelError that names its place."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from genbatch.nif.errors import ModelError, TensorError
from genbatch.nif.json_files import MAX_JSON_BYTES
from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.models.weight_source import StoredTensor
from genbatch.nif.native.library import WEIGHT_F32, WEIGHT_I8, native_library
from genbatch.nif.native.runner import native_runner
from genbatch.nif.native.weights import WeightPacker
from genbatch.nif.text import tokenizer_process
from tests.nif.models.gguf_files import batch_of, block_size, write_llama


@pytest.fixture(scope="module")
def good(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a tiny Llama whose heads are wide enough for the native kernels."""
    directory = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**tiny_models._GROUPED, "head_dim": 16})).save_pretrained(directory)
    tiny_models.build_tokenizer(directory)
    return directory


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """A copy of it that the test may damage."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **fields}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refusal(directory: Path) -> str:
    """The reason that both ways of loading give, which must name the same place."""
    with pytest.raises(ModelError) as described:
        model = describe_model(str(directory), dtype="float32")
        assert model is not None
        native_runner(model)
    with pytest.raises(ModelError) as loaded:
        load_model(str(directory), dtype="float32", n_gpu_layers=0)
    assert "\n" not in str(described.value) + str(loaded.value)
    return f"{described.value.reason}\n{loaded.value.reason}"


# Numbers of a configuration

_HUGE = 10**12


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_hidden_layers": _HUGE}, "num_hidden_layers"),
        ({"num_hidden_layers": 1000}, "1000 layers|needs"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -8}, "head_dim"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": 2**62}, "hidden_size"),
        ({"vocab_size": 10**10}, "vocab_size"),
        ({"vocab_size": 2 * 10**9}, "needs|embed_tokens"),
        ({"intermediate_size": 2 * 10**9}, "needs|mlp"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"pad_token_id": 320}, "pad_token_id"),
        ({"pad_token_id": 10**30}, "pad_token_id"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"unknown_scale": float("inf")}, "unknown_scale"),
        ({"architectures": [5]}, "architectures"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}}, "factor"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_refused_before_anything_is_built(
    copy: Path, fields: dict[str, Any], name: str
) -> None:
    edit(copy / "config.json", **fields)
    for reason in refusal(copy).splitlines():
        assert any(word in reason for word in name.split("|")), reason


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"block_count": 10**9}, "num_hidden_layers|block_count"),
        ({"attention.head_count_kv": 0}, "num_key_value_heads"),
        ({"attention.head_count": 0}, "num_attention_heads"),
        ({"context_length": 0}, "max_position_embeddings"),
        ({"embedding_length": 2**31}, "hidden_size"),
    ],
    ids=str,
)
def test_a_number_of_a_gguf_file_likewise(tmp_path: Path, changed: dict[str, Any], name: str) -> None:
    write_llama(tmp_path / "bad.gguf", **changed)
    for reason in refusal(tmp_path / "bad.gguf").splitlines():
        assert any(word in reason for word in name.split("|")), reason


def test_an_epsilon_that_is_infinite_is_refused_in_a_gguf_file(tmp_path: Path) -> None:
    good = write_llama(tmp_path / "bad.gguf")
    at = good.index(struct.pack("<f", 1e-5))
    (tmp_path / "bad.gguf").write_bytes(good[:at] + struct.pack("<f", float("inf")) + good[at + 4 :])
    assert "rms_norm_eps is inf" in refusal(tmp_path / "bad.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "1_Pooling/config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(copy: Path, name: str, kind: str) -> None:
    (copy / "1_Pooling").mkdir()
    (copy / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(copy / name)
    else:
        (copy / name).symlink_to("/dev/zero")
    assert all(f"{name} is neither a file nor a folder" in reason for reason in refusal(copy).splitlines())


def test_a_text_config_where_its_kind_of_model_has_none_is_refused(copy: Path) -> None:
    fields = json.loads((copy / "config.json").read_text())
    edit(copy / "config.json", text_config=fields)
    assert all("text_config" in reason for reason in refusal(copy).splitlines())
    nested = {"model_type": "gemma3", "text_config": {**fields, "model_type": "gemma3_text", "text_config": fields}}
    (copy / "config.json").write_text(json.dumps(nested))
    assert all("config.json" in reason for reason in refusal(copy).splitlines())


# Ids that end a text

_IDS = [2**63, 10**30, -1, 320, 1.5, "x", True, [2, 2**63], [1.5], [[1]], {"a": 1}]


@pytest.mark.parametrize("value", _IDS, ids=str)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_is_a_whole_number_within_the_logits_width(copy: Path, name: str, value: Any) -> None:
    (copy / "generation_config.json").unlink(missing_ok=True)
    edit(copy / name, eos_token_id=value)
    assert all("eos_token_id" in reason or "config.json" in reason for reason in refusal(copy).splitlines())


@pytest.mark.parametrize("role", ["eos", "eot"])
@pytest.mark.parametrize("value", [2**63, 40, -1, -(2**62)])
def test_an_end_token_of_a_gguf_file_likewise(tmp_path: Path, role: str, value: int) -> None:
    kind = gguf.GGUFValueType.INT64 if value < 0 else gguf.GGUFValueType.UINT64
    path = tmp_path / "bad.gguf"
    write_llama(path, keys={f"tokenizer.ggml.{role}_token_id": (value, kind)})
    assert f"tokenizer.ggml.{role}_token_id is {value}; token ids go from 0 to 39" in refusal(path)


@pytest.mark.parametrize("raw", ["[" * 100_000, '{"top_k": 1' + "0" * 5000 + "}", "[1]", '{"a":', ""], ids=len)
def test_a_generation_config_that_is_no_object_is_refused(copy: Path, raw: str) -> None:
    (copy / "generation_config.json").write_text(raw)
    assert all("generation_config.json" in reason for reason in refusal(copy).splitlines())


def test_a_json_file_without_an_end_is_refused(copy: Path) -> None:
    (copy / "generation_config.json").write_bytes(b'{"a": 1}' + b" " * MAX_JSON_BYTES)
    assert all(f"has more than {MAX_JSON_BYTES} bytes" in reason for reason in refusal(copy).splitlines())


def test_a_parameter_without_an_end_is_not_drawn_with(copy: Path) -> None:
    edit(copy / "generation_config.json", top_k=float("inf"), temperature=float("nan"), top_p=0.5)
    model = describe_model(str(copy), dtype="float32")
    assert model is not None and model.sampling == {"top_p": 0.5}


# Tensors

_QUERY = "model.layers.1.self_attn.q_proj"


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tensors: tensors.update({f"{_QUERY}.bias": torch.ones(64)}), f"{_QUERY}.bias"),
        (lambda tensors: tensors.update({"model.layers.4.mlp.up_proj.weight": torch.ones(64, 32)}), "layers.4.mlp"),
        (rename("lm_head.weight", "lm_heat.weight"), "lm_heat.weight|lm_head.weight"),
        (lambda tensors: tensors.pop(f"{_QUERY}.weight"), f"lack {_QUERY}.weight (1 tensors missing)"),
    ],
)
def test_a_tensor_that_nobody_would_use_is_refused_by_name(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str
) -> None:
    edit_tensors(copy, change)
    for reason in refusal(copy).splitlines():
        assert any(word in reason for word in name.split("|")), reason


def test_fewer_layers_than_the_file_has_are_refused(copy: Path) -> None:
    edit(copy / "config.json", num_hidden_layers=2)
    assert all("its weights have model.layers.2." in reason for reason in refusal(copy).splitlines())


@pytest.mark.parametrize(
    "stored", ["blk.0.attn_norm.bias", "outpud.weight", "blk.1.ffn_up.weight", "blk.00.ffn_up.weight"]
)
def test_a_tensor_of_a_gguf_file_likewise(tmp_path: Path, stored: str) -> None:
    write_llama(tmp_path / "bad.gguf", tensors={stored: np.ones(64, np.float32)})
    for reason in refusal(tmp_path / "bad.gguf").splitlines():
        assert "its weights have" in reason


_SUPERFLUOUS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.rotary_emb.inv_freq": torch.ones(4),
    "model.embeddings.position_ids": torch.arange(8),
    "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.self_attn.k_scale": torch.tensor(1.0),
    f"{_QUERY}.bias": torch.zeros(64),  # as GPTQ's tools write them
    "vision_tower.blocks.0.attn.qkv.weight": torch.ones(2, 2),
    "mtp.layers.0.input_layernorm.weight": torch.ones(32),
}


TOKENS = [5, 9, 100, 33, 7]


def native_logits(directory: Path) -> torch.Tensor:
    """The logits after each of TOKENS, natively, [tokens, vocabulary]."""
    model = describe_model(str(directory), dtype="float32")
    assert model is not None
    with closing(native_runner(model)) as runner:
        runner.allocate([4], 16)
        return torch.as_tensor(runner.forward(batch_of(TOKENS)))


def transformers_logits(directory: Path) -> torch.Tensor:
    hf = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return hf(torch.tensor([TOKENS])).logits[0]


def test_what_real_checkpoints_have_beside_their_tensors_is_left_out(copy: Path) -> None:
    plain = native_logits(copy)
    edit_tensors(copy, lambda tensors: tensors.update(_SUPERFLUOUS))
    assert torch.equal(native_logits(copy), plain)
    load_model(str(copy), dtype="float32", n_gpu_layers=0)


def test_layers_that_foretell_more_tokens_are_left_out(copy: Path, tmp_path: Path) -> None:
    edit(copy / "config.json", num_nextn_predict_layers=1)
    edit_tensors(copy, lambda tensors: tensors.update({"model.layers.4.enorm.weight": torch.ones(32)}))
    assert describe_model(str(copy), dtype="float32") is not None
    path = tmp_path / "nextn.gguf"
    write_llama(path, block_count=2, nextn_predict_layers=1, tensors={"blk.1.nextn.enorm.weight": np.ones(64, "f4")})
    model = describe_model(str(path), dtype="float32")
    assert model is not None and len(model.layers) == 1


def test_tables_of_rotary_embeddings_in_a_gguf_file_are_left_out(tmp_path: Path) -> None:
    write_llama(tmp_path / "old.gguf", tensors={"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)})
    assert describe_model(str(tmp_path / "old.gguf"), dtype="float32") is not None


# Encoders, and families that only torch runs


@pytest.fixture
def encoder(embedder_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a tiny BERT that the test may damage."""
    return Path(shutil.copytree(embedder_dir("bert mean"), tmp_path / "encoder"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda tensors: tensors.update({"encoder.layer.7.output.dense.weight": torch.ones(32, 64)}),
            "encoder.layer.7.output.dense.weight, which",
        ),
        (lambda tensors: tensors.update({"layers.0.gate": torch.ones(1)}), "layers.0.gate, which"),
        (
            lambda tensors: tensors.update({"encoder.layer.1.output.dense.bias": torch.ones(33)}),
            r"encoder.layer.1.output.dense.bias has the shape \[33\], the configuration says \[32\]",
        ),
        (lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias"), "lack encoder.layer.1.output.dense.bias"),
    ],
)
def test_each_tensor_of_an_encoder_is_checked(
    encoder: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    edit_tensors(encoder, change)
    with pytest.raises(ModelError, match=reason):
        load_model(str(encoder), dtype="float32", n_gpu_layers=0)


def test_heads_of_an_encoder_are_left_out(encoder: Path) -> None:
    heads = ("cls.predictions.bias", "cls.seq_relationship.weight", "lm_head.dense.weight", "qa_outputs.bias")
    edit_tensors(encoder, lambda tensors: tensors.update({name: torch.ones(3) for name in heads}))
    assert not load_model(str(encoder), dtype="float32", n_gpu_layers=0).generates


def test_a_shape_of_a_family_without_an_architecture_is_checked_before_the_load(
    tiny_models: ModuleType, tmp_path: Path
) -> None:
    config = HeliumConfig(**tiny_models._GROUPED)
    torch.manual_seed(0)
    HeliumForCausalLM(config).save_pretrained(tmp_path)
    tiny_models.build_tokenizer(tmp_path)
    load_model(str(tmp_path), dtype="float32", n_gpu_layers=0)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(1, 7)}))
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj.weight has the shape \[1, 7\], the configuration"):
        load_model(str(tmp_path), dtype="float32", n_gpu_layers=0)


# Values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", f"{_QUERY}.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_its_name_at_the_load(copy: Path, name: str, value: float) -> None:
    edit_tensors(copy, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    assert all(name in reason and "not all finite" in reason for reason in refusal(copy).splitlines())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_of_16_bits_likewise(copy: Path, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[f"{_QUERY}.weight"][3, 5] = float("nan")

    edit_tensors(copy, spoil)
    assert all(f"{_QUERY}.weight" in reason for reason in refusal(copy).splitlines())


_FACTORS = {
    "F16": (0,),
    "BF16": (0,),
    "F32": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q1_0": (0,),
    "Q2_0": (0,),
}


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, places in _FACTORS.items() for at in places])
@pytest.mark.parametrize("row", [0, 40])
@pytest.mark.parametrize("form", [WEIGHT_F32, WEIGHT_I8])
def test_every_factor_of_every_type_of_block_is_looked_at(kind: str, at: int, row: int, form: int) -> None:
    per_block, size = block_size(kind)
    infinity = {"F32": b"\x00\x00\x80\x7f", "BF16": b"\x80\x7f"}.get(kind, b"\x00\x7c")
    raw = np.zeros((41, 512 // per_block, size), np.uint8)
    good = StoredTensor("w", kind, (41, 512), raw.reshape(41, -1).copy())
    raw[row, -1, at : at + len(infinity)] = np.frombuffer(infinity, np.uint8)
    bad = StoredTensor("w", kind, (41, 512), raw.reshape(41, -1))
    WeightPacker(native_library(), 1).linear(form, [good])
    with pytest.raises(TensorError, match="w has NaN or an infinity"):
        WeightPacker(native_library(), 1).linear(form, [bad])


# Files that contradict themselves


def header_of(directory: Path) -> tuple[dict[str, Any], bytes]:
    raw = (directory / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def test_tensors_that_overlap_are_refused(copy: Path, tmp_path: Path) -> None:
    header, data = header_of(copy)
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    raw = json.dumps(header).encode()
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert all("within" in reason and "norm.weight" in reason for reason in refusal(copy).splitlines())
    good = write_llama(tmp_path / "bad.gguf")
    name = b"blk.0.ffn_norm.weight"
    at = good.index(name) + len(name) + 4 + 8 + 4
    (tmp_path / "bad.gguf").write_bytes(good[:at] + struct.pack("<Q", 0) + good[at + 8 :])
    assert "beyond the beginning of" in refusal(tmp_path / "bad.gguf")


def test_a_key_that_occurs_twice_is_refused(copy: Path) -> None:
    header, data = header_of(copy)
    twice = json.dumps({"model.norm.weight": header["model.norm.weight"]})
    raw = (twice[:-1] + "," + json.dumps(header)[1:]).encode()
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert all("'model.norm.weight' occurs twice" in reason for reason in refusal(copy).splitlines())


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    save_file(tensors, copy / "a.safetensors", metadata={"format": "pt"})
    save_file(norm, copy / "b.safetensors", metadata={"format": "pt"})
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "model.norm.weight": "b.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "a.safetensors and b.safetensors have a tensor model.norm.weight" in refusal(copy)


@pytest.mark.parametrize(
    "raw", ["[" * 100_000, '{"weight_map": {"a": [1]}}', '{"weight_map": {"a": 1' + "0" * 5000 + "}}", "[]"], ids=len
)
def test_an_index_that_cannot_be_is_refused(copy: Path, raw: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(raw)
    assert all("model.safetensors.index.json" in reason for reason in refusal(copy).splitlines())


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 100_000,
        '{"bits": [[4]]}',
        '{"bits": 4, "group_size": 1e999}',
        '{"bits": 4, "dynamic": {"a": {"group_size": "x"}}}',
        '{"bits": 4, "quant_method": ["gptq"]}',
    ],
    ids=lambda raw: raw[:40],
)
def test_a_quantize_config_that_cannot_be_is_refused(copy: Path, raw: str) -> None:
    (copy / "quantize_config.json").write_text(raw)
    assert all("quantize_config.json" in reason for reason in refusal(copy).splitlines())


# Tokenizers


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "x" * 10**6}),
        ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 10**6}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 40}] * 3}),
        ("model", {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tokenizer_that_panics_or_grows_texts_is_refused(
    copy: Path, part: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "LOAD_S", 1.0)  # of processor time; one of these takes all of it, twice
    edit(copy / "tokenizer.json", **{part: value})
    assert all("its tokenizer cannot be read" in reason for reason in refusal(copy).splitlines())


# A tied head


@pytest.mark.parametrize("is_same", [False, True])
def test_a_stored_head_of_a_tied_model_counts_as_in_transformers(copy: Path, is_same: bool) -> None:
    untied = native_logits(copy)
    edit(copy / "config.json", tie_word_embeddings=True)
    if is_same:
        edit_tensors(copy, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    assert torch.allclose(native_logits(copy), transformers_logits(copy), atol=1e-3)
    assert torch.equal(native_logits(copy), untied) == (not is_same)


@pytest.mark.parametrize(
    ("kind", "head", "fields"),
    [
        ("distilbert", "SequenceClassification", {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4}),
        ("eurobert", "SequenceClassification", {"num_key_value_heads": 4, "head_dim": 8}),
        ("luke", "MaskedLM", {"entity_vocab_size": 5, "entity_emb_size": 8}),
        ("xlm", "MaskedLM", {"n_layers": 1}),
        ("xlm", "SequenceClassification", {"n_layers": 1}),
        ("bert", "MaskedLM", {}),
        ("roberta", "SequenceClassification", {}),
    ],
)
def test_the_tensors_of_an_encoders_head_are_not_refused(
    tmp_path: Path, tiny_models: ModuleType, kind: str, head: str, fields: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config: Any = AutoConfig.for_model(
        kind, vocab_size=320, max_position_embeddings=80, pad_token_id=2, **sizes, **fields
    )
    auto: Any = {"MaskedLM": AutoModelForMaskedLM, "SequenceClassification": AutoModelForSequenceClassification}[head]
    auto.from_config(config).save_pretrained(tmp_path)
    tiny_models.build_tokenizer(tmp_path)
    edit(tmp_path / "config.json", architectures=[MODEL_MAPPING[type(config)].__name__])
    assert not load_model(str(tmp_path), dtype="float32", n_gpu_layers=0, pooling="mean").generates
