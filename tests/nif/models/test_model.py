"""What loads, what it says about itself, and what is refused before any request."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForTokenClassification,
    MambaConfig,
    MambaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.models import model
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.runner import LayerGroup
from genbatch.nif.runners import torch_runner
from genbatch.nif.runners.torch_runner import ATTENTION_NAME


@pytest.fixture
def llama_copy(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A directory of a tiny Llama that the test may damage."""
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "copy"))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_tells_what_runners_and_requests_need(tiny_model: Callable[[str], Model]) -> None:
    model = tiny_model("llama")
    assert (model.dtype, model.device) == ("float32", CPU)
    assert model.groups == (LayerGroup((0, 1, 2, 3), None),)
    assert [(s.num_kv_heads, s.key_dim, s.value_dim) for s in model.layers] == [(2, 8, 8)] * 4
    assert (model.vocab_size, model.max_position) == (320, 256)
    assert model.eos_token_ids == {2}
    assert not model.hf.training
    assert model.hf.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("mistral", (LayerGroup((0, 1, 2, 3), 8),)),
        ("gemma3", (LayerGroup((0, 1, 3), 8), LayerGroup((2,), None))),
        ("gemma2", (LayerGroup((0, 2), 8), LayerGroup((1, 3), None))),
        ("gpt_neox", (LayerGroup((0, 1, 2, 3), None),)),
    ],
)
def test_h07_layers_that_look_back_equally_far_form_a_group(
    family: str, groups: tuple[LayerGroup, ...], tiny_model: Callable[[str], Model]
) -> None:
    assert tiny_model(family).groups == groups


def test_a_window_that_no_sequence_outgrows_is_no_window(llama_copy: Path, tiny_models: ModuleType) -> None:
    directory = tiny_models.build_model("mistral", llama_copy)
    edit_config(directory, sliding_window=256)
    assert load_model(str(directory), n_gpu_layers=0).groups == (LayerGroup((0, 1, 2, 3), None),)


def test_a_window_switched_off_is_no_window(tmp_path: Path, tiny_models: ModuleType) -> None:
    sizes = {key: value for key, value in tiny_models._GROUPED.items() if key != "head_dim"}
    config = Qwen2Config(**sizes, sliding_window=8, use_sliding_window=False)
    save(Qwen2ForCausalLM, config, tmp_path, tiny_models)
    assert load_model(str(tmp_path), n_gpu_layers=0).groups == (LayerGroup((0, 1, 2, 3), None),)


def test_rotary_rescaling_bounds_the_positions(llama_copy: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    edit_config(llama_copy, rope_parameters=rope)
    assert load_model(str(llama_copy), n_gpu_layers=0).max_position == 64


def test_every_end_token_of_the_generation_config_counts(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(str(llama_copy), n_gpu_layers=0).eos_token_ids == {2, 7, 9}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_half_precision_loads_and_passes_the_check(
    family: str, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    model = load_model(str(tiny_model_dir(family)), dtype=dtype, n_gpu_layers=0)
    assert model.dtype == dtype and model.torch_dtype is getattr(torch, dtype)
    assert {weight.dtype for weight in model.hf.parameters()} == {model.torch_dtype}


def test_dtype_auto_is_float32_on_the_cpu(tiny_model_dir: Callable[[str], Path]) -> None:
    assert load_model(str(tiny_model_dir("llama")), n_gpu_layers=0).dtype == "float32"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_dtype_auto_is_bfloat16_on_the_gpu(tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model_dir("llama")))
    assert (model.dtype, model.device.type) == ("bfloat16", "cuda")


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "int8"), ("dtype", "fp32"), ("n_gpu_layers", 12), ("n_gpu_layers", -2), ("n_gpu_layers", True)],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option) as caught:
        load_model("smollm2", **{option: value})
    assert caught.value.option == option


def test_progress_ends_complete_and_nothing_else_is_written(
    tiny_model_dir: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(str(tiny_model_dir("llama")), n_gpu_layers=0, progress=lambda *step: seen.append(step))
    assert seen == [("load", done, 3) for done in range(4)]
    assert capfd.readouterr() == ("", "")


# Refusals

_SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_REFUSED: dict[str, tuple[Any, PreTrainedConfig, str]] = {
    "encoder-decoder": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "encoder": (BertLMHeadModel, BertConfig(**_SIZES, intermediate_size=64), "is an encoder"),
    "state space": (
        MambaForCausalLM,
        MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4),
        "recurrent state",
    ),
    "ALiBi": (BloomForCausalLM, BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
    "Falcon": (FalconForCausalLM, FalconConfig(**_SIZES), "KV heads and norms"),
    "attention that is not ours": (
        StableLmForCausalLM,
        StableLmConfig(**_SIZES, num_key_value_heads=4),
        "only the native runner",
    ),
    "arguments that are lost": (
        NemotronForCausalLM,
        NemotronConfig(**_SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=64),
        "only the native runner",
    ),
    "classification of tokens": (
        LlamaForTokenClassification,
        LlamaConfig(**_SIZES, intermediate_size=64, pad_token_id=2),
        "LlamaForTokenClassification",
    ),
    "a head of its own": (
        GPTNeoXForSequenceClassification,
        GPTNeoXConfig(**_SIZES, intermediate_size=64, pad_token_id=2),
        "head is not one linear",
    ),
}


def save(model_class: Any, config: PreTrainedConfig, directory: Path, tiny_models: ModuleType) -> None:
    """Saves a random model with a tokenizer."""
    torch.manual_seed(0)
    model_class(config).save_pretrained(directory)
    tiny_models.build_tokenizer(directory)


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_model_that_cannot_be_served_is_refused_with_its_name_and_the_reason(
    kind: str, tmp_path: Path, tiny_models: ModuleType
) -> None:
    model_class, config, reason = _REFUSED[kind]
    save(model_class, config, tmp_path, tiny_models)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(tmp_path), n_gpu_layers=0)
    assert caught.value.model == str(tmp_path)


def test_chunked_attention_is_refused(llama_copy: Path) -> None:
    edit_config(llama_copy, layer_types=["chunked_attention"] * 4)
    with pytest.raises(ModelError, match="chunked_attention"):
        load_model(str(llama_copy), n_gpu_layers=0)
    edit_config(llama_copy, layer_types=None, attention_chunk_size=8)
    with pytest.raises(ModelError, match="chunked attention"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_b14_a_missing_path_fails_at_start_with_its_name() -> None:
    with pytest.raises(ModelError, match=r"/no/such/model.*no such file or directory"):
        load_model("/no/such/model")


def test_unreadable_weights_are_refused(llama_copy: Path) -> None:
    weights = llama_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="weights cannot be read"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_missing_weights_are_not_made_up(llama_copy: Path) -> None:
    weights = llama_copy / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "layers.2.mlp.up" not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_weights_of_another_shape_are_refused(llama_copy: Path) -> None:
    edit_config(llama_copy, intermediate_size=32)
    with pytest.raises(ModelError, match="weights cannot be read"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_weights_that_are_no_numbers_are_refused(llama_copy: Path) -> None:
    weights = llama_copy / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not all finite"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_an_unknown_configuration_is_refused(llama_copy: Path) -> None:
    edit_config(llama_copy, model_type="no_such_architecture")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_code_from_the_directory_is_never_run(llama_copy: Path) -> None:
    trap = llama_copy / "sprung"
    (llama_copy / "trap.py").write_text(f"open({str(trap)!r}, 'w')")
    edit_config(llama_copy, model_type="trap", auto_map={"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.M"})
    with pytest.raises(ModelError):
        load_model(str(llama_copy), n_gpu_layers=0)
    assert not trap.exists()


def test_a_missing_tokenizer_is_refused(llama_copy: Path) -> None:
    for file in llama_copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(str(llama_copy), n_gpu_layers=0)


def test_the_self_check_refuses_a_model_whose_paged_logits_differ(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = torch_runner._span

    def forgetful(*args: Any) -> Any:
        return span(*args[:4], replace(args[4], window=3), args[5])  # every layer sees three positions only

    monkeypatch.setattr(torch_runner, "_span", forgetful)
    with pytest.raises(ModelError, match="off by"):
        load_model(str(tiny_model_dir("llama")), n_gpu_layers=0)


def test_a_layer_whose_window_contradicts_the_configuration_is_refused(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "layer_groups", lambda *_: (LayerGroup((0, 1, 2, 3), 5),))
    with pytest.raises(ModelError, match="window of 8"):
        load_model(str(tiny_model_dir("mistral")), n_gpu_layers=0)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}, {"temperature", "top_p", "top_k"}),
        ({"top_k": 64, "do_sample": True, "temperature": 1.0}, {"temperature", "top_k"}),
        ({"temperature": 0.6, "do_sample": False}, set()),  # greedy, whatever else it says
        (
            {"temperature": 0.0, "top_p": 7, "top_k": -1, "min_p": "x", "repetition_penalty": 1.1},
            {"repetition_penalty"},
        ),
        ({"eos_token_id": 2}, set()),
        (None, set()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_how_its_makers_say_to_draw_is_known(
    said: dict[str, Any] | None, kept: set[str], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    if said is not None:
        path.write_text(json.dumps(said))
    described = describe_model(str(directory), dtype="float32")
    assert described is not None
    assert described.sampling == {name: (said or {})[name] for name in kept}
