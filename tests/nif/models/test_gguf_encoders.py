"""Encoders as GGUF files: embeddings and scores are those of the model that the file was made of."""

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from genbatch.nif.errors import ModelError
from genbatch.nif.models.gguf_encoders import convert_encoder
from genbatch.nif.models.gguf_file import GgufFile
from tests.nif.models.test_sentence_transformers import embeddings, scores

TEXTS = ["the quick brown fox", "Jumps over\tthe  lazy dog!", "é, 世界, unknown ☃", "a"]
PAIRS = [
    ("who jumps?", "the fox jumps over the dog"),
    ("where", "\uff34\uff48\uff45  lazy dog sleeps, doesn't it?"),
]
CORPUS = ["the quick brown fox jumps over the lazy dog", "who sleeps at home?", "The dog doesn't, it jumps!"] * 20
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "layer_norm_eps": 1e-5,
}
# SentencePiece's rules that write FF34, FF48 and FF45 as T, h and e: a trie and the texts that it leads to.
CHARSMAP = zlib.decompress(
    base64.b64decode(
        b"eNod0mWQkAUQBuBvDpxhBkFCQZBG6RCluyQFBGkUEDm6uzni6A4BRUoa6UMF7iiJo5Tu7j46j3iOnX1mZ3b2375B/CAI/okXxMSGBJHRIUFU"
        b"EBJEfBDEVVi4GWI6CUtgkZARiYJABx/yEYlJShKSk4xP+JiUpCAVn/IZqUlLGtKTjoxkIDOZ+ILPyUoWspONnOQgN7nISx7y8SVf8xUFyE8h"
        b"ClKEwhSjKCUoTilKUobSlKMs31CeilSgMpWoShWq8S01qE5NvuN7alGH2tSjLg2oTyMa8iM/0ITG/ERTfqYZoTSnJS1oTSva0ob2tKMjHehM"
        b"J7rShe50oyc96E0v+tKH/vRjIAMYFPdshjCYcIYynGGMjPs7oxnFWMYwnnFMZAKTmcRUpjCNX5jBdH7jV35nJrOZxVzm8AfzWMB8FrGQJSxm"
        b"GUtZzp+sZAWrWcVa1rCOCP7mL9bHRZyNbCCKSDazia1s4V+2sYPt7GInu4lmL3vYzz7+5z8OcoDDHOIoRzjOMU5ygtOc4ixnOM85LnKBy1zi"
        b"Kle4zjVucoPb3OIud4jhHg+4zyMe8oTHPOMpL3jOK17ymlje8uZ9VkPl6x30XIjC"
    )
)


def word_pieces(directory: Path, *, lowercase: bool) -> PreTrainedTokenizerFast:
    """BERT's tokenizer, learned from CORPUS."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=96,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **roles,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def unigrams(directory: Path) -> PreTrainedTokenizerFast:
    """XLM-R's tokenizer, learned from CORPUS."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Precompiled(CHARSMAP)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    roles = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=96,
        model_input_names=["input_ids", "attention_mask"],
        cls_token="<s>",
        sep_token="</s>",
        **roles,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    *,
    pooling: int,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: tuple[str, ...] = (),
    **metadata: Any,
) -> None:
    """Write the file as llama.cpp's converter does."""
    config, backend = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    is_bert = backend["model"]["type"] == "WordPiece"
    writer = gguf.GGUFWriter(path, "bert")
    offset = 0 if is_bert else config.pad_token_id + 1
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(value=False)
    writer.add_uint32("bert.pooling_type", pooling)
    writer.add_token_type_count(config.type_vocab_size)
    if is_bert:
        tokens = [token for token, _ in sorted(backend["model"]["vocab"].items(), key=lambda item: item[1])]
        special = {token["content"] for token in backend["added_tokens"]}
        kinds = [3 if token in special else 1 for token in tokens]
        written = [
            token if token in special else token[2:] if token.startswith("##") else "\u2581" + token for token in tokens
        ]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(written)
    else:
        tokens = [token for token, _ in backend["model"]["vocab"]]
        kinds = [3, 3, 3, 2] + [1] * (len(tokens) - 4)
        writer.add_tokenizer_model("t5")
        writer.add_token_list(tokens)
        writer.add_token_scores([score for _, score in backend["model"]["vocab"]])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(CHARSMAP)
    writer.add_token_types(kinds)
    for role in ("bos", "eos", "sep", "unk", "pad"):  # "cls" is written as "bos"
        if (token_id := getattr(tokenizer, f"{'cls' if role == 'bos' else role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(token_id)
    for key, value in metadata.items():
        writer.add_array(f"bert.classifier.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("roberta.").removeprefix("bert.")
        if name.startswith(("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")):
            continue
        if name == "embeddings.position_embeddings.weight":
            tensor = tensor[offset:]
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored in without:
            continue
        values = tensor.float().numpy()
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32 and values.shape[1] % 32 == 0:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_weights_of(path: Path, model: Any, directory: Path) -> None:
    """Give the model the numbers that the file's blocks hold, and save it."""
    converted = path.parent / "expected"
    convert_encoder(GgufFile("expected", path), converted)
    from safetensors.torch import load_file

    stored = load_file(converted / "model.safetensors")
    state = model.state_dict()
    for name, tensor in stored.items():
        name = name.replace("classifier.", "classifier.out_proj.").replace("bert.pooler.", "classifier.")
        name = name.replace("bert.", "roberta.")
        target = state[name]
        target[-len(tensor) :] = tensor
    model.load_state_dict(state)
    model.save_pretrained(directory)


POOLED = {1: "mean", 2: "cls", 3: "lasttoken"}


def name_pooling(directory: Path, kind: int) -> None:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (directory / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
                for index, (path, module) in enumerate(modules)
            ]
        )
    )
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": POOLED[kind]}))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("family", ["bert", "cased bert", "xlm-r"])
def test_embeddings_are_those_of_the_model_that_the_file_was_made_of(family: str, pooling: int, tmp_path: Path) -> None:
    directory, path = tmp_path / "whole", tmp_path / "model.gguf"
    directory.mkdir()
    torch.manual_seed(pooling)
    if family == "xlm-r":
        tokenizer = unigrams(directory)
        config: Any = XLMRobertaConfig(
            **SIZES, vocab_size=len(tokenizer), max_position_embeddings=98, type_vocab_size=1, pad_token_id=1
        )
        model: Any = XLMRobertaModel(config)
    else:
        tokenizer = word_pieces(directory, lowercase=family == "bert")
        config = BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=96)
        model = BertModel(config)
    model.save_pretrained(directory)
    name_pooling(directory, pooling)
    write_gguf(path, model, tokenizer, pooling=pooling)
    torch.testing.assert_close(embeddings(path, TEXTS), embeddings(directory, TEXTS), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_scores_of_a_reranker_are_those_of_the_model_that_the_file_was_made_of(kind: str, tmp_path: Path) -> None:
    directory, path = tmp_path / "whole", tmp_path / "reranker.gguf"
    directory.mkdir()
    torch.manual_seed(4)
    tokenizer = unigrams(directory)
    config = XLMRobertaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=98,
        type_vocab_size=1,
        pad_token_id=1,
        num_labels=1,
    )
    model = XLMRobertaForSequenceClassification(config)
    write_gguf(path, model, tokenizer, pooling=4, kind=gguf.GGMLQuantizationType[kind])
    with_weights_of(path, model, directory)
    found = scores(path, PAIRS)
    torch.testing.assert_close(found, scores(directory, PAIRS), rtol=0, atol=1e-6)
    assert found.shape == (2, 1) and found[0] != found[1]


def test_a_classifiers_labels_are_the_files(tmp_path: Path) -> None:
    tokenizer = unigrams(tmp_path)
    config = XLMRobertaConfig(
        **SIZES, vocab_size=len(tokenizer), max_position_embeddings=98, type_vocab_size=1, pad_token_id=1, num_labels=3
    )
    model = XLMRobertaForSequenceClassification(config)
    write_gguf(tmp_path / "m.gguf", model, tokenizer, pooling=4, output_labels=["bad", "so", "good"])
    convert_encoder(GgufFile("m", tmp_path / "m.gguf"), tmp_path / "made")
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert written["id2label"] == {"0": "bad", "1": "so", "2": "good"}


def test_the_special_tokens_in_a_text_are_read_as_special_tokens(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path, lowercase=True)
    model = BertModel(BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=96))
    write_gguf(tmp_path / "m.gguf", model, tokenizer, pooling=1)
    convert_encoder(GgufFile("m", tmp_path / "m.gguf"), tmp_path / "made")
    read: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    for text in (*TEXTS, "the [MASK] dog [SEP] fox", ""):
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read(text, "a dog").input_ids == tokenizer(text, "a dog").input_ids
        assert read(text, "a dog").token_type_ids == tokenizer(text, "a dog").token_type_ids


BROKEN: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], None] | None, str]] = {
    "no head": ({"pooling": 4, "without": ("cls.weight",)}, None, "lacks cls.weight"),
    "pooling": ({"pooling": 9}, None, "pooling_type is 9"),
    "tensor": ({"pooling": 1, "without": ("position_embd.weight",)}, None, "position_embeddings is missing"),
    "size": ({"pooling": 1}, lambda metadata: metadata.pop("bert.attention.head_count"), "head_count is None"),
    "tokens": ({"pooling": 1}, lambda metadata: metadata.pop("tokenizer.ggml.tokens"), "it has no tokens"),
    "too few": ({"pooling": 1}, lambda metadata: metadata["tokenizer.ggml.tokens"].pop(), "119 tokens|table of emb"),
    "scores": ({"pooling": 1}, lambda metadata: metadata.pop("tokenizer.ggml.scores"), "lack a score"),
    "kind": (
        {"pooling": 1},
        lambda metadata: metadata.update({"tokenizer.ggml.model": "gpt2"}),
        "'gpt2'; encoders need",
    ),
    "ends": (
        {"pooling": 1},
        lambda metadata: (
            metadata["tokenizer.ggml.tokens"].__setitem__(0, "other"),
            metadata.pop("tokenizer.ggml.bos_token_id"),
        ),
        "lack the tokens around a text",
    ),
    "far": (
        {"pooling": 1},
        lambda metadata: metadata.update({"tokenizer.ggml.eos_token_id": 10**6}),
        "eos_token_id",
    ),
    "causal": ({"pooling": 1}, lambda metadata: metadata.update({"bert.attention.causal": True}), "causal is true"),
    "charsmap": (
        {"pooling": 1},
        lambda metadata: metadata.update({"tokenizer.ggml.precompiled_charsmap": np.full(3, 255, np.uint8)}),
        "tokenizer cannot be read",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_cannot_be_read_is_refused_with_its_reason(broken: str, tmp_path: Path) -> None:
    settings, change, reason = BROKEN[broken]
    tokenizer = unigrams(tmp_path)
    config = XLMRobertaConfig(
        **SIZES, vocab_size=len(tokenizer), max_position_embeddings=98, type_vocab_size=1, pad_token_id=1, num_labels=1
    )
    scores = settings["pooling"] == 4
    model = XLMRobertaForSequenceClassification(config) if scores else XLMRobertaModel(config)
    write_gguf(tmp_path / "m.gguf", model, tokenizer, **settings)
    file = GgufFile("m", tmp_path / "m.gguf")
    if change is not None:
        change(file.metadata)
    with pytest.raises(ModelError, match=reason):
        convert_encoder(file, tmp_path / "made")
