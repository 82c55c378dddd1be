"""Reading adapters: what PEFT wrote is taken as PEFT takes it, and what cannot be served is refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genbatch.nif.errors import AdapterError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.lora import AdapterLimits, Adapters, read_lora
from genbatch.nif.runner import LoraAdapter
from tests.lora_adapters import change_config, change_tensors, make_adapter

KEY = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture
def base(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def model(tiny_model: Callable[[str], Model]) -> Model:
    return tiny_model("llama")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return make_adapter(base, tmp_path / "adapter", ["q_proj", "down_proj"])


def read(path: Path, model: Model, **limits: Any) -> LoraAdapter:
    return read_lora("x", path, model, AdapterLimits(**limits))


def test_an_adapter_has_its_matrices_scales_and_digest(adapter: Path, model: Model) -> None:
    found = read(adapter, model)
    assert len(found.linears) == 8 and found.rank == 4 and found.path == adapter
    query = found.linears["model.layers.3.self_attn.q_proj"]
    assert query.a.shape == (4, 32) and query.b.shape == (32, 4) and query.scale == 2.0
    assert found.nbytes == 4 * 4 * 4 * (32 + 32 + 64 + 32)
    again = read(adapter, model)
    assert again.digest == found.digest and again.handle != found.handle
    change_config(adapter, lora_alpha=9)
    assert read(adapter, model).digest != found.digest


def test_scales_are_pefts(base: Path, model: Model, tmp_path: Path) -> None:
    plain = make_adapter(base, tmp_path / "a", ["q_proj", "v_proj"], rank=6, use_rslora=True)
    assert {linear.scale for linear in read(plain, model).linears.values()} == {12 / math.sqrt(6)}
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}}
    mixed = read(make_adapter(base, tmp_path / "b", ["q_proj", "v_proj"], **patterns), model).linears
    assert mixed["model.layers.0.self_attn.q_proj"].scale == 2.0
    assert mixed["model.layers.1.self_attn.q_proj"].scale == 3 / 4
    assert mixed["model.layers.0.self_attn.v_proj"].rank == 2 and mixed["model.layers.0.self_attn.v_proj"].scale == 4.0


@pytest.mark.parametrize(
    "config",
    [
        {"targets": "all-linear"},
        {"targets": r".*\.(q|k)_proj"},
        {"layers_to_transform": [1, 2]},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    ],
)
def test_ways_of_naming_modules(base: Path, model: Model, tmp_path: Path, config: dict[str, Any]) -> None:
    assert read(make_adapter(base, tmp_path / "a", **{"targets": ["q_proj"], **config}), model).linears


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora is 'True': DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 0}, "r is '0'"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '\\(' is not a supported regular expression"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern"),
        ({"rank_pattern": {"a" * 8193: 4}}, "rank_pattern.*more than 8192 characters"),
        ({"r": 10**400}, "r is '1000"),
        ({"lora_alpha": 10**400}, "lora_alpha is '1000"),
        ({"target_modules": "(.*.*)*z"}, "does not adapt model.layers"),  # `re` hangs on this one
        ({"target_modules": "((a{60000}){60000}){60000}"}, "repeats multiply"),  # `regex` never compiles it
        ({"exclude_modules": 5}, "exclude_modules is '5'"),
        ({"exclude_modules": [5]}, "exclude_modules"),
        ({"exclude_modules": "("}, "exclude_modules: '\\(' is not a supported regular expression"),
        ({"target_modules": "("}, "target_modules: '\\(' is not a supported regular expression"),
        ({"layers_to_transform": "x"}, "layers_to_transform is 'x'"),
        ({"layers_to_transform": [[1]]}, "layers_to_transform"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": ["q_proj", "down_proj", "embed_tokens"]}, "model.embed_tokens is not a linear"),
        ({"target_modules": ["q_proj", "down_proj", "lm_head"]}, "lm_head is not a linear"),
        ({"target_modules": ["q_proj"]}, "does not adapt model.layers"),
        ({"target_modules": ["q_proj", "k_proj", "down_proj"]}, f"{KEY.format(0, 'k_proj', 'A')} is missing"),
        ({"r": 8}, "has rank 4, but adapter_config.json has 8"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_its_field(
    adapter: Path, model: Model, fields: dict[str, Any], words: str
) -> None:
    change_config(adapter, **fields)
    with pytest.raises(AdapterError, match=words) as caught:
        read(adapter, model)
    assert "adapter_" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_an_expression_that_never_ends_is_given_up(
    adapter: Path, model: Model, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.nif.models.lora._MATCHING_S", 0.2)
    endless = "(.*)" * 9 + r"\1[!?]"  # `re` never ends with less than this
    fields = {field: endless if field.endswith("modules") else {endless: 4}}
    change_config(adapter, target_modules=".*(q|down)_proj")
    read(adapter, model)
    change_config(adapter, **fields)
    with pytest.raises(AdapterError, match=rf"{field}: .* takes more than 0.2 seconds"):
        read(adapter, model)


def test_a_configuration_may_have_so_many_bytes_and_no_more(adapter: Path, model: Model) -> None:
    file = adapter / "adapter_config.json"
    text = file.read_text().ljust(2**20)
    file.write_text(text)
    read(adapter, model)
    file.write_text(text + " ")
    with pytest.raises(AdapterError, match="at most 1048576 bytes"):
        read(adapter, model)


def tensors_with(**changes: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    """Tensors added, replaced, or with None taken out; a name without a dot is A or B of layer 2's queries."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in changes.items():
            key = KEY.format(2, "q_proj", name) if name in "AB" else name
            if tensor is None:
                del tensors[key]
            else:
                tensors[key] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"A": torch.zeros(4, 48)},
            r"q_proj.lora_A.weight has the shape \[4, 48\], but the model's linear has 32 inputs",
        ),
        (
            {"B": torch.zeros(48, 4)},
            r"q_proj.lora_B.weight has the shape \[48, 4\], but the model's linear has 32 outputs",
        ),
        ({"A": torch.zeros(4)}, "it must be a matrix"),
        ({"B": torch.zeros(32, 3)}, "has rank 3, but its A has 4"),
        ({"B": None}, "layers.2.self_attn.q_proj.lora_B.weight is missing"),
        ({"A": torch.full((4, 32), math.nan)}, "q_proj.lora_A.weight has values that are not finite"),
        ({"A": torch.zeros(4, 32, dtype=torch.int8)}, "of type I8; F32, F16 and BF16 are supported"),
        ({"A": torch.zeros(200, 32)}, "has rank 200; 1 to 128 is allowed"),
        ({"A": torch.zeros(0, 32)}, "has rank 0"),
        ({"lm_head.weight": torch.zeros(1)}, "lm_head.weight is not a tensor of a LoRA adapter"),
        ({KEY.format(2, "q_proj", "magnitude_vector"): torch.zeros(1)}, "DoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(1)}, "embeddings"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "lm_head is not a linear"),
        ({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}, "layers.9"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_names(
    adapter: Path, model: Model, change: dict[str, torch.Tensor | None], words: str
) -> None:
    change_tensors(adapter, tensors_with(**change))
    with pytest.raises(AdapterError, match=words) as caught:
        read(adapter, model)
    assert "adapter_model.safetensors" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(adapter: Path, model: Model, tmp_path: Path) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole, fields = weights.read_bytes(), config.read_text()
    for content in (b"", whole[:40], whole[:-8], b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: cannot be read"):
            read(adapter, model)
    weights.write_bytes(whole)
    for text in ("", "{", "[]", "[" * 100_000):
        config.write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config\.json is not"):
            read(adapter, model)
    config.write_text(fields)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing \(adapter_model\.bin is a pickle"):
        read(adapter, model)
    with pytest.raises(AdapterError, match="is not a directory"):
        read(tmp_path / "nowhere", model)


def test_what_others_may_write_is_not_believed(adapter: Path, model: Model) -> None:
    (adapter / "adapter_model.safetensors").chmod(0o666)
    with pytest.raises(AdapterError, match="may be written to by others"):
        read(adapter, model)


def test_names_and_numbers_are_bounded(adapter: Path, model: Model) -> None:
    adapters = Adapters(model, AdapterLimits(max_loras=1))
    for name in ("", "../x", "a b", "x" * 129, "é", ".hidden"):
        with pytest.raises(AdapterError, match="a name is 1 to 128"):
            adapters.read(name, adapter)
    with pytest.raises(AdapterError, match="the model itself"):
        adapters.read(model.name, adapter)
    one = adapters.read("one", adapter)
    adapters.add(one)
    with pytest.raises(AdapterError, match="with this name is loaded already"):
        adapters.add(one)
    with pytest.raises(AdapterError, match="max_loras"):
        adapters.read("two", adapter)
    adapters.retire("one")
    assert adapters.find("one") is None and adapters["one"] is one and not adapters.serving()
    adapters.remove("one")
    adapters.read("two", adapter)
    with pytest.raises(AdapterError, match="computes no adapters"):
        Adapters(model, refusal="this computes no adapters").read("x", adapter)
    with pytest.raises(AdapterError, match=r"has rank 4; 1 to 3 is allowed \(max_lora_rank\)"):
        read(adapter, model, max_lora_rank=3)
    with pytest.raises(AdapterError, match="of the 1000 bytes of memory that are free"):
        Adapters(model, probe=lambda: 1000).read("x", adapter)
