"""What the files of a model say of its embeddings, and what is refused of them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, LlamaConfig

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.models.model import load_model
from genbatch.nif.pooling import CLS, LAST, MEAN, directory_pooling, gguf_pooling, plain_pooling
from genbatch.nif.runner import Entry, Logits
from tests.nif.embedders import build_embedder
from tests.nif.models.test_gguf_oracle import make_file

CONFIG = LlamaConfig(hidden_size=32)
PLAIN = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.sentence_transformer.modules.Normalize", "path": "2_Normalize"}


def write(directory: Path, **files: Any) -> Path:
    """Each keyword is a file, "__" standing for "/"."""
    for name, content in files.items():
        path = directory / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_lasttoken": True}, LAST),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, CLS),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, MEAN),
        ({"pooling_mode": "lasttoken"}, LAST),
        ({"pooling_mode": ["cls"]}, CLS),
        ({"word_embedding_dimension": 32}, MEAN),  # as sentence-transformers has it
    ],
)
def test_sentence_transformers_files_name_the_pooling(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    write(tmp_path, modules=[*PLAIN, POOLING, NORMALIZE], **{"1_Pooling__config": settings})
    found = directory_pooling("m", tmp_path, CONFIG)
    assert found is not None
    assert (found.kind, found.normalize, found.size) == (kind, True, 32)


def test_what_stands_beside_the_pooling_counts_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        modules=[*PLAIN, POOLING],
        **{"1_Pooling__config": {"pooling_mode": "mean"}},
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Q: "}, "default_prompt_name": "query"},
    )
    found = directory_pooling("m", tmp_path, CONFIG)
    assert found is not None
    assert not found.normalize
    assert (found.max_tokens, found.text("HÉ")) == (128, "Q: hé")


def test_files_that_speak_of_no_embeddings_name_none(tmp_path: Path) -> None:
    assert directory_pooling("m", tmp_path, CONFIG) is None
    assert directory_pooling("m", write(tmp_path, modules=PLAIN), CONFIG) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"1_Pooling__config": {"pooling_mode": "max"}}, "pooled by max"),
        ({"1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "cls and mean"),
        ({"1_Pooling__config": "{"}, "config.json cannot be read"),
        ({"1_Pooling__config": []}, "not a JSON object"),
        ({"modules": {}}, "not a list"),
        ({"modules": [POOLING]}, "is missing"),
        ({"modules": [POOLING | {"path": "../.."}]}, "outside"),
        ({"modules": [*PLAIN, POOLING, {"type": "x.Dense", "path": "2"}]}, "Dense"),
        (
            {
                "modules": [POOLING],
                "1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False},
                "config_sentence_transformers": {"prompts": {"a": "b"}, "default_prompt_name": "a"},
            },
            "include_prompt",
        ),
        (
            {
                "modules": [POOLING],
                "1_Pooling__config": {"pooling_mode": "mean"},
                "config_sentence_transformers": {"prompts": {}, "default_prompt_name": "a"},
            },
            "no prompt 'a'",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        directory_pooling("m", write(tmp_path, **files), CONFIG)


@pytest.mark.parametrize(("number", "kind"), [(1, MEAN), (2, CLS), (3, LAST)])
def test_a_gguf_file_names_the_pooling(number: int, kind: str) -> None:
    found = gguf_pooling("m", {"general.architecture": "qwen3", "qwen3.pooling_type": number}, CONFIG)
    assert found is not None
    assert (found.kind, found.normalize) == (kind, True)


def test_a_gguf_file_that_names_none_or_ranks() -> None:
    assert gguf_pooling("m", {"general.architecture": "qwen3"}, CONFIG) is None
    assert gguf_pooling("m", {"general.architecture": "qwen3", "qwen3.pooling_type": 0}, CONFIG) is None
    with pytest.raises(ModelError, match="pooling_type is 4"):
        gguf_pooling("m", {"general.architecture": "qwen3", "qwen3.pooling_type": 4}, CONFIG)


def test_sizes_that_the_model_was_trained_for_may_be_asked_for() -> None:
    assert plain_pooling(
        LAST, LlamaConfig(hidden_size=8, num_attention_heads=1, matryoshka_dimensions=[2, 4, 8, 9])
    ).shorter == {2, 4}
    assert plain_pooling(LAST, LlamaConfig(num_attention_heads=1, hidden_size=4, is_matryoshka=True)).shorter == {
        1,
        2,
        3,
    }
    assert plain_pooling(LAST, LlamaConfig(num_attention_heads=1, hidden_size=4)).shorter == frozenset()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # the head of the second has another name in files
def test_the_option_says_what_the_files_do_not(family: str, tmp_path: Path, tiny_models: ModuleType) -> None:
    plain = tiny_models.build_model(family, tmp_path / family)
    model = load_model(str(plain), dtype="float32", n_gpu_layers=0, pooling="mean")
    assert model.pooling is not None
    assert (model.pooling.kind, model.pooling.normalize, model.generates) == (MEAN, True, True)
    engine = load_engine(EngineOptions(model_path=str(plain), n_gpu_layers=0, pooling="last"))
    assert engine.open_context(n_parallel=1, n_held=0, n_batch=8).runner.name == "torch"
    with pytest.raises(ModelError, match="first token"):
        load_model(str(plain), n_gpu_layers=0, pooling="cls")


def test_an_encoder_whose_files_do_not_say_is_refused_until_somebody_does(
    tmp_path: Path, tiny_models: ModuleType
) -> None:
    directory = build_embedder("bert mean", tmp_path, tiny_models)
    (directory / "modules.json").unlink()
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match="set pooling to last, mean or cls"):
        load_model(str(directory), n_gpu_layers=0)
    model = load_model(str(directory), n_gpu_layers=0, pooling="cls")
    assert model.pooling is not None
    assert (model.pooling.kind, model.max_position, model.generates) == (CLS, 64, False)


def test_a_head_that_decides_something_else_gives_no_embeddings(tmp_path: Path, tiny_models: ModuleType) -> None:
    directory = build_embedder("bert mean", tmp_path, tiny_models)
    config = BertConfig.from_pretrained(directory)
    torch.manual_seed(0)
    BertForTokenClassification(config).save_pretrained(directory)
    with pytest.raises(ModelError, match="BertForTokenClassification"):
        load_model(str(directory), n_gpu_layers=0)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"runner": "native"}, "runner"),
        ({"quantize": "int8"}, "quantize"),
        ({"use_cuda_graph": True}, "use_cuda_graph"),
    ],
)
def test_options_of_other_runners_are_refused(
    options: dict[str, Any], option: str, tmp_path: Path, tiny_models: ModuleType
) -> None:
    directory = build_embedder("qwen3 last", tmp_path, tiny_models)
    with pytest.raises(OptionError) as refused:
        load_engine(EngineOptions(model_path=str(directory), n_gpu_layers=0, **options))
    assert refused.value.option == option


def test_a_pooling_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="pooling"):
        EngineOptions(pooling="max")
    with pytest.raises(OptionError, match="pooling"):
        load_engine(EngineOptions(pooling="mean", tensor_parallel=2))


def test_a_gguf_files_embedding_is_transformers_last_state(tmp_path: Path) -> None:
    file = make_file("F32")
    file.numbers["pooling_type"] = 3
    engine = load_engine(EngineOptions(model_path=str(file.write(tmp_path / "m.gguf")), n_gpu_layers=0))
    pooling = engine.model.pooling
    assert pooling is not None and engine.model.generates
    ctx = engine.open_context(n_parallel=1, n_held=0, n_batch=16)
    tokens = [5, 17, 40, 8, 61, 3, 22]
    [rows] = ctx.step_and_read([Entry(0, tokens, 0, Logits.LAST_STATE)], [None], lambda rows, _: rows)
    ctx.close()
    hf: Any = file.hf
    with torch.inference_mode():
        expected = hf.model(torch.tensor([tokens])).last_hidden_state[0, -1]
    np.testing.assert_allclose(pooling.finish(rows[-1]), expected / expected.norm(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("labels", [["yes", "no"], None])
def test_a_gguf_rerankers_score_is_its_heads(tmp_path: Path, labels: list[str] | None) -> None:
    """llama.cpp's converter writes the head's rows of yes and no as Qwen3-Reranker's head."""
    file = make_file("F32")
    file.numbers["pooling_type"] = 4
    head = np.random.default_rng(4).normal(size=(2 if labels else 1, file.hf.config.hidden_size)).astype(np.float32)
    file.tensors["cls.output.weight"] = ("F32", head)
    if labels:
        file.numbers["classifier.output_labels"] = labels
    engine = load_engine(EngineOptions(model_path=str(file.write(tmp_path / "m.gguf")), n_gpu_layers=0))
    pooling = engine.model.pooling
    assert pooling is not None and engine.model.pairs is not None and not pooling.embeds
    ctx = engine.open_context(n_parallel=1, n_held=0, n_batch=16)
    tokens = [5, 17, 40, 8, 61, 3, 22]
    [rows] = ctx.step_and_read([Entry(0, tokens, 0, Logits.LAST_STATE)], [None], lambda rows, _: rows)
    ctx.close()
    with torch.inference_mode():
        state = file.hf.model(torch.tensor([tokens])).last_hidden_state[0, -1]
    numbers = torch.from_numpy(head) @ state
    expected = numbers.softmax(0)[:1] if labels else numbers.sigmoid()
    np.testing.assert_allclose(pooling.finish(rows[-1]), expected, atol=2e-5, rtol=1e-4)


def test_a_gguf_head_of_other_labels_is_refused(tmp_path: Path) -> None:
    file = make_file("F32")
    file.numbers |= {"pooling_type": 4, "classifier.output_labels": ["good", "bad"]}
    file.tensors["cls.output.weight"] = ("F32", np.ones((2, file.hf.config.hidden_size), np.float32))
    with pytest.raises(ModelError, match=r"gives \['good', 'bad'\]; served are one number, or yes and no"):
        load_engine(EngineOptions(model_path=str(file.write(tmp_path / "m.gguf")), n_gpu_layers=0))


def test_every_decoder_with_a_pooling_of_the_operators_continues_text_too(
    tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where the head is stored under a name of the family's own, it is found under that."""
    silent = []
    for family in tiny_models.FAMILIES:
        directory = tiny_models.build_model(family, tmp_path_factory.mktemp(family))
        if not load_model(str(directory), dtype="float32", n_gpu_layers=0, pooling="mean").generates:
            silent.append(family)
    assert not silent
