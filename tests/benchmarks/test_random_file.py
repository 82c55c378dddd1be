"""Files of random weights: they are read as a published model's file is, and their logits are numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from tests.benchmarks import random_file

SMALL: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 8},
    "gemma4": {"hidden_size": 96, "intermediate_size": 160, "hidden_size_per_layer_input": 32},
    "gemma3n": {"hidden_size": 96, "intermediate_size": 160, "hidden_size_per_layer_input": 32},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_file_is_read_and_computes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, model_class, _, experts, size = random_file.SHAPES[name]
    small = partial(_small, make, SMALL[name])
    monkeypatch.setitem(random_file.SHAPES, name, (small, model_class, 640, experts, size))
    random_file.write(name, tmp_path / "model.gguf")
    engine = load_engine(EngineOptions(model_path=str(tmp_path / "model.gguf"), runner="native", n_threads=1, n_ctx=64))
    context = engine.open_context(n_parallel=1, n_held=0, n_batch=32)
    logits = np.asarray(context.prefill(list(range(3, 20)), 0, 0))
    assert logits.shape == (640,) and np.isfinite(logits).all() and logits.std() > 0
    context.close()


def _small(make: Any, changes: dict[str, Any], vocab: int, experts: int) -> Any:
    config = make(vocab, experts)
    return type(config)(**{**config.to_dict(), **changes})
