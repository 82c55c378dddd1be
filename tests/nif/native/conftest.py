"""Fixtures for the C kernels: small models of their family, and ragged batches over a private pool."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.native.build import NativeUnavailable
from genbatch.nif.native.library import native_library
from genbatch.nif.runner import RaggedBatch


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """The module `models.py` beside this file; tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("native_models", Path(__file__).parent / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native_model(
    models: ModuleType, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Model]:
    """native_model("llama", "bfloat16") is that small model on the CPU, loaded once a session."""
    loaded: dict[tuple[str, str], Model] = {}

    def model(name: str, dtype: str = "float32") -> Model:
        if (name, dtype) not in loaded:
            directory = tmp_path_factory.mktemp(name)
            models.build_native_model(name, directory, tiny_models.build_tokenizer)
            loaded[name, dtype] = load_model(str(directory), dtype=dtype, n_gpu_layers=0)
        return loaded[name, dtype]

    return model


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Builds the kernels once; without a compiler there is nothing to test here."""
    try:
        native_library()
    except NativeUnavailable as fault:
        if "no C compiler" in fault.reason:
            pytest.skip(fault.reason)
        raise


@pytest.fixture(scope="session")
def layout() -> Callable[..., RaggedBatch]:
    """layout(num_groups, [(sequence, tokens, n_past), …], capacity, block_size) is a batch.

    Sequence s owns the s-th `capacity` blocks, back to front, so that neighbours in a table are none in memory.
    """

    def make(
        num_groups: int, parts: Sequence[tuple[int, Sequence[int], int]], capacity: int, block_size: int
    ) -> RaggedBatch:
        table = np.array([[(s + 1) * capacity - 1 - b for b in range(capacity)] for s, _, _ in parts], np.int32)
        positions = [np.arange(past, past + len(tokens)) for _, tokens, past in parts]
        pairs = zip(table, positions, strict=True)
        slots = np.concatenate(
            [row[at // block_size].astype(np.int64) * block_size + at % block_size for row, at in pairs]
        )
        lengths = [len(tokens) for _, tokens, _ in parts]
        return RaggedBatch(
            input_ids=np.array([token for _, tokens, _ in parts for token in tokens], np.int64),
            positions=np.concatenate(positions),
            query_starts=np.cumsum([0, *lengths]).astype(np.int32),
            kv_lens=np.array([past + len(tokens) for _, tokens, past in parts], np.int32),
            slots=(slots,) * num_groups,
            block_tables=(table,) * num_groups,
            logit_rows=np.arange(sum(lengths)),
            max_query_len=max(lengths),
            max_kv_len=max(past + len(tokens) for _, tokens, past in parts),
        )

    return make
