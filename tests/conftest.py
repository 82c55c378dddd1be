"""What all tests share: Triton's interpreter where there is no GPU, one thread, small random models, the default model.

Triton decides when it is first imported, and transformers imports it: the variable must be set before any
test module.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

# One thread for torch's and numpy's operators, in the processes that tests start, too. The models are so small that
# further threads only wait for one another: on two busy cores a test took four times as long.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    # Unset, triton warns at its first compilation, and warnings are errors here.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model

# How long an example takes is the machine's affair. The same examples in every run: what passed once passes everywhere.
PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", PATIENT, derandomize=True)
hypothesis.settings.load_profile("same")
# For `make long`: a million steps of the state machines, others in every run.
hypothesis.settings.register_profile("long", PATIENT, derandomize=False, max_examples=28_000)


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module `tests/nif/tiny_models.py`; tests are no package, so it is loaded by its path."""
    return _module_at(Path(__file__).parent / "nif" / "tiny_models.py")


def _module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_model_dir("llama") is the directory of a small random model of the family, made once a session."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.build_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], Model]:
    """tiny_model("llama") is that model loaded on the CPU in float32, once a session."""
    loaded: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in loaded:
            loaded[family] = load_model(str(tiny_model_dir(family)), dtype="float32", n_gpu_layers=0)
        return loaded[family]

    return model


@pytest.fixture(scope="session")
def embedder_dir(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """embedder_dir("bert mean") is the directory of a small random model of `embedders.py`, made once a session."""
    embedders = _module_at(Path(__file__).parent / "nif" / "embedders.py")
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = embedders.build_embedder(kind, tmp_path_factory.mktemp("embedder"), tiny_models)
        return made[kind]

    return directory


@pytest.fixture(scope="session")
def scorer_dir(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """scorer_dir("bert") is the directory of a small random model of `scorers.py`, made once a session."""
    scorers = _module_at(Path(__file__).parent / "nif" / "scorers.py")
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = scorers.build_scorer(kind, tmp_path_factory.mktemp("scorer"), tiny_models)
        return made[kind]

    return directory


@pytest.fixture(scope="session")
def oracle(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], Any]:
    """oracle("llama") answers for that model as transformers' `generate` does."""
    module = _module_at(Path(__file__).parent / "oracle.py")
    made: dict[str, Any] = {}

    def find(family: str) -> Any:
        if family not in made:
            made[family] = module.Oracle(tiny_model_dir(family))
        return made[family]

    return find


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The default model in float32 on the CPU, loaded once a session; at first it is fetched and converted."""
    return load_model("smollm2", dtype="float32", n_gpu_layers=0)


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Undo what a command leaves behind in this process: its logging, and the variables for its children."""
    environment = dict(os.environ)
    root, ours = logging.getLogger(), logging.getLogger("genbatch")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)
    for name in {*os.environ, *environment}:
        if name.startswith("GENBATCH_") and name in environment:
            os.environ[name] = environment[name]
        elif name.startswith("GENBATCH_"):
            del os.environ[name]
