"""Small random models with a layer of multi-token prediction (MTP), in files and as modules of transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.nif.native.models import random_model
from tests.nif.tiny_models import build_tokenizer

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek3")
# transformers' names of the layer, and those of Qwen's files.
_NAMES = {
    "0.eh_proj.": "mtp.fc.",
    "0.enorm.": "mtp.pre_fc_norm_embedding.",
    "0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "0.post_norm.": "mtp.norm.",
    "0.mtp_block.": "mtp.layers.0.",
}


@dataclass(frozen=True)
class MtpPair:
    """A model and its MTP layer, both of transformers.

    Args:
        path: the folder with both.
    """

    hf: Any
    mtp: Any
    path: Path

    def states(self, tokens: list[int]) -> torch.Tensor:
        """The rows in front of the model's head, [tokens, hidden]."""
        with torch.inference_mode():
            rows: torch.Tensor = self.hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        return rows

    def read(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and rows of the layer, which reads each row with the token that follows it."""
        cache = MtpCache(config=self.hf.config.get_mtp_config())
        positions = torch.arange(1, len(tokens) + 1)[None]
        with torch.inference_mode():
            rows = self.mtp.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([tokens]))
            return self.mtp._project_to_logits(rows)[0], rows[0]

    def guesses(self, tokens: list[int], count: int, begin: int = 0) -> list[int]:
        """The layer's greedy guesses behind `tokens`, of which the model has not read the last one.

        Args:
            begin: the first position that the layer reads.
        """
        states, following = self.states(tokens[:-1])[begin:], tokens[begin + 1 :]
        for _ in range(count):
            logits, rows = self.read(following, states)
            following = [*following, int(logits[-1].argmax())]
            states = torch.cat((states, rows[-1:]))
        return following[-count:]


def mtp_tensors(pair: MtpPair) -> dict[str, torch.Tensor]:
    """The layer's tensors by the names of the family's files."""
    names = _NAMES
    if not pair.hf.config.model_type.startswith("qwen3"):  # DeepSeek's and GLM's, behind the last layer
        start = f"model.layers.{pair.hf.config.num_hidden_layers}."
        parts = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
        names = {theirs: start + parts.get(theirs[2:], theirs[2:]) for theirs in _NAMES}
    return {
        ours + name.removeprefix(theirs): tensor.contiguous()
        for name, tensor in pair.mtp.layers.state_dict().items()
        for theirs, ours in names.items()
        if name.startswith(theirs)
    }


SMALL = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}


def random_pair(name: str, path: Path, **sizes: Any) -> MtpPair:
    """A random model of a family, with a random MTP layer; saved in `path` with a tokenizer."""
    return saved(_random(name, path, sizes or (SMALL if name.startswith("qwen3") else {})))


def right_pair(path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> MtpPair:
    """A model that draws each token by the one before alone, and an MTP layer that knows it: each guess is right."""
    pair = _random("qwen3_5", path, sizes or SMALL)
    for part in (pair.hf.model.layers, pair.mtp.layers):
        for key, parameter in part.named_parameters():
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.zero_()
    [layer] = pair.mtp.layers
    size = pair.hf.config.hidden_size
    layer.eh_proj.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
    layer.enorm.weight.zero_()
    layer.post_norm.weight.copy_(pair.hf.model.norm.weight)
    return saved(MtpPair(pair.hf.to(dtype), pair.mtp.to(dtype), path))


def _random(name: str, path: Path, sizes: dict[str, Any]) -> MtpPair:
    hf = random_model(name, **sizes, attention_bias=False)
    hf.config.num_mtp_layers = hf.config.num_nextn_predict_layers = 1
    hf.config.mtp_layer_types, hf.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    hf.config.first_k_dense_replace = getattr(hf.config, "first_k_dense_replace", 0)
    mtp = MtpModel(hf, 1).eval().requires_grad_(False)
    for key, parameter in mtp.layers.named_parameters():
        if "norm" in key:
            parameter.uniform_(-0.5, 0.5)
        else:
            parameter.normal_(std=0.1)
    return MtpPair(hf, mtp, path)


def saved(pair: MtpPair) -> MtpPair:
    """Write both into the folder."""
    pair.hf.save_pretrained(pair.path)
    build_tokenizer(pair.path)
    file = pair.path / "model.safetensors"
    save_file({**load_file(file), **mtp_tensors(pair)}, file, metadata={"format": "pt"})
    return pair
