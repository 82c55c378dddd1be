"""Small random models of Gemma 4 with assistants, in files and as modules of transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from genbatch.nif.models.architecture import read_whole, shapes_of
from tests.nif.models.test_gguf_families import put_number, put_tokenizer
from tests.nif.native.attention_configs import WINDOW
from tests.nif.native.models import random_model
from tests.nif.tiny_models import build_tokenizer

FAMILIES = ("gemma4", "gemma4_unified", "gemma4_experts")
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 2}


@dataclass(frozen=True)
class AssistedPair:
    """A model and its assistant, both of transformers.

    Args:
        path: the model's folder.
        draft: the assistant's folder.
    """

    hf: Any
    assistant: Any
    path: Path
    draft: Path

    def read(self, tokens: list[int], count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The logits and rows of the assistant's greedy guesses behind `tokens`; the model has not read the last one.

        The model reads one token in the end, with transformers' own cache: its windows hold what that token saw.
        """
        cache, asked = DynamicCache(config=self.hf.config), {"output_hidden_states": True}
        with torch.inference_mode():
            if len(tokens) > 2:
                self.hf(torch.tensor([tokens[:-2]]), cache=cache)
            said = self.hf(torch.tensor([tokens[-2:-1]]), cache=cache, return_shared_kv_states=True, **asked)
            state, token, position = said.hidden_states[-1][:, -1:], tokens[-1], torch.tensor([[len(tokens) - 1]])
            found = []
            for _ in range(count):
                embedding = self.hf.get_input_embeddings()(torch.tensor([[token]]))
                guess = self.assistant(
                    inputs_embeds=torch.cat([embedding, state], dim=-1),
                    position_ids=position,
                    shared_kv_states=dict(said.shared_kv_states),
                )
                state, token = guess.last_hidden_state, int(guess.logits[0, -1].argmax())
                found.append((guess.logits[0, -1].numpy(), state[0, -1].numpy()))
        return found

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The tokens of these guesses."""
        return [int(logits.argmax()) for logits, _ in self.read(tokens, count)]


def random_assistant(
    hf: Any, hidden_size: int = 48, intermediate_size: int = 80, num_attention_heads: int = 4, **settings: Any
) -> Any:
    """A random assistant of a model."""
    config = hf.config
    read_whole(config)
    unified = config.model_type == "gemma4_unified_text"
    shape = config.per_layer_config["full_attention"]
    own = {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": config.sliding_window,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "global_head_dim": shape.head_dim,
        "rope_parameters": config.rope_parameters,
        "attention_k_eq_v": config.attention_k_eq_v,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": config.max_position_embeddings,
    }
    if shape.num_key_value_heads != config.num_key_value_heads:
        own["num_global_key_value_heads"] = shape.num_key_value_heads
    text = (Gemma4UnifiedTextConfig if unified else Gemma4TextConfig)(**own)
    make, module = (
        (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
        if unified
        else (Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
    )
    torch.manual_seed(3)
    assistant = module(make(text_config=text, backbone_hidden_size=config.hidden_size, **settings))
    assistant = assistant.eval().requires_grad_(False)
    for key, parameter in assistant.named_parameters():
        if "norm" in key:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.1)
    for key, buffer in assistant.named_buffers():
        if key.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        if key.endswith("token_ordering"):
            buffer.copy_(torch.randperm(len(buffer)))
    return assistant


def random_pair(name: str, path: Path, *, sizes: dict[str, Any] | None = None, **settings: Any) -> AssistedPair:
    """A random model of a family with a random assistant; both saved below `path`."""
    hf = random_model(name, **(sizes or {}))
    return saved(hf, random_assistant(hf, **settings), path)


def written(path: Path, assistant: Any) -> None:
    """Write an assistant as llama.cpp's converter does: without clusters, and under the names of a Gemma 4."""
    config, arch = assistant.model.config, "gemma4-assistant"
    writer = gguf.GGUFWriter(path, arch)
    read_whole(config)
    sizes = shapes_of(config)
    whole = sizes[config.layer_types.index("full_attention")]
    rope = config.rope_parameters
    numbers = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "nextn_predict_layers": config.num_hidden_layers,
        "attention.shared_kv_layers": config.num_hidden_layers,
        "embedding_length_out": assistant.config.backbone_hidden_size,
        "embedding_length": config.hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.key_length": whole[1],
        "attention.key_length_swa": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }
    for key, value in numbers.items():
        put_number(writer, f"{arch}.{key}", value)
    if len({heads for heads, _ in sizes}) > 1:
        writer.add_array(f"{arch}.attention.head_count_kv", [heads for heads, _ in sizes])
    else:
        put_number(writer, f"{arch}.attention.head_count_kv", sizes[0][0])
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_array(f"{arch}.attention.sliding_window_pattern", windows)
    rotated = whole[1] // 8
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (whole[1] // 2 - rotated), np.float32))
    put_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for key, tensor in assistant.state_dict().items():
        if key.startswith(("masked_embedding", "lm_head")):
            continue
        part = key if key.endswith("layer_scalar") else key.removesuffix(".weight")
        stored = f"nextn.{part}" if part.endswith("projection") else names.get_name(part)
        writer.add_tensor(f"{stored}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def silenced(model: Any) -> Any:
    """The model, of which no layer adds anything to the residual."""
    with torch.no_grad():
        for key, parameter in model.model.layers.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
                parameter.zero_()
        for layer in model.model.layers:
            layer.layer_scalar.fill_(1.0)
    return model


def right_pair(path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> AssistedPair:
    """A model that draws each token by the one before alone, and an assistant that knows it: each guess is right."""
    hf = random_model("gemma4", final_logit_softcapping=None, **sizes)
    assistant = random_assistant(hf, hidden_size=hf.config.hidden_size)
    silenced(hf)
    silenced(assistant)
    size = hf.config.hidden_size
    assistant.pre_projection.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
    assistant.model.norm.weight.copy_(hf.model.norm.weight)
    assistant.lm_head.weight.copy_(hf.lm_head.weight)
    return saved(hf.to(dtype), assistant.to(dtype), path)


def saved(hf: Any, assistant: Any, path: Path) -> AssistedPair:
    """Write both models."""
    pair = AssistedPair(hf, assistant, path / "model", path / "assistant")
    hf.save_pretrained(pair.path)
    build_tokenizer(pair.path)
    assistant.save_pretrained(pair.draft)
    return pair


__all__ = ["CLUSTERS", "FAMILIES", "WINDOW", "AssistedPair", "random_pair", "right_pair", "written"]
