"""Checkpoints that are quantised already: token for token what transformers generates with the weights they hold."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from genbatch.nif.context import Context
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError
from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import Entry, Logits
from tests.nif.models.quantised_files import (
    FORMATS,
    NEW_TOKENS,
    Checkpoint,
    Format,
    edit_config,
    make_checkpoint,
    make_gpt_oss,
    without,
)

MAKE = Callable[..., Checkpoint]


@pytest.fixture
def make(tmp_path: Path, tiny_models: ModuleType) -> MAKE:
    """make("awq-32", "qwen2") is such a checkpoint with a tokenizer."""

    def checkpoint(form: Format | str, family: str = "llama", directory: str = "model", **config: Any) -> Checkpoint:
        made = make_checkpoint(tmp_path / directory, form, family, **config)
        tiny_models.build_tokenizer(made.directory)
        return made

    return checkpoint


def served(directory: Path, **options: Any) -> Context:
    plain = {"n_gpu_layers": 0, "runner": "native", "dtype": "float32", "n_ctx": 1024, **options}
    return load_engine(EngineOptions(model_path=str(directory), **plain)).open_context(
        n_parallel=3, n_held=0, n_batch=64
    )


def greedy(context: Context, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All prompts in one batch; they begin one step after another."""
    answers: list[list[int]] = [[] for _ in prompts]
    step = 0
    while batch := [
        Entry(i, answer[-1:] or list(prompts[i]), context.kv.length(i), Logits.LAST)
        for i, answer in enumerate(answers)
        if i <= step and len(answer) < NEW_TOKENS
    ]:
        for entry, logits in zip(batch, context.eval(batch), strict=True):
            answers[entry.seq_id].append(int(logits[-1].argmax()))
        step += 1
    for i in range(len(prompts)):
        context.seq_rm(i)
    return answers


def prompts() -> list[list[int]]:
    drawn: list[int] = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return [drawn[:33], drawn[33:38], drawn[38:60]]


def check(checkpoint: Checkpoint, **options: Any) -> Context:
    """The prompts alone and in one batch."""
    wanted = [checkpoint.generate(prompt) for prompt in prompts()]
    context = served(checkpoint.directory, **options)
    assert [greedy(context, [prompt])[0] for prompt in prompts()] == wanted
    assert greedy(context, prompts()) == wanted
    return context


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_equals_generate_natively(make: MAKE, form: str) -> None:
    checkpoint = make(form)
    context = check(checkpoint)
    assert isinstance(context.runner, NativeRunner)
    context.close()


@pytest.fixture
def gpt_oss(tmp_path: Path, tiny_models: ModuleType) -> Checkpoint:
    checkpoint = make_gpt_oss(tmp_path / "gpt-oss")
    tiny_models.build_tokenizer(checkpoint.directory)
    return checkpoint


def test_gpt_oss_in_mxfp4_equals_generate_natively(gpt_oss: Checkpoint) -> None:
    context = check(gpt_oss)
    assert isinstance(context.runner, NativeRunner)
    context.close()


def test_gpt_oss_in_mxfp4_keeps_its_experts_in_their_bits(gpt_oss: Checkpoint) -> None:
    model = describe_model(str(gpt_oss.directory))
    assert model is not None and model.weights is not None
    start, state = "model.layers.1.mlp.experts", gpt_oss.hf.state_dict()
    for index in range(4):
        gate, up, down = (
            model.weights.tensor(f"{start}.{index}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")
        )
        assert {tensor.kind for tensor in (gate, up, down)} == {"MXFP4"}
        gate_up = state[f"{start}.gate_up_proj"][index]
        assert torch.equal(gate.whole().T, gate_up[:, 0::2])
        assert torch.equal(up.whole().T, gate_up[:, 1::2])
        assert torch.equal(down.whole().T, state[f"{start}.down_proj"][index])


def test_gpt_oss_in_mxfp4_equals_generate_in_torch(gpt_oss: Checkpoint) -> None:
    check(gpt_oss, runner="torch").close()


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("fault", ["missing", "type", "shape", "empty"])
def test_a_tensor_of_mxfp4_that_does_not_fit_is_named(gpt_oss: Checkpoint, part: str, fault: str) -> None:
    path = gpt_oss.directory / "model.safetensors"
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    tensors = load_file(path)
    changed = tensors.pop(name)
    if fault == "type":
        tensors[name] = changed.to(torch.int32)
    elif fault == "shape":
        tensors[name] = changed[:, :-1].clone()
    elif fault == "empty":
        tensors[name] = changed[:, :0].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match="down_proj_"):
        describe_model(str(gpt_oss.directory))


@pytest.mark.parametrize(
    "form", ["gptq-4-128-gptq", "awq-32", "packed-8-channel", "fp8-block", "bitsandbytes-nf4", "modelopt-nvfp4"]
)
@pytest.mark.parametrize("family", ["qwen2", "phi3", "mixtral"])
def test_merged_matrices_biases_and_experts_equal_generate(make: MAKE, form: str, family: str) -> None:
    check(make(form, family)).close()


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("gptq-4-32-desc_act", "llama"),
        ("awq-128", "qwen2"),
        ("packed-4-64-asymmetric", "phi3"),
        ("fp8-tensor", "mixtral"),
        ("bitsandbytes-nf4", "llama"),
        ("nvfp4-packed", "llama"),
        ("mlx-4-64", "qwen2"),
        ("mxfp4-packed", "llama"),
    ],
)
def test_torch_reads_the_same(make: MAKE, form: str, family: str) -> None:
    check(make(form, family), runner="torch").close()


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_to_the_bit_what_the_file_says(make: MAKE, form: str) -> None:
    checkpoint = make(form, "qwen2")
    model = describe_model(str(checkpoint.directory))
    assert model is not None and model.weights is not None
    state = checkpoint.hf.state_dict()
    assert set(model.weights.names()) == set(state)
    for name, values in state.items():
        assert torch.equal(model.weights.tensor(name).whole(), values), name
        assert model.weights.shape(name) == tuple(values.shape)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("gptq-4-0-gptq", "G4_128"),
        ("gptq-4-32-gptq_v2", "G4_32"),
        ("gptq-4-64-gptq", "G4_64"),
        ("gptq-8-0-symmetric", "G8_128"),
        ("gptq-8-32", "G8_32"),
        ("awq-128", "G4_128"),
        ("packed-4-32-float32", "G4_32"),
        ("packed-8-channel", "G8_128"),
        ("int-quantized", "G8_128"),
        ("naive-quantized", "G8_32"),
        ("gptq-4-32-desc_act", "F32"),
        ("gptq-4-odd-groups", "F32"),
        ("bitsandbytes-nf4", "BF16"),
        ("nvfp4-packed", "N4_128"),
        ("mlx-4-64", "Q4_1"),
        ("mlx-4-32-float16", "Q4_1"),
        ("mlx-8-64", "BF16"),
        ("mxfp4-packed", "MXFP4"),
        ("modelopt-nvfp4", "N4_128"),
        ("modelopt-fp8", "F8_128"),
        ("bitsandbytes-int8", "G8_128"),
        ("fp8-block", "F8_32"),
        ("fp8-tensor", "F8_128"),
    ],
)
def test_codes_stay_codes_where_their_groups_are_whole_blocks(make: MAKE, form: str, kind: str) -> None:
    model = describe_model(str(make(form).directory))
    assert model is not None and model.weights is not None
    tensor = model.weights.tensor("model.layers.0.mlp.down_proj.weight")
    assert tensor.kind == kind
    if kind[0] == "G":
        bits, inputs = int(kind[1]), int(kind[3:])
        assert tensor.rows.nbytes == tensor.shape[0] * tensor.shape[1] // inputs * (6 + inputs * bits // 8)
    if kind.startswith("F8"):
        inputs = int(kind[3:])
        assert tensor.rows.nbytes == tensor.shape[0] * tensor.shape[1] // inputs * (4 + inputs)


@pytest.mark.parametrize("form", ["gptq-4-32-gptq", "awq-0", "packed-4-128", "int-quantized", "fp8-block"])
def test_linears_that_are_not_converted_stay_as_they_are(make: MAKE, form: str) -> None:
    """Also some of those that are merged: queries in codes beside keys that are plain numbers."""
    check(make(without(form, "k_proj", "layers.1.mlp.up_proj", "o_proj"))).close()


def test_a_head_and_every_other_linear_may_be_quantised(make: MAKE) -> None:
    check(make(replace(FORMATS["gptq-4-128-gptq"], plain=()), "qwen2")).close()


def test_gptqmodels_settings_for_some_linears_are_read(make: MAKE) -> None:
    """`dynamic`: downs in 8 bits and groups of 64, the others in 4 bits and groups of 32."""
    fine, coarse = FORMATS["gptq-4-32-gptq"], FORMATS["gptq-8-32"]
    coarse = replace(coarse, group=64, config={**coarse.config, "checkpoint_format": "gptq"})

    def write(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        mine = coarse if weight.shape == (128, 256) else fine
        return mine.write(mine, weight)

    own = {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, "-:lm_head": {}}
    check(make(replace(fine, write=write, config={**fine.config, "dynamic": own}))).close()


def test_shards_and_the_first_tools_own_file_are_read(make: MAKE) -> None:
    checkpoint = make("gptq-4-128-gptq")
    tensors, directory = load_file(checkpoint.directory / "model.safetensors"), checkpoint.directory
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, directory / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    settings = {key: FORMATS["gptq-4-128-gptq"].config[key] for key in ("bits", "group_size", "desc_act", "sym")}
    (directory / "quantize_config.json").write_text(json.dumps(settings))
    edit_config(directory, quantization_config=None)
    check(checkpoint).close()


@pytest.mark.parametrize("form", ["gptq-4-128-gptq", "packed-8-128-asymmetric"])
def test_8_bit_activations_meet_the_same_codes(make: MAKE, form: str) -> None:
    """No text is promised; logits are near, and the same bit for bit alone and in company."""
    checkpoint = make(form)
    exact, rounded = served(checkpoint.directory), served(checkpoint.directory, quantize="int8")
    rows = []
    for context in (exact, rounded):
        whole = [Entry(i, prompt, 0, Logits.LAST) for i, prompt in enumerate(prompts())]
        rows.append(np.concatenate([logits[-1:] for logits in context.eval(whole)]))
        for i in range(len(prompts())):
            context.seq_rm(i)
    alone = rounded.eval([Entry(1, prompts()[1], 0, Logits.LAST)])[0][-1]
    assert np.array_equal(alone, rows[1][1])
    assert float((rows[0] - rows[1]).std()) < 0.05 * float(rows[0].std())
    exact.close()
    rounded.close()


# What is not read, and files that are broken


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'"),
        ({"bits": 4}, "quant_method is ''"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits is 3"),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "bits is 2"),
        ({"quant_method": "gptq", "group_size": 128}, "bits is None"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 3}}}, "dynamic names 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8 of AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4a16"}, "format is 'nvfp4a16'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo is None"),
        ({"bits": 7, "group_size": 64}, "bits is 7 in groups of 64 of MLX"),
        ({"bits": 4, "group_size": 64, "x": {"bits": 1, "group_size": 64}}, "bits is 1 in groups of 64 of MLX"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "mode is 'mxfp4' of MLX"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            "config_groups.group_0.weights is int of 3 bits",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name_before_weights_are(
    make: MAKE, settings: dict[str, Any], reason: str
) -> None:
    directory = make("awq-0").directory
    edit_config(directory, quantization_config=settings)
    (directory / "model.safetensors").write_bytes(b"no weights at all")
    for load in (describe_model, load_model):
        with pytest.raises(ModelError) as refused:
            load(str(directory))
        assert refused.value.reason.startswith(
            f"quantization_config: {reason}, which is not supported; use the original model"
        )
        assert "\n" not in refused.value.reason


NAME = "model.layers.0.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("form", "part", "change", "reason"),
    [
        ("gptq-4-32-gptq", "scales", None, f"its weights lack {NAME}.scales, but model.safetensors has"),
        ("gptq-4-32-gptq", "qweight", None, f"its weights lack {NAME}.qweight, but model.safetensors has"),
        ("awq-32", "qzeros", None, f"its weights lack {NAME}.qzeros, but model.safetensors has"),
        ("packed-4-128", "weight_shape", None, f"its weights lack {NAME}.weight_shape, but model.safetensors has"),
        ("fp8-tensor", "weight_scale", None, f"its weights lack {NAME}.weight_scale, but model.safetensors has"),
        ("int-quantized", "weight_scale", None, f"its weights lack {NAME}.weight_scale, but model.safetensors has"),
        ("gptq-4-32-gptq", "qzeros", lambda t: t[:-1], f"model.safetensors: {NAME}.qzeros has the shape [3, 32]"),
        ("gptq-4-32-gptq", "qweight", lambda t: t[:8], f"model.safetensors: {NAME}.scales has 4 groups of 64 inputs"),
        ("gptq-4-32-gptq", "qweight", lambda t: t.float(), f"model.safetensors: {NAME}.qweight is of type F32"),
        ("gptq-4-32-gptq", "g_idx", lambda t: t + 9, f"model.safetensors: {NAME}.g_idx names the groups 9 to 12 of 4"),
        ("gptq-4-32-gptq", "g_idx", lambda t: t[:5], f"model.safetensors: {NAME}.g_idx has the shape [5]"),
        ("gptq-4-32-gptq", "scales", lambda t: t / 0, f"model.safetensors: {NAME}.scales has a scale that is no"),
        ("awq-32", "qweight", lambda t: t[:, :-1], f"model.safetensors: {NAME}.qweight has the shape [128, 31]"),
        ("awq-32", "scales", lambda t: t[:3], f"model.safetensors: {NAME}.qzeros has the shape [4, 32]"),
        ("packed-4-128", "weight_packed", lambda t: t[:, :-1], f"model.safetensors: {NAME}.weight_packed has 15 words"),
        ("packed-4-128", "weight_scale", lambda t: t[:-1], f"model.safetensors: {NAME}.weight_scale has the shape"),
        ("packed-4-128", "weight_shape", lambda t: t[:1], f"model.safetensors: {NAME}.weight_shape has the shape [1]"),
        ("packed-4-128", "weight_shape", lambda t: -t, f"model.safetensors: {NAME}.weight_shape"),
        ("int-quantized", "weight_scale", lambda t: t[:7], f"model.safetensors: {NAME}.weight_scale has the shape [7"),
        ("bitsandbytes-nf4", STATE, None, f"its weights lack {NAME}.weight.quant_state.bitsandbytes__fp4"),
        (
            "bitsandbytes-nf4",
            STATE,
            lambda t: t[:-9],
            "bitsandbytes__nf4 is not a state of bitsandbytes: JSONDecodeError",
        ),
        ("bitsandbytes-nf4", STATE, lambda t: t[:2] * 0 + 49, "is not a state of bitsandbytes: TypeError"),
        ("bitsandbytes-nf4", "weight", lambda t: t[:9], f"{NAME}.weight has 9 bytes for 256 x 128 codes of 4 bits"),
        ("bitsandbytes-nf4", "weight.absmax", lambda t: t[1:], f"{NAME}.weight.absmax has the shape [511]"),
        ("bitsandbytes-nf4", "weight.absmax", lambda t: t.float(), f"{NAME}.weight.absmax is of type F32"),
        ("bitsandbytes-nf4", "weight.quant_map", lambda t: t / 0, "weight.quant_map has a scale that is not finite"),
        ("bitsandbytes-nf4", "weight.nested_absmax", None, f"its weights lack {NAME}.weight.nested_absmax"),
        ("nvfp4-packed", "weight_global_scale", None, f"its weights lack {NAME}.weight_global_scale"),
        ("nvfp4-packed", "weight_global_scale", lambda t: t * 0, "weight_global_scale is zero"),
        ("nvfp4-packed", "weight_scale", lambda t: t[:, 1:], f"{NAME}.weight_scale has the shape [256, 7]"),
        (
            "nvfp4-packed",
            "weight_scale",
            lambda t: (t.float() * nan).to(t.dtype),
            "weight_scale has a scale that is no",
        ),
        ("nvfp4-packed", "weight_packed", lambda t: t[:, :-1], f"{NAME}.weight_packed has 126 inputs"),
        ("modelopt-nvfp4", "weight_scale_2", lambda t: t.expand(2), f"{NAME}.weight_scale_2 is not one number"),
        ("mlx-4-64", "biases", None, f"its weights lack {NAME}.biases"),
        ("mlx-4-64", "scales", lambda t: t[:, 1:], f"{NAME}.scales has the shape [256, 1], where [256, 2] is needed"),
        (
            "mlx-4-64",
            "weight",
            lambda t: t.view(torch.int32)[:, 1:].view(torch.uint32),
            f"{NAME}.weight has 120 inputs",
        ),
        ("bitsandbytes-int8", "SCB", None, f"its weights lack {NAME}.weight_scale"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:1], f"model.safetensors: {NAME}.weight_scale_inv has the shape"),
    ],
)
def test_a_part_that_is_missing_or_wrong_is_named_with_its_file(
    make: MAKE, form: str, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, reason: str
) -> None:
    directory = make(form).directory
    path = directory / "model.safetensors"
    tensors = load_file(path)
    found = tensors.pop(f"{NAME}.{part}")
    if change is not None:
        tensors[f"{NAME}.{part}"] = change(found).contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        served(directory)
    assert reason in refused.value.reason and "\n" not in refused.value.reason


def test_a_file_that_is_cut_short_names_the_tensor(make: MAKE) -> None:
    path = make("gptq-4-32-gptq").directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ModelError, match=r"model\.safetensors: model\..* ends at byte \d+ of \d+"):
        served(path.parent)


def test_mlx_may_have_other_bits_in_some_linears_and_codes_that_float16_cannot_scale(make: MAKE) -> None:
    checkpoint = make("mlx-4-64")
    path = checkpoint.directory / "model.safetensors"
    tensors = load_file(path)
    other = make("mlx-8-64", directory="other")
    others = load_file(other.directory / "model.safetensors")
    for part in ("weight", "scales", "biases"):
        tensors[f"{NAME}.{part}"] = others[f"{NAME}.{part}"]
    down = NAME.replace("up_proj", "down_proj")
    tensors[f"{down}.scales"] = tensors[f"{down}.scales"] * 1e-5  # float16 has fewer digits there
    save_file(tensors, path, {"format": "mlx"})
    settings = {"group_size": 64, "bits": 4, NAME: {"group_size": 64, "bits": 8}, "lm_head": False}
    edit_config(checkpoint.directory, quantization_config=settings)
    model = describe_model(str(checkpoint.directory))
    assert model is not None and model.weights is not None
    assert torch.equal(model.weights.tensor(f"{NAME}.weight").whole(), other.hf.state_dict()[f"{NAME}.weight"])
    assert model.weights.tensor(f"{down}.weight").kind == "BF16"
    served(checkpoint.directory).close()


def test_mlx_has_all_experts_of_a_layer_in_one_tensor(make: MAKE) -> None:
    checkpoint = make("mlx-4-64", "mixtral")
    path = checkpoint.directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts.0." in name]:
        start, rest = name.split(".experts.0.")
        number, part = rest.split(".")
        projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[number]
        stacked = torch.stack([tensors.pop(f"{start}.experts.{i}.{rest}") for i in range(3)])
        tensors[f"{start}.switch_mlp.{projection}.{part}"] = stacked
    save_file(tensors, path, {"format": "mlx"})
    model = describe_model(str(checkpoint.directory))
    assert model is not None and model.weights is not None
    assert not [name for name in model.weights.names() if "switch_mlp" in name]
    check(checkpoint).close()
    tensors[f"{start}.switch_mlp.{projection}.biases"] = torch.zeros(2, 1, 1, dtype=torch.bfloat16)
    save_file(tensors, path, {"format": "mlx"})
    with pytest.raises(ModelError, match=rf"{start}.switch_mlp.{projection}.biases has the shape \[1, 1\]"):
        served(checkpoint.directory)


def test_codes_of_another_size_than_the_configuration_asks_for_are_refused(make: MAKE) -> None:
    directory = make("awq-32").directory
    edit_config(directory, intermediate_size=288)
    with pytest.raises(ModelError, match=r"_proj\.weight has the shape \[256, 128\], the configuration says \[288"):
        served(directory)


def test_a_type_that_no_checkpoint_has_is_refused(make: MAKE) -> None:
    path = make("fp8-block").directory / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(raw[:8] + raw[8 : 8 + size].replace(b'"F8_E4M3"', b'"F4_E9M9"') + raw[8 + size :])
    with pytest.raises(ModelError, match=r"model\.safetensors: .* is of type F4_E9M9"):
        served(path.parent)
