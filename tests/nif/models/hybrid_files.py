"""GGUF files of families with recurrent layers, written as llama.cpp's converter does: its names, shapes and orders."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.nif.models.gguf_files import put_tokenizer

ARCH = {
    "granite_hybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "granite_hybrid_dense": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "falcon_h1_plain": gguf.MODEL_ARCH.FALCON_H1,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "nemotron_h_moe": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
# The model of the native tests, and what a file cannot say set as every file's is.
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCH},
    "granite_hybrid_dense": ("granite_hybrid_dense", {"intermediate_size": 80}),
    "falcon_h1": ("falcon_h1", {**_NO_BIASES, "mamba_proj_bias": False, "projectors_bias": False}),
    "mamba2": ("mamba2", {"use_bias": False}),
    "nemotron_h": (
        "nemotron_h",
        {
            **_NO_BIASES,
            "use_bias": False,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **_NO_BIASES,
            "use_bias": False,
            "n_group": 1,
            "topk_group": 1,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        },
    ),
    "lfm2_moe": ("lfm2_moe", {"conv_bias": False, "routed_scaling_factor": 1.0}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": []}),
}
_TOP = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    **dict.fromkeys(("input_layernorm", "norm", "operator_norm"), "attn_norm"),
    **dict.fromkeys(("pre_ff_layernorm", "ffn_norm"), "ffn_norm"),
    **{f"{place}.{part}_proj": f"attn_{part}" for place in ("self_attn", "mixer") for part in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "mixer.o_proj", "self_attn.out_proj"), "attn_output"),
    **{f"self_attn.{part}": f"attn_{part}" for part in ("q_norm", "k_norm")},
    **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
    **{f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")},
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.{w}": f"ffn_{part}" for w, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **dict.fromkeys(("mlp.gate", "mixer.gate", "feed_forward.gate", "block_sparse_moe.router"), "ffn_gate_inp"),
    **{f"{place}.{ours}": f"ssm_{theirs}" for place in ("mamba", "mixer") for ours, theirs in (
        ("in_proj", "in"), ("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))},
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_FACTORS = {
    "q_proj": ("attention_in_multiplier",),
    "k_proj": ("attention_in_multiplier", "key_multiplier"),
    "v_proj": ("attention_in_multiplier",),
    "o_proj": ("attention_out_multiplier",),
    "mamba.out_proj": ("ssm_out_multiplier",),
    "mamba.in_proj": ("ssm_in_multiplier",),
    "lm_head": ("lm_head_multiplier",),
    "embed_tokens": ("embedding_multiplier",),
}


def _scaled(config: Any, key: str, data: np.ndarray) -> np.ndarray:
    """Falcon-H1's factors become a part of its weights."""
    for end, names in _FACTORS.items():
        if key.removesuffix(".weight").endswith(end):
            for name in names:
                data = data * np.float32(getattr(config, name))
    for place, part in enumerate(("gate_proj", "down_proj")):
        if f"feed_forward.{part}" in key:
            data = data * np.float32(config.mlp_multipliers[place])
    if "mamba.in_proj" in key:
        inner, group = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, group, group, config.mamba_n_heads)
        data = data * np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    return data


def _permuted(data: np.ndarray, heads: int) -> np.ndarray:
    return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _of_layer(name: str, config: Any, part: str, data: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What a layer's tensor becomes."""
    module, _, suffix = part.rpartition(".")
    owner = module.rpartition(".")[2] or module
    mamba = module in ("mamba", "mixer")
    if suffix == "A_log":
        yield "ssm_a", -np.exp(data).reshape(-1, 1) if mamba else -np.exp(data)
    elif suffix == "D":
        yield "ssm_d", data.reshape(-1, 1)
    elif suffix == "dt_bias":
        yield "ssm_dt.bias", data
    elif suffix in ("e_score_correction_bias", "expert_bias"):
        yield "exp_probs_b.bias", data
    elif owner in ("conv1d", "conv") and suffix == "weight":
        yield f"{_IN_LAYER[module]}.weight", data[:, 0]
    elif module in ("mamba.norm", "mixer.norm"):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        yield "ssm_norm.weight", data.reshape(groups, -1)
    elif part.startswith("shared_mlp."):
        end = "_shexp" if config.num_local_experts else ""
        kinds = ("gate", "up") if "input_linear" in part else ("down",)
        for kind, piece in zip(kinds, np.split(data, len(kinds)), strict=True):
            yield f"ffn_{kind}{end}.weight", piece
    elif ".experts." in part:
        kinds = ("gate", "up") if "gate_up" in part else ("up",) if "up_proj" in part else ("down",)
        for kind, piece in zip(kinds, np.split(data, len(kinds), axis=1), strict=True):
            yield f"ffn_{kind}_exps.weight", piece
    elif owner == "in_proj_qkvz":
        keys, key, heads = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_num_value_heads
        value = heads // keys * config.linear_value_head_dim
        by_key = data.reshape(keys, 2 * key + 2 * value, -1)
        q, k, v, z = (piece.reshape(-1, data.shape[1]) for piece in np.split(by_key, np.cumsum((key, key, value)), 1))
        yield "attn_qkv.weight", np.concatenate((q, k, v))
        yield "attn_gate.weight", z
    else:
        permutes = name.startswith(("granite", "nemotron")) and owner in ("q_proj", "k_proj")
        if permutes:
            data = _permuted(data, config.num_attention_heads if owner == "q_proj" else config.num_key_value_heads)
        stored = "post_attention_norm" if name == "qwen3_next" else "ffn_norm"
        stored = stored if module == "post_attention_layernorm" else _IN_LAYER[module]
        # llama.cpp's converter maps this name with its suffix, and so drops it.
        full = stored if module == "pre_ff_layernorm" and name.startswith("falcon") else f"{stored}.{suffix}"
        yield full, data.reshape(-1) if owner == "shared_expert_gate" else data


def tensors(name: str, model: Any) -> dict[str, np.ndarray]:
    """The tensors of a file by its names."""
    config, made = model.config, {}
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = parameter.numpy()
        if name.startswith("falcon"):
            data = _scaled(config, key, data)
        if name == "qwen3_next" and key.endswith("norm.weight") and "linear_attn" not in key:
            data = data + np.float32(1)
        if layer := re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", key):
            for stored, piece in _of_layer(name, config, layer[2], data):
                made[f"blk.{layer[1]}.{stored}"] = np.ascontiguousarray(piece)
        else:
            top, _, suffix = key.rpartition(".")
            made[f"{_TOP[top.rpartition('.')[2]]}.{suffix}"] = np.ascontiguousarray(data)
    return made


def _of_ssm(config: Any, names: tuple[str, str, str, str], inner: int) -> dict[str, Any]:
    keys = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank")
    return {**{key: getattr(config, name) for key, name in zip(keys, names, strict=True)}, "ssm.inner_size": inner}


_BAMBA = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")


def metadata(name: str, config: Any) -> dict[str, Any]:
    """The file's numbers, by keys without the architecture."""
    kinds = list(config.layer_types)
    attends = [kind == "full_attention" for kind in kinds]
    epsilons = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
    said: dict[str, Any] = {
        "context_length": getattr(config, "max_position_embeddings", 2**20),
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.head_count": getattr(config, "num_attention_heads", 0),
        "attention.layer_norm_rms_epsilon": float(next(getattr(config, e) for e in epsilons if hasattr(config, e))),
    }
    if name == "mamba2":
        names = ("conv_kernel", "state_size", "n_groups", "num_heads")
        return {**said, **_of_ssm(config, names, config.num_heads * config.head_dim)}
    kv_heads = config.num_key_value_heads
    said["attention.head_count_kv"] = [kv_heads if attending else 0 for attending in attends]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    said["rope.freq_base"] = float(rope["rope_theta"])
    if name.startswith(("falcon", "nemotron", "qwen")):
        said |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if name.startswith("granite"):
        said |= _of_ssm(config, _BAMBA, config.mamba_n_heads * config.mamba_d_head) | {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
            "rope.dimension_count": head_dim,
        }
        if config.num_local_experts:
            said |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if name.startswith("falcon"):
        said |= _of_ssm(config, _BAMBA, config.mamba_d_ssm) | {"attention.head_count_kv": kv_heads}
    if name.startswith("nemotron"):
        names = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
        said |= _of_ssm(config, names, config.mamba_num_heads * config.mamba_head_dim)
        width = config.moe_intermediate_size if name.endswith("moe") else config.intermediate_size
        said["feed_forward_length"] = [width if kind in ("mlp", "moe") else 0 for kind in kinds]
        said["attention.layer_norm_epsilon"] = float(config.layer_norm_epsilon)
    if name == "nemotron_h_moe":
        said |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_gating_func": 2,
        }
    if name == "lfm2_moe":
        said |= {
            "shortconv.l_cache": config.conv_L_cache,
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        }
    if name == "qwen3_next":
        names = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads")
        said |= _of_ssm(config, names, config.linear_num_value_heads * config.linear_value_head_dim) | {
            "attention.head_count_kv": kv_heads,
            "full_attention_interval": 2,
            "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return said


def write_hybrid(path: Path, name: str, model: Any, kinds: dict[str, str] | None = None) -> None:
    """Write a file.

    Args:
        kinds: the type of the matrices by the end of their names; others stay floats.
    """
    arch = gguf.MODEL_ARCH_NAMES[ARCH[name]]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata(name, model.config).items():
        full = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    put_tokenizer(writer, model.config.vocab_size)
    for stored, data in tensors(name, model).items():
        kind = next((kind for end, kind in (kinds or {}).items() if stored.endswith(end)), None)
        if kind is None or data.ndim < 2:
            writer.add_tensor(stored, data)
        else:
            packed = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(data, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(model: Any, name: str, kinds: dict[str, str]) -> None:
    """Round a model's weights as a file of these types does, where a tensor of the file is one of the model's."""
    for key, parameter in model.state_dict().items():
        stored = next(iter(_stored_names(name, model.config, key)), None)
        kind = next((kind for end, kind in kinds.items() if stored is not None and stored.endswith(end)), None)
        if kind is not None and parameter.ndim > 1:
            packed = gguf.GGMLQuantizationType[kind]
            parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quants.quantize(parameter.numpy(), packed), packed)))


def _stored_names(name: str, config: Any, key: str) -> Iterator[str]:
    layer = re.fullmatch(r"(?:model|backbone)\.layers\.\d+\.(.*)", key)
    module = layer[1].rpartition(".")[0] if layer else ""
    if module in _IN_LAYER:
        yield f"{_IN_LAYER[module]}.weight"
