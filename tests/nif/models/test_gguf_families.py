"""GGUF files of each family, named as llama.cpp's converter does: the configuration and every tensor come back."""

import importlib.util
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import ModelError
from genbatch.nif.models.architecture import kv_sources, shapes_of
from genbatch.nif.models.architectures import ARCHITECTURES, layer_groups, max_position
from genbatch.nif.models.gguf_config import gguf_config, gguf_end_tokens
from genbatch.nif.models.gguf_families import family_of
from genbatch.nif.models.gguf_file import GgufFile, GgufWeights
from genbatch.nif.models.model import _merged
from genbatch.nif.models.rope import RopeTables
from genbatch.nif.native.library import STORED_KINDS
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner, native_runner
from tests.nif.models.gguf_files import batch_of, put_tokenizer

ARCH = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma3n": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "gemma4_experts": gguf.MODEL_ARCH.GEMMA4,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "granite_moe": gguf.MODEL_ARCH.GRANITE_MOE,
    "apertus": gguf.MODEL_ARCH.APERTUS,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "qwen3": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "ernie": gguf.MODEL_ARCH.ERNIE4_5,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "llama_odd": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "ernie_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek3": gguf.MODEL_ARCH.DEEPSEEK2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "hunyuan": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
}
_DELTAS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_DEEPSEEK_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GROUPED_EXPERTS = {
    **_DEEPSEEK_EXPERTS,
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_DEEPSEEK = {"attention.kv_lora_rank": "kv_lora_rank", **_DEEPSEEK_EXPERTS}
_GEMMA4 = {"attention.sliding_window": "sliding_window", "attention.shared_kv_layers": "num_kv_shared_layers"}
# What only some files say: key, and the configuration's name for it.
MORE = {
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "qwen3_5": _DELTAS,
    "qwen3_5_moe": {
        **_DELTAS,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    "gemma3": {"attention.sliding_window": "sliding_window"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "granite_moe": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    "gpt_oss": {
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    "olmoe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "mixtral": {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
    "cohere2": {"attention.sliding_window": "sliding_window", "logit_scale": "logit_scale"},
    "cohere": {"logit_scale": "logit_scale"},
    "dots1": _GROUPED_EXPERTS,
    "minimax_m2": {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    "exaone4": {"attention.sliding_window": "sliding_window"},
    "olmo3": {"attention.sliding_window": "sliding_window"},
    "qwen2_moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "glm4_moe": _GROUPED_EXPERTS,
    "ernie_moe": {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    "hunyuan_moe": {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
    "deepseek2": _DEEPSEEK,
    "deepseek3": {
        **_DEEPSEEK,
        **_GROUPED_EXPERTS,
        "attention.q_lora_rank": "q_lora_rank",
    },
    "gemma3n": {
        **_GEMMA4,
        "altup.num_inputs": "altup_num_inputs",
        "altup.active_idx": "altup_active_idx",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma4": {
        **_GEMMA4,
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma4_experts": {
        **_GEMMA4,
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "phi3": {"rope.scaling.original_context_length": "original_max_position_embeddings"},
    "qwen3_moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}


@pytest.fixture(scope="module")
def models() -> ModuleType:
    """The small random models of the native tests; tests are no package, so the module is loaded by its path."""
    path = Path(__file__).parent.parent / "native" / "models.py"
    spec = importlib.util.spec_from_file_location("native_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What a module of the native tests is made with so that its file can say all of it.
CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {"conv_bias": False},
    "qwen3_5": {"attention_bias": False},
    "cohere": {"attention_bias": False},
    "dots1": {"layer_types": ["full_attention"] * 3},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"mlp_only_layers": []},
    "cohere2": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek2": {"rope_parameters": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.9}},  # llama.cpp has one for both
    "deepseek3": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    # The converter multiplies the factor into the base.
    "hunyuan": {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "hunyuan_moe": {"moe_topk": 2},
    "llama_odd": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}
EPS = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps"}
EPS |= dict.fromkeys(("stablelm", "gpt_neox", "cohere", "cohere2"), "layer_norm_eps")


def put_number(writer: gguf.GGUFWriter, key: str, value: float) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
"""Tensors that only the layer of multi-token prediction has, which is the last one in a file."""


def put_metadata(writer: gguf.GGUFWriter, name: str, config: Any, num_mtp: int = 0) -> None:
    arch = gguf.MODEL_ARCH_NAMES[ARCH[name]]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    eps = "layer_norm_epsilon" if name in EPS else "layer_norm_rms_epsilon"
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers + num_mtp,
        **({"nextn_predict_layers": num_mtp} if num_mtp else {}),
        "feed_forward_length": getattr(config, "intermediate_size", 32),
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.key_length": head_dim,
        f"attention.{eps}": float(
            config.norm_eps if name == "lfm2" else getattr(config, EPS.get(name, "rms_norm_eps"))
        ),
        "rope.freq_base": float(rope["rope_theta"] if "rope_theta" in rope else rope["full_attention"]["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **{key: getattr(config, ours) for key, ours in MORE.get(name, {}).items()},
    }
    if name == "gemma3":
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        values["rope.scaling.factor"] = float(rope["full_attention"]["factor"])
    if name == "gpt_oss":
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        values["rope.scaling.factor"] = float(rope["factor"])
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch in ("deepseek2", "mistral3"):
        put_yarn(writer, arch, rope, values)
    if arch == "deepseek2":
        put_deepseek(name, config, values)
    if "linear_attention" in getattr(config, "layer_types", ()):
        values["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        values["full_attention_interval"] = 2
        values["attention.value_length"] = head_dim
        # Pairs take turns by axis, as in published files; llama.cpp turns a pair that no axis has by position 0.
        pairs = values["rope.dimension_count"] // 2
        writer.add_rope_dimension_sections([len(range(axis, pairs, 3)) for axis in range(3)] + [0])
    if name == "lfm2":
        heads = values.pop("attention.head_count_kv")
        writer.add_array(f"{arch}.attention.head_count_kv", [0 if k == "conv" else heads for k in config.layer_types])
    if arch == "gemma4":
        put_gemma4(writer, config, values)
    if arch == "gemma3n":
        writer.add_feed_forward_length(values.pop("feed_forward_length"))
        deviations = torch.distributions.Normal(0, 1).icdf(torch.tensor(config.activation_sparsity_pattern))
        writer.add_activation_sparsity_scale(deviations.tolist())
        values["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    for key, value in values.items():
        put_number(writer, f"{arch}.{key}", value)
    if name in ("exaone4", "olmo3") or arch in ("gemma3n", "gemma4"):
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", windows)


def put_yarn(writer: gguf.GGUFWriter, arch: str, rope: dict[str, Any], values: dict[str, Any]) -> None:
    writer.add_string(f"{arch}.rope.scaling.type", "yarn")
    values["rope.scaling.factor"] = float(rope["factor"])
    values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch == "deepseek2":
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    else:
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]


def put_deepseek(name: str, config: Any, values: dict[str, Any]) -> None:
    """Older files, as the one of V2, have the sizes of a head; newer ones those of what is cached beside them."""
    values["rope.dimension_count"] = config.qk_rope_head_dim
    values["expert_gating_func"] = 1 if name == "deepseek2" else 2
    heads = {"key_length": config.qk_head_dim, "value_length": config.v_head_dim}
    if name == "deepseek2":
        values |= {f"attention.{key}": size for key, size in heads.items()}
        return
    values |= {f"attention.{key}_mla": size for key, size in heads.items()}
    values["attention.head_count_kv"] = 1
    values["attention.key_length"] = config.kv_lora_rank + config.qk_rope_head_dim
    values["attention.value_length"] = config.kv_lora_rank


def put_gemma4(writer: gguf.GGUFWriter, config: Any, values: dict[str, Any]) -> None:
    """What differs among layers: heads, widths and the rotary embedding."""
    sizes, own = shapes_of(config), config.layer_types.index("full_attention")
    head_dim = sizes[own][1]
    values["attention.key_length"] = values["rope.dimension_count"] = head_dim
    values["attention.key_length_swa"] = values["rope.dimension_count_swa"] = config.head_dim
    values["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.use_double_wide_mlp:
        width, shared = values.pop("feed_forward_length"), config.num_kv_shared_layers
        widths = [width] * (config.num_hidden_layers - shared) + [2 * width] * shared
        writer.add_array("gemma4.feed_forward_length", widths)
    if config.attention_k_eq_v:
        del values["attention.head_count_kv"]
        writer.add_array("gemma4.attention.head_count_kv", [heads for heads, _ in sizes])
    rotated = head_dim // 8
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (head_dim // 2 - rotated), np.float32))


def family_keys(name: str) -> dict[str, int]:
    """The metadata by which a family is told from another of its architecture."""
    arch = gguf.MODEL_ARCH_NAMES[ARCH[name]]
    return {f"{arch}.{key}": 1 for key in MORE.get(name, {})}


def tiled(config: Any, data: np.ndarray, axis: int) -> np.ndarray:
    """Heads of values in turns of the key heads; what stands before them stays."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim if data.shape[axis] > heads else 1
    before, values = np.split(data, [data.shape[axis] - heads * size], axis)
    shape = (*data.shape[:axis], keys, heads // keys, size, *data.shape[axis + 1 :])
    return np.concatenate((before, values.reshape(shape).swapaxes(axis, axis + 1).reshape(values.shape)), axis)


def put_recurrence(writer: gguf.GGUFWriter, config: Any, key: str, data: np.ndarray) -> None:
    """A tensor of a gated delta net."""
    stored = {
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "out_proj.weight": "ssm_out.weight",
        "conv1d.weight": "ssm_conv1d.weight",
        "norm.weight": "ssm_norm.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
    }
    layer, part = key.removeprefix("model.layers.").split(".linear_attn.")
    if part == "A_log":
        data = -np.exp(data)
    if part == "conv1d.weight":
        data = data[:, 0]
    if part != "norm.weight":
        data = tiled(config, data, 1 if part == "out_proj.weight" else 0)
    data = np.ascontiguousarray(data)
    if part == "out_proj.weight" and config.linear_value_head_dim == 32:
        q8 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"blk.{layer}.{stored[part]}", gguf.quants.quantize(data, q8), raw_dtype=q8)
    else:
        writer.add_tensor(f"blk.{layer}.{stored[part]}", data)


def put_tensors(
    writer: gguf.GGUFWriter, name: str, model: Any, mtp: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    config, family = model.config, family_of(gguf.MODEL_ARCH_NAMES[ARCH[name]], family_keys(name))
    assert family is not None
    numbers: dict[str, list[float]] = {}  # of the layers, which a file has as metadata
    stacked: dict[str, list[np.ndarray]] = {}  # norms of each head and matrices, which a file has as one tensor
    names = gguf.get_tensor_name_map(ARCH[name], config.num_hidden_layers + bool(mtp))
    last = f"model.layers.{config.num_hidden_layers}."
    layer_of_mtp = {key.replace("mtp.layers.0.", last): tensor for key, tensor in mtp.items()}
    for key, parameter in (model.state_dict() | layer_of_mtp).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = parameter.numpy()
        if ".linear_attn." in key:
            put_recurrence(writer, config, key, data)
            continue
        if key.endswith("conv.conv.weight"):
            data = data[:, 0]
        if "norm" in key and key.endswith("weight"):
            data = data - np.float32(family.norm_offset)
        if key in MTP_NAMES:
            writer.add_tensor(f"blk.{config.num_hidden_layers}.{MTP_NAMES[key]}", data)
            continue
        if family.rotates_pairs and re.search(r"\.[qk]_proj\.(weight|bias)$", key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if "query_key_value" in key:
            heads = config.num_attention_heads
            data = data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
        if found := re.fullmatch(r"model\.(altup_(?:unembed_)?projections)\.\d+\.weight", key):
            stacked.setdefault(f"model.{found[1]}", []).append(data)
            continue
        if ".act_fn." in key:
            numbers.setdefault(f"xielu.{key.rpartition('.')[2]}", []).append(float(data.item()))
            continue
        if "layernorm.norms" in key:
            stacked.setdefault(key.rpartition(".norms")[0], []).append(data)
            continue
        if "e_score_correction_bias" in key:
            writer.add_tensor(f"blk.{key.split('.')[2]}.exp_probs_b.bias", data.reshape(-1))
            continue
        if name == "gpt_oss" and ("experts" in key or "sinks" in key):
            put_gpt_oss(writer, key, data)
            continue
        if key.endswith("shared_expert_gate.weight"):
            data = data.reshape(-1)
        if name == "deepseek3" and "kv_b_proj" in key:
            heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, own = np.split(heads, [config.qk_nope_head_dim], axis=1)
            for part, matrices in {"k_b": keys.swapaxes(1, 2), "v_b": own}.items():
                writer.add_tensor(f"blk.{key.split('.')[2]}.attn_{part}.weight", np.ascontiguousarray(matrices))
            continue
        if name != "gemma4_experts" and ".experts.gate_up_proj" in key:
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                writer.add_tensor(f"blk.{key.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(half))
            continue
        if name == "granite_moe" and "block_sparse_moe" in key:
            stored = "ffn_down_exps" if "experts" in key else "ffn_gate_inp"
            writer.add_tensor(f"blk.{key.split('.')[2]}.{stored}.weight", data)
            continue
        if ".router.scale" in key or "per_expert_scale" in key:
            stored = "ffn_gate_inp" if ".router.scale" in key else "ffn_down_exps"
            writer.add_tensor(f"blk.{key.split('.')[2]}.{stored}.scale", data)
            continue
        is_whole = ".experts." in key or key.endswith(("layer_scalar", "correct_output_scale"))
        key = key.replace("lm_head", "embed_out") if name == "gpt_neox" else key
        stored = names.get_name(key if is_whole else key.rpartition(".")[0])
        assert stored is not None, key
        suffix = "weight" if is_whole else key.rpartition(".")[2]
        writer.add_tensor(f"{stored}.{suffix}", np.ascontiguousarray(data))
    for key, values in numbers.items():
        writer.add_array(key, values)
    for key, parts in stacked.items():
        writer.add_tensor(f"{names.get_name(key)}.weight", np.stack(parts))
    if name == "phi3":
        for length in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def put_unread_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Keys and values of layers that read another layer's: files have them."""
    width = config.num_key_value_heads * config.head_dim
    shapes = {"attn_k": (width, config.hidden_size), "attn_v": (width, config.hidden_size)}
    for layer in kv_sources(config):
        for part, shape in {**shapes, "attn_k_norm": (config.head_dim,)}.items():
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.full(shape, 7.0, np.float32))


def put_gpt_oss(writer: gguf.GGUFWriter, key: str, data: np.ndarray) -> None:
    """Sinks and experts: a row an output, gates and ups apart."""
    layer = key.split(".")[2]
    if "sinks" in key:
        writer.add_tensor(f"blk.{layer}.attn_sinks.weight", data)
        return
    suffix = "bias" if key.endswith("_bias") else "weight"
    rows = data if suffix == "bias" else data.swapaxes(1, 2)
    parts = {"down": rows} if "down" in key else {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
    for part, values in parts.items():
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{suffix}", np.ascontiguousarray(values))


def written(path: Path, name: str, model: Any, mtp: Mapping[str, torch.Tensor] = MappingProxyType({})) -> GgufFile:
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCH[name]])
    put_metadata(writer, name, model.config, num_mtp=int(bool(mtp)))
    put_tokenizer(writer, model.config.vocab_size)
    put_tensors(writer, name, model, mtp)
    if name == "gemma3n":
        put_unread_keys(writer, model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(name, path)


@pytest.mark.parametrize("name", ARCH)
def test_configuration_and_tensors_come_back(models: ModuleType, tmp_path: Path, name: str) -> None:
    model = models.random_model(name, **CHANGES.get(name, {}))
    if name in ("gemma2", "gemma3"):
        model.config.query_pre_attn_scalar = model.config.head_dim  # what llama.cpp takes, as its files do not say
        model.config.rope_parameters.get("sliding_attention", {})["rope_theta"] = 10000.0  # and this
    file = written(tmp_path / "model.gguf", name, model)
    config = gguf_config(file)
    kind = type(model).__name__
    described, wanted = ARCHITECTURES[kind](config), ARCHITECTURES[kind](model.config)
    if name == "smollm3":  # every fourth layer, whatever the file
        wanted = replace(wanted, no_rope=frozenset())
    if name == "gpt_oss":
        assert wanted.gate_limit == 0.5 and described.gate_limit == 7.0  # every file's
        wanted = replace(wanted, gate_limit=7.0)
    if name == "qwen3_moe":
        assert wanted.experts is not None
        wanted = replace(wanted, experts=replace(wanted.experts, normalised=True))  # as llama.cpp does
    if wanted.latent is not None:  # the file has a factor of it, in float32
        assert described.score_scale == pytest.approx(wanted.score_scale)
        wanted = replace(wanted, score_scale=described.score_scale)
    assert described.sparse == pytest.approx(wanted.sparse)
    assert described == replace(wanted, norm_eps=described.norm_eps, sparse=described.sparse)
    assert described.norm_eps == pytest.approx(wanted.norm_eps)
    tables = [RopeTables(c, partial=wanted.partial_rotary, max_position=64).up_to(64) for c in (config, model.config)]
    for got, want in zip(*tables, strict=True):
        assert np.allclose(got.cosines, want.cosines, atol=1e-6)
    weights = GgufWeights(file, config)
    stored = {key: weights.tensor(key).whole() for key in weights.names()} if name == "gpt_oss" else {}
    parts = {
        key: weights.tensor(key).whole()
        for key in weights.names()
        if key.endswith(("k_b_proj.weight", "v_b_proj.weight"))
    }
    merged = _merged(SimpleNamespace(model_class=type(model), config=config), stored | parts)  # of a module
    is_stacked = name != "gemma4_experts"  # whose files have gates and ups in one
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name == "gpt_oss" or (name == "deepseek3" and key in merged):
            got = merged[key]
        elif is_stacked and ".experts.gate_up_proj" in key:
            halves = [
                weights.tensor(f"{key.replace('gate_up_proj', part)}.weight") for part in ("gate_proj", "up_proj")
            ]
            got = torch.cat([half.whole() for half in halves], dim=1)
        else:
            got = weights.tensor(f"{key}.weight" if is_stacked and ".experts." in key else key).whole()
        assert torch.allclose(got, parameter, atol=2e-7), key


def test_the_experts_of_a_file_become_those_of_the_module(models: ModuleType, tmp_path: Path) -> None:
    model = models.random_model("qwen3_moe", mlp_only_layers=[])
    file = written(tmp_path / "model.gguf", "qwen3_moe", model)
    weights = GgufWeights(file, gguf_config(file))
    stored = {name: weights.tensor(name).whole() for name in weights.names()}
    merged = _merged(SimpleNamespace(model_class=type(model), config=model.config), stored)
    experts = {key: parameter for key, parameter in model.state_dict().items() if "mlp.experts." in key}
    assert len(experts) == 2 * model.config.num_hidden_layers
    for key, parameter in experts.items():
        assert torch.allclose(merged[key], parameter, atol=2e-7), key


def test_an_answer_in_harmony_ends_with_its_last_message_or_a_call_and_not_with_each_message() -> None:
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "b"]
    keys = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.tokens": tokens}
    file: Any = SimpleNamespace(metadata=keys, architecture="gpt-oss", model="m", path=Path("m.gguf"))
    assert gguf_end_tokens(file, 5) == {1, 3}
    file.architecture = "llama"
    assert gguf_end_tokens(file, 5) == {1, 2}


# What a file does not say has to be as its family's always is.
RUN: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True}, "gpt_oss": {}}
RUN |= {"gemma": {}, "ernie": {}, "seed_oss": {}, "olmoe": {}}
NEWER = ("llama_odd", "mixtral", "stablelm", "gpt_neox", "nemotron", "glm", "cohere2", "exaone4", "olmo3")
RUN |= {name: CHANGES.get(name, {}) for name in (*NEWER, "qwen2_moe", "glm4_moe", "ernie_moe")}
RUN |= {
    name: CHANGES.get(name, {})
    for name in (
        "lfm2",
        "qwen3_5",
        "qwen3_5_moe",
        "apertus",
        "gemma3n",
        "gemma4",
        "gemma4_experts",
        "granite_moe",
        "deepseek2",
        "deepseek3",
        "ministral3",
        "hunyuan",
        "hunyuan_moe",
    )
}


def described_file(name: str, model: Any, config: Any, weights: GgufWeights) -> Any:
    """What the native runner asks of a model."""
    return SimpleNamespace(
        name=name,
        hf=model,
        config=config,
        device=CPU,
        dtype="float32",
        torch_dtype=torch.float32,
        groups=layer_groups(name, config),
        max_position=max_position(name, config),
        vocab_size=config.vocab_size,
        weights=weights,
        shape=None,
    )


@pytest.mark.parametrize("name", RUN)
def test_a_file_runs_natively_as_the_module_does(models: ModuleType, tmp_path: Path, name: str) -> None:
    model = models.random_model(name, **RUN[name])
    file = written(tmp_path / "model.gguf", name, model)
    config = gguf_config(file)
    if name == "gpt_oss":
        config.layer_types, config.swiglu_limit = model.config.layer_types, model.config.swiglu_limit
    described = described_file(name, model, config, GgufWeights(file, config))
    tokens = [5, 9, 100, 33, 7]
    with torch.inference_mode(), closing(native_runner(described)) as runner:
        runner.allocate([4] * len(described.groups), 16)
        expected = model(torch.tensor([tokens])).logits[0]
        logits = torch.as_tensor(runner.forward(batch_of(tokens, len(described.groups))))
        assert torch.allclose(logits, expected, atol=1e-3)


def test_blocks_of_heads_in_turns_stay_blocks(models: ModuleType, tmp_path: Path) -> None:
    """llama.cpp's converter moves whole columns of the last projection; here the heads write where those are."""
    model = models.random_model("qwen3_5", attention_bias=False, linear_value_head_dim=32)
    projections = {key: value for key, value in model.state_dict().items() if "linear_attn.out_proj" in key}
    for projection in projections.values():
        q8 = gguf.GGMLQuantizationType.Q8_0
        projection.copy_(torch.from_numpy(gguf.dequantize(gguf.quants.quantize(projection.numpy(), q8), q8)))
    file = written(tmp_path / "model.gguf", "qwen3_5", model)
    config = gguf_config(file)
    weights = GgufWeights(file, config)
    for key, projection in projections.items():
        assert torch.equal(weights.tensor(key).whole(), projection)
    described = described_file("qwen3_5", model, config, weights)
    packed = ModelWeights(described)
    assert [packed.layers[layer].recurrence.contents.out.parts[0].kind for layer in (0, 2)] == [
        STORED_KINDS["Q8_0"]
    ] * 2
    tokens = [5, 9, 100, 33, 7]
    with torch.inference_mode(), closing(NativeRunner(packed)) as runner:
        runner.allocate([4] * len(described.groups), 16)
        expected = model(torch.tensor([tokens])).logits[0]
        logits = torch.as_tensor(runner.forward(batch_of(tokens, len(described.groups))))
        assert torch.allclose(logits, expected, atol=1e-3)


def test_rates_that_are_not_negative_are_refused(models: ModuleType, tmp_path: Path) -> None:
    model = models.random_model("qwen3_5", attention_bias=False)
    model.model.layers[0].linear_attn.A_log.fill_(-200.0)  # whose exponential is zero
    file = written(tmp_path / "model.gguf", "qwen3_5", model)
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a has a rate that is not negative"):
        GgufWeights(file, gguf_config(file)).tensor("model.layers.0.linear_attn.A_log")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"ssm.inner_size": 7}, "ssm.inner_size is 7"), ({"ssm.time_step_rank": 0}, "ssm.inner_size is 240")],
)
def test_sizes_of_heads_that_contradict_are_refused(
    models: ModuleType, tmp_path: Path, change: dict[str, int], reason: str
) -> None:
    file = written(tmp_path / "model.gguf", "qwen3_5", models.random_model("qwen3_5", attention_bias=False))
    file.metadata.update({f"qwen35.{key}": value for key, value in change.items()})
    with pytest.raises(ModelError, match=reason):
        gguf_config(file)
