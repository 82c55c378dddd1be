"""GGUF files with recurrent layers: configuration and tensors come back, and the file runs as the module does."""

import importlib.util
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import ModelError
from genbatch.nif.models.architectures import ARCHITECTURES, layer_groups, max_position
from genbatch.nif.models.gguf_config import gguf_config
from genbatch.nif.models.gguf_file import GgufFile, GgufWeights
from genbatch.nif.native.library import STORED_KINDS
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from tests.nif.models.gguf_files import batch_of
from tests.nif.models.hybrid_files import ARCH, MODELS, rounded, write_hybrid

TOKENS = [5, 9, 100, 33, 7, 210, 64, 3, 18]


@pytest.fixture(scope="module")
def models() -> ModuleType:
    path = Path(__file__).parent.parent / "native" / "models.py"
    spec = importlib.util.spec_from_file_location("native_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(models: ModuleType, name: str) -> Any:
    source, changes = MODELS[name]
    return models.random_model(source, **changes)


def packed(name: str, model: Any, path: Path) -> ModelWeights:
    file = GgufFile(name, path)
    config: Any = gguf_config(file)
    described: Any = SimpleNamespace(
        name=name,
        hf=model,
        config=config,
        device=CPU,
        dtype="float32",
        torch_dtype=torch.float32,
        groups=layer_groups(name, config),
        max_position=max_position(name, config),
        vocab_size=config.vocab_size,
        weights=GgufWeights(file, config),
        shape=None,
    )
    return ModelWeights(described)


def logits_of(weights: ModelWeights) -> torch.Tensor:
    with closing(NativeRunner(weights)) as runner:
        runner.allocate([4] * len(runner.groups), 16)
        return torch.as_tensor(runner.forward(batch_of(TOKENS, len(runner.groups))))


@pytest.mark.parametrize("name", ARCH)
def test_configuration_and_logits_are_those_of_the_module(models: ModuleType, tmp_path: Path, name: str) -> None:
    model = made(models, name)
    write_hybrid(tmp_path / "model.gguf", name, model)
    config: Any = gguf_config(GgufFile(name, tmp_path / "model.gguf"))
    kind = type(model).__name__
    described, wanted = ARCHITECTURES[kind](config), ARCHITECTURES[kind](model.config)
    assert described.recurrence is None or wanted.recurrence is not None
    if described.recurrence is not None and wanted.recurrence is not None and not name.startswith("falcon"):
        assert described.recurrence == wanted.recurrence
    assert described.norm_eps == pytest.approx(wanted.norm_eps)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
        assert torch.allclose(logits_of(packed(name, model, tmp_path / "model.gguf")), expected, atol=1e-3)


@pytest.mark.parametrize("name", ARCH)
def test_blocks_of_a_file_stay_blocks(models: ModuleType, tmp_path: Path, name: str) -> None:
    """Input and output matrices of recurrent layers keep their stored type, in any order of their rows."""
    kinds = {"ssm_in.weight": "Q8_0", "ssm_out.weight": "Q4_0", "shortconv.in_proj.weight": "Q4_0"}
    model = made(models, name)
    if name.startswith("falcon"):
        for key in ("ssm_in_multiplier", "ssm_out_multiplier"):
            setattr(model.config, key, 1.0)
        for layer in model.model.layers:
            layer.mamba.ssm_in_multiplier, layer.ssm_out_multiplier = 1.0, 1.0
            layer.mamba.mup_vector.fill_(1.0)
        model.config.ssm_multipliers = [1.0] * 5
    rounded(model, name, kinds)
    write_hybrid(tmp_path / "model.gguf", name, model, kinds)
    weights = packed(name, model, tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
        assert torch.allclose(logits_of(weights), expected, atol=1e-3)
    if name not in ("lfm2_moe", "qwen3_next"):
        inputs = [layer.recurrence.contents.inputs for layer in weights.layers if layer.recurrence]
        assert {linear.parts[0].kind for linear in inputs} == {STORED_KINDS["Q8_0"]}


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")])
def test_two_tensors_that_are_one_of_the_module_may_differ_in_type(
    models: ModuleType, tmp_path: Path, types: tuple[str, str]
) -> None:
    model = made(models, "qwen3_next")
    write_hybrid(tmp_path / "plain.gguf", "qwen3_next", model)
    kinds = dict(zip(("attn_qkv.weight", "attn_gate.weight"), types, strict=True))
    write_hybrid(tmp_path / "model.gguf", "qwen3_next", model, kinds)
    files = [GgufFile("m", tmp_path / name) for name in ("plain.gguf", "model.gguf")]
    exact, blocks = (GgufWeights(file, gguf_config(file)) for file in files)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    got, want = blocks.tensor(name), exact.tensor(name).whole()
    assert got.kind == ("Q8_0" if types[0] == types[1] else "F32")
    assert torch.equal(want, model.state_dict()[name])
    assert float((got.whole() - want).norm() / want.norm()) < 0.1


def test_a_part_without_the_other_is_named(models: ModuleType, tmp_path: Path) -> None:
    model = made(models, "qwen3_next")
    write_hybrid(tmp_path / "model.gguf", "qwen3_next", model)
    file = GgufFile("m", tmp_path / "model.gguf")
    del file._entries["blk.0.attn_gate.weight"]
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.weight lacks"):
        GgufWeights(file, gguf_config(file)).tensor("model.layers.0.linear_attn.in_proj_qkvz.weight")
