"""Small random models that give embeddings, and what their embeddings are by transformers alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

_ENCODER: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 2,
}
_DECODER: dict[str, Any] = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Embedder:
    """How one is made: its class, its configuration, its pooling and whether vectors are normalised."""

    model_class: Any
    config: Any
    pooling: dict[str, Any]
    normalizes: bool = True


EMBEDDERS = {
    "bert mean": Embedder(BertModel, lambda: BertConfig(**_ENCODER), {"pooling_mode_mean_tokens": True}),
    "bert cls": Embedder(BertModel, lambda: BertConfig(**_ENCODER), {"pooling_mode": "cls"}, normalizes=False),
    # Counts its positions from behind the padding's id: three more are needed for 64.
    "roberta mean": Embedder(
        RobertaModel,
        lambda: RobertaConfig(**{**_ENCODER, "max_position_embeddings": 67}),
        {"pooling_mode_mean_tokens": True},
    ),
    "qwen3 last": Embedder(
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**_DECODER, matryoshka_dimensions=[8, 16]),
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    ),
    "qwen3 without a head": Embedder(Qwen3Model, lambda: Qwen3Config(**_DECODER), {"pooling_mode": ["lasttoken"]}),
    "llama mean": Embedder(
        LlamaForCausalLM, lambda: LlamaConfig(**_DECODER), {"pooling_mode_mean_tokens": True}, normalizes=False
    ),
}
ENCODERS = ("bert mean", "bert cls", "roberta mean")


def build_embedder(kind: str, directory: Path, tiny_models: ModuleType) -> Path:
    """Saves a random model of the kind as sentence-transformers would, and returns the directory."""
    made = EMBEDDERS[kind]
    torch.manual_seed(len(kind))
    made.model_class(made.config()).save_pretrained(directory)
    tiny_models.build_tokenizer(directory)
    if kind in ENCODERS:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 2)]
        )
        tokenizer.save_pretrained(directory)
    modules = ["Transformer", "Pooling"] + ["Normalize"] * made.normalizes
    paths = ["", "1_Pooling", "2_Normalize"]
    (directory / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
                for i, name in enumerate(modules)
            ]
        )
    )
    (directory / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 32, **made.pooling}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return directory


class EmbeddingOracle:
    """One text at a time through transformers' own modules, in float32, without padding."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._hf = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[32] float32."""
        states = self._hf(torch.tensor([list(tokens)])).last_hidden_state[0]
        settings = json.dumps(EMBEDDERS[self._kind].pooling)
        if 'lasttoken": true' in settings or '["lasttoken"]' in settings:
            pooled = states[-1]
        else:
            pooled = states[0] if "cls" in settings else states.mean(0)
        return pooled / pooled.norm() if EMBEDDERS[self._kind].normalizes else pooled
