"""Converts GGUF files of encoders (architecture "bert"): embedding models and rerankers of the BERT and XLM-R families.

    convert_encoder(GgufFile("reranker.gguf", path), directory)     # writes the files of sentence-transformers

llama.cpp's converter cuts the unused first positions off an XLM-R's table. The rest computes the same as a BERT: its
positions begin at 0, and its head (dense, tanh and projection of the first state) is BERT's pooler and classifier. So
one module serves both families, which differ in their tokenizers.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genbatch.nif.errors import ModelError
from genbatch.nif.models.file_checks import check_counts, token_ids
from genbatch.nif.models.gguf_file import GgufFile
from genbatch.nif.scoring import GGUF_RANK

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer as Backend

ENCODERS = frozenset({"bert"})
"""The architectures that `convert_encoder` reads."""

_TENSORS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}
_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # by GGUF's pooling_type
_CONTROL = 3  # a value in tokenizer.ggml.token_type
# The roles of special tokens: a key of the metadata ("seperator" is GGUF's own spelling), and usual names for files
# without the key.
_ROLES = {
    "cls": ("cls", "[CLS]", "<s>"),
    "bos": ("bos", "[CLS]", "<s>"),
    "sep": ("seperator", "[SEP]", "</s>"),
    "eos": ("eos", "[SEP]", "</s>"),
    "unk": ("unknown", "[UNK]", "<unk>"),
    "pad": ("padding", "[PAD]", "<pad>"),
    "mask": ("mask", "[MASK]", "<mask>"),
}


def convert_encoder(file: GgufFile, directory: Path) -> None:
    """Write configuration, weights, tokenizer and pooling of an encoder into the new `directory`.

    The weights are float32, so they equal the file's numbers bit for bit.

    Raises:
        ModelError: the file is incomplete, or its head or its tokenizer is not supported.
    """
    from safetensors.torch import save_file

    scores = file.metadata.get("bert.pooling_type", 0) == GGUF_RANK
    tensors = _tensors(file, scores=scores)
    config = _config(file, tensors, scores=scores)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", config)
    _write_tokenizer(file, config, directory)
    if not scores:
        _write_pooling(file, config, directory)


def _tensors(file: GgufFile, *, scores: bool) -> "dict[str, torch.Tensor]":
    """Return the tensors by transformers' names."""
    tensors = {}
    for stored in file.names():
        owner, _, kind = stored.rpartition(".")
        prefix = ""
        if owner.startswith("blk."):
            _, layer, owner = owner.split(".", 2)
            prefix = f"encoder.layer.{layer}."
        name = _TENSORS.get(stored) or (f"{_TENSORS[owner]}.{kind}" if owner in _TENSORS else None)
        if name is None:
            raise file.fault(f"tensor {stored} is not supported for files of the architecture {file.architecture}")
        name = name if name.startswith("classifier") or not scores else f"bert.{prefix}{name}"
        tensors[name if scores else prefix + name] = file.tensor(stored).whole().float().contiguous()
    if scores and not {"cls.weight", "cls.output.weight"} <= set(file.names()):
        raise file.fault(
            "its head lacks cls.weight or cls.output.weight: llama.cpp's converter drops BERT's pooler, so the "
            "file's scores would differ from the model's; use a file of an XLM-R reranker, which has both"
        )
    return tensors


def _config(file: GgufFile, tensors: "dict[str, torch.Tensor]", *, scores: bool) -> dict[str, Any]:
    def setting(key: str) -> Any:
        value = file.metadata.get(f"bert.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise file.fault(f"bert.{key} is {value!r}, not a positive number")
        return value

    def rows(name: str) -> int:
        if (tensor := tensors.get(("bert." if scores else "") + f"embeddings.{name}.weight")) is None:
            raise file.fault(f"the tensor of the {name} is missing")
        return len(tensor)

    if file.metadata.get("bert.attention.causal") is True:
        raise file.fault("bert.attention.causal is true, which is not supported for an encoder")
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if scores else "BertModel"],
        "hidden_size": setting("embedding_length"),
        "num_hidden_layers": setting("block_count"),
        "num_attention_heads": setting("attention.head_count"),
        "intermediate_size": setting("feed_forward_length"),
        "layer_norm_eps": float(setting("attention.layer_norm_epsilon")),
        "max_position_embeddings": rows("position_embeddings"),
        "vocab_size": rows("word_embeddings"),
        "type_vocab_size": rows("token_type_embeddings"),
        "hidden_act": "gelu",
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if scores:
        labels = file.metadata.get("bert.classifier.output_labels")
        count = len(tensors["classifier.weight"])
        if not isinstance(labels, list) or len(labels) != count:
            labels = [f"LABEL_{number}" for number in range(count)]
        config["id2label"] = dict(enumerate(map(str, labels)))
        config["label2id"] = {label: number for number, label in config["id2label"].items()}
    check_counts(file.model, file.path.name, config)
    return config


def _write_tokenizer(file: GgufFile, config: dict[str, Any], directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) != config["vocab_size"]:
        count = len(tokens) if isinstance(tokens, list) else "no"
        raise file.fault(f"it has {count} tokens, and its table of embeddings {config['vocab_size']}")
    special = {}
    for role, (key, *names) in _ROLES.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        token_ids(file.model, f"{file.path.name}: tokenizer.ggml.{key}_token_id", token_id, len(tokens))
        if token_id is None:
            token_id = next((tokens.index(name) for name in names if name in tokens), None)
        if token_id is not None:
            special[role] = int(token_id)
    for role, other in (("cls", "bos"), ("sep", "eos")):
        if role not in special and other in special:
            special[role] = special[other]
    if not {"cls", "sep"} <= special.keys():
        raise file.fault("the metadata lack the tokens around a text, cls_token_id and seperator_token_id")
    kind = file.metadata.get("tokenizer.ggml.model")
    try:
        if kind == "bert":
            backend = _word_pieces(file, tokens, special.get("unk"))
        elif kind == "t5":
            backend = _unigrams(file, tokens, special.get("unk"))
        else:
            raise file.fault(f"tokenizer.ggml.model is {kind!r}; encoders need bert or t5")
        _enclose(backend, special["cls"], special["sep"], tells_apart=kind == "bert")
    except ModelError:
        raise
    except Exception as fault:  # the library tokenizers has no class for its errors
        raise file.fault(f"its tokenizer cannot be read: {fault}") from fault
    tells_apart = config["type_vocab_size"] > 1 and kind == "bert"
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=backend,
        model_max_length=config["max_position_embeddings"],
        model_input_names=["input_ids", *(["token_type_ids"] if tells_apart else []), "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": backend.id_to_token(token_id) for role, token_id in special.items()},
    )
    tokenizer.save_pretrained(directory)


def _word_pieces(file: GgufFile, tokens: list[str], unknown: int | None) -> "Backend":
    """Build a WordPiece tokenizer. The file marks a word's first piece; BERT marks the other pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    kinds = file.metadata.get("tokenizer.ggml.token_type")
    vocab = {}
    for token_id, token in enumerate(tokens):
        is_control = kinds is not None and int(kinds[token_id]) == _CONTROL
        if token.startswith("\u2581"):
            token = token[1:]
        elif not is_control and not (token.startswith("[") and token.endswith("]")):
            token = f"##{token}"
        vocab[token] = token_id
    # The file does not say whether the model distinguishes cases. Only such a model has upper case in its pieces.
    lowercase = not any(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]" if unknown is None else tokens[unknown]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _unigrams(file: GgufFile, tokens: list[str], unknown: int | None) -> "Backend":
    """Build XLM-R's SentencePiece tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise file.fault("the metadata lack a score for each token, tokenizer.ggml.scores")
    backend = Tokenizer(models.Unigram([*zip(tokens, map(float, scores), strict=True)], unknown, False))
    charsmap = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        backend.normalizer = normalizers.Precompiled(bytes(np.asarray(charsmap).astype(np.uint8)))
    prepend = "always" if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=prepend)]
    )
    return backend


def _enclose(backend: "Backend", first: int, last: int, *, tells_apart: bool) -> None:
    """Let the tokenizer put the special tokens around a text and a pair, as the model's own tokenizer does."""
    from tokenizers import processors

    begin, end = backend.id_to_token(first), backend.id_to_token(last)
    pair = f"{begin} $A {end} $B:1 {end}:1" if tells_apart else f"{begin} $A {end} {end} $B {end}"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=pair, special_tokens=[(begin, first), (end, last)]
    )


def _write_pooling(file: GgufFile, config: dict[str, Any], directory: Path) -> None:
    """Write sentence-transformers' files; none if the file names no pooling."""
    kind = file.metadata.get("bert.pooling_type", 0)
    if kind == 0:
        return
    if kind not in _MODES:
        raise file.fault(
            f"bert.pooling_type is {kind}; supported are 1 (mean), 2 (cls), 3 (last) and {GGUF_RANK} (rank)"
        )
    modules = ("Transformer", "Pooling", "Normalize")
    places = ("", "1_Pooling", "2_Normalize")
    _write(
        directory / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{module}"}
            for number, (module, path) in enumerate(zip(modules, places, strict=True))
        ],
    )
    (directory / "1_Pooling").mkdir()
    _write(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": config["hidden_size"], "pooling_mode": _MODES[kind]},
    )


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
