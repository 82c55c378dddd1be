"""Small random models that score texts, and what their scores are by transformers alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

_ENCODER: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 2,
}
_DECODER: dict[str, Any] = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
PAIR_TEMPLATE = (
    "<|start|>system\nOnly yes or no.<|end|>\n<|start|>user\n<Instruct>: "
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Find answers') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|end|>\n"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
YES, NO = 60, 70


@dataclass(frozen=True)
class Scorer:
    """How one is made: its class, its configuration, and what its files say beside."""

    model_class: Any
    config: Any
    files: dict[str, Any] = field(default_factory=dict)
    template: str | None = None


_LOGIT_SCORE = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ],
    "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO, "module_input_name": "causal_logits"},
}
SCORERS = {
    "bert": Scorer(BertForSequenceClassification, lambda: BertConfig(**_ENCODER, num_labels=1)),
    "bert raw": Scorer(
        BertForSequenceClassification,
        lambda: BertConfig(
            **_ENCODER, num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"
        ),
    ),
    # Counts its positions from behind the padding's id: three more are needed for 96.
    "roberta of three": Scorer(
        RobertaForSequenceClassification,
        lambda: RobertaConfig(
            **{**_ENCODER, "max_position_embeddings": 99}, type_vocab_size=1, id2label={0: "no", 1: "maybe", 2: "yes"}
        ),
    ),
    "modernbert": Scorer(
        ModernBertForSequenceClassification,
        lambda: ModernBertConfig(
            **_ENCODER, num_labels=1, classifier_pooling="mean", cls_token_id=0, sep_token_id=2, local_attention=8
        ),
    ),
    "llama": Scorer(LlamaForSequenceClassification, lambda: LlamaConfig(**_DECODER, num_labels=1)),
    "gemma2 of three": Scorer(
        Gemma2ForSequenceClassification,
        lambda: Gemma2Config(**_DECODER, num_labels=3, sliding_window=8, problem_type="multi_label_classification"),
    ),
    "qwen3 with a template": Scorer(
        Qwen3ForSequenceClassification, lambda: Qwen3Config(**_DECODER, num_labels=1), template=PAIR_TEMPLATE
    ),
    "qwen3 yes or no": Scorer(
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**_DECODER, tie_word_embeddings=False),
        files=_LOGIT_SCORE,
        template=PAIR_TEMPLATE,
    ),
}
ENCODERS = ("bert", "bert raw", "roberta of three", "modernbert")


def build_scorer(kind: str, directory: Path, tiny_models: ModuleType) -> Path:
    """Saves a random model of the kind as its makers would, and returns the directory."""
    made = SCORERS[kind]
    torch.manual_seed(len(kind))
    made.model_class(made.config()).save_pretrained(directory)
    tiny_models.build_tokenizer(directory, chat_template=made.template)
    if kind in ENCODERS:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        kinds = ":1" if kind.startswith("bert") else ""
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A <|end|>",
            pair=f"<|begin|> $A <|end|> $B{kinds} <|end|>{kinds}",
            special_tokens=[("<|begin|>", 0), ("<|end|>", 2)],
        )
        if not kinds:
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.save_pretrained(directory)
    for name, content in made.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


class ScoreOracle:
    """One text or pair at a time through transformers' own modules, in float32, without padding."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._by_tokens = bool(SCORERS[kind].files)
        self._template = SCORERS[kind].template
        auto = AutoModelForCausalLM if self._by_tokens else AutoModelForSequenceClassification
        self._hf = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory)

    def num_tokens(self, query: str, document: str) -> int:
        """Tokens of a pair."""
        return len(self._tokenizer(query, document).input_ids)

    @torch.inference_mode()
    def score(self, query: str | None, document: str, instruction: str | None = None) -> torch.Tensor:
        """[labels] float32, without any activation."""
        if self._template is not None:
            roles = [("system", instruction), ("query", query), ("document", document)]
            messages = [{"role": role, "content": text} for role, text in roles if text is not None]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            inputs = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        else:
            texts: Sequence[str] = [document] if query is None else [query, document]
            inputs = self._tokenizer(*([text] for text in texts), return_tensors="pt")
        if self._by_tokens or self._template is not None:
            inputs.pop("token_type_ids", None)
        logits: torch.Tensor = self._hf(**inputs).logits[0]
        if self._by_tokens:
            return (logits[-1, YES] - logits[-1, NO])[None]
        return logits
