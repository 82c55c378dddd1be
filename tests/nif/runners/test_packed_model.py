"""A model whose projections are packed and nothing else: fewer bytes, the same answers, packed once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from genbatch.nif.errors import OptionError
from genbatch.nif.models.model import load_model
from genbatch.nif.runners.lean_llama import is_packed, pack_model
from genbatch.nif.runners.triton_runner import TritonRunner
from tests.nif.runners.test_triton_runner import allocated, layout

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="these models are on the CPU, where only the interpreter runs kernels"
)


def bytes_held(model: Any) -> int:
    parts = [part for _, part in model.hf.named_parameters()]
    for module in model.hf.model.layers:
        for weight in getattr(module, "packed", ()):
            parts += [one for one in (weight.data, weight.scales, weight.zeros, weight.bias) if one is not None]
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_packed_weights_are_the_only_ones_and_every_new_runner_reads_the_same(
    tiny_model_dir: Callable[[str], Path], kind: str
) -> None:
    whole = load_model(str(tiny_model_dir("qwen3")), dtype="float32", n_gpu_layers=0)
    projections = sum(part.nbytes for name, part in whole.hf.named_parameters() if "_proj" in name)
    before = bytes_held(whole)
    step = layout(1, [(0, [5, 17, 100, 42], 0), (1, [200, 3], 0)])
    expected = allocated(TritonRunner(whole, quantize=kind)).forward(step)

    packed = pack_model(whole, kind, torch.device("cpu"))
    assert is_packed(packed) and not any("_proj" in name for name, _ in packed.hf.named_parameters())
    # 32 bits became 8, or 4 with a scale and a zero for every 64 inputs; here 32 inputs are padded to 128.
    assert bytes_held(packed) < before - projections / 3
    for _ in range(2):  # a Batcher that is started anew opens another one
        runner = allocated(TritonRunner(packed, quantize=kind))
        assert runner.forward(step).equal(expected)
        assert runner.quantize == kind
        runner.close()


def test_a_model_of_another_family_is_not_packed(tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model_dir("gemma2")), dtype="float32", n_gpu_layers=0)
    with pytest.raises(OptionError, match=r"quantize.*Gemma2ForCausalLM"):
        pack_model(model, "int8", torch.device("cpu"))
    assert not is_packed(model)
