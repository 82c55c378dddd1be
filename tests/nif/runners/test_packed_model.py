"""A model whose projections are packed and nothing else: fewer bytes, the same answers, packed once."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton

from genbatch.nif.context import Context
from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import OptionError
from genbatch.nif.kernels.packed_linear import packed_linear
from genbatch.nif.kernels.packed_weight import PackedWeight, unpack, unpacked
from genbatch.nif.models.model import load_model
from genbatch.nif.runners import lean_llama
from genbatch.nif.runners.lean_llama import is_packed, pack_model
from genbatch.nif.runners.triton_runner import Precision, TritonRunner
from tests.nif.models.quantised_files import make_checkpoint
from tests.nif.runners.test_triton_runner import allocated, layout

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="these models are on the CPU, where only the interpreter runs kernels"
)


def bytes_held(model: Any) -> int:
    parts = [part for _, part in model.hf.named_parameters()]
    for module in model.hf.model.layers:
        for weight in getattr(module, "packed", ()):
            parts += [one for one in (weight.data, weight.scales, weight.bias) if one is not None]
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_packed_weights_are_the_only_ones_and_every_new_runner_reads_the_same(
    tiny_model_dir: Callable[[str], Path], kind: str
) -> None:
    whole = load_model(str(tiny_model_dir("qwen3")), dtype="float32", n_gpu_layers=0)
    projections = sum(part.nbytes for name, part in whole.hf.named_parameters() if "_proj" in name)
    before = bytes_held(whole)
    step = layout(1, [(0, [5, 17, 100, 42], 0), (1, [200, 3], 0)])
    expected = allocated(TritonRunner(whole, precision=Precision(kind))).forward(step)

    packed = pack_model(whole, kind, CPU)
    assert is_packed(packed) and not any("_proj" in name for name, _ in packed.hf.named_parameters())
    # 32 bits became 8, or 4 with a scale and a zero for every 64 inputs; here 32 inputs are padded to 128.
    assert bytes_held(packed) < before - projections / 3
    for _ in range(2):  # a Batcher that is started anew opens another one
        runner = allocated(TritonRunner(packed, precision=Precision(kind)))
        assert np.array_equal(runner.forward(step), expected)
        assert runner.quantize == kind
        runner.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_long_prompt_of_a_packed_model_has_the_librarys_products_and_the_same_logits(
    tiny_model_dir: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pack_model(load_model(str(tiny_model_dir("qwen3")), dtype="float32", n_gpu_layers=0), kind, CPU)
    monkeypatch.setattr(lean_llama, "_MAX_OWN_PACKED_ROWS", 4)
    prompt = [3 + 7 * index for index in range(6)]
    logits, launched, budget = {}, {}, {}
    for in_order in (False, True):
        runner = TritonRunner(model, precision=Precision(kind), batch_invariant=in_order)
        context = Context(model, runner, n_ctx=16, n_parallel=1, block_size=16)
        assert runner._lean is not None
        unpackings: list[torch.Size] = []

        def noted(weight: PackedWeight, dtype: torch.dtype, unpackings: list[torch.Size] = unpackings) -> torch.Tensor:
            unpackings.append(weight.data.shape)
            return unpacked(weight, dtype)

        monkeypatch.setattr(lean_llama, "unpacked", noted)
        logits[in_order] = context.prefill(prompt, 0, 0)
        launched[in_order] = len(unpackings)
        assert (runner._lean.unpacked_bytes > 0) == (not in_order)
        budget[in_order] = runner.own_bytes(1, 16) - runner._lean.unpacked_bytes
        context.close()
    assert budget[False] == budget[True], "the pool leaves room for the largest weight"
    assert launched == {False: 4 * len(model.layers), True: 0}
    torch.testing.assert_close(*map(torch.as_tensor, logits.values()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_some_tens_of_rows_are_multiplied_with_packed_weights_and_more_with_unpacked_ones(
    tiny_model_dir: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pack_model(load_model(str(tiny_model_dir("qwen3")), dtype="float16", n_gpu_layers=0), kind, CPU)
    monkeypatch.setattr(lean_llama, "_MAX_OWN_PACKED_ROWS", 4)
    prompt = [3 + 7 * index for index in range(6)]
    logits, rows = {}, []

    def noted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(x))
        return packed_linear(x, *arguments)

    monkeypatch.setattr(lean_llama, "packed_linear", noted)
    for most_rows in (256, 5):
        monkeypatch.setattr(lean_llama, "MAX_ROWS", most_rows)
        runner = TritonRunner(model, precision=Precision(kind))
        context = Context(model, runner, n_ctx=16, n_parallel=1, block_size=16)
        logits[most_rows] = context.prefill(prompt, 0, 0)
        context.close()
    assert rows == [len(prompt)] * 4 * len(model.layers)
    torch.testing.assert_close(*map(torch.as_tensor, logits.values()), rtol=2e-2, atol=2e-2)


def test_a_model_of_another_family_is_not_packed(tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model_dir("gemma2")), dtype="float32", n_gpu_layers=0)
    with pytest.raises(OptionError, match=r"quantize.*Gemma2ForCausalLM"):
        pack_model(model, "int8", CPU)
    assert not is_packed(model)


@pytest.mark.parametrize("form", ["gptq-4-64-gptq", "awq-128", "packed-4-64-asymmetric", "gptq-4-32-gptq"])
def test_4_bits_of_a_checkpoint_are_not_rounded_again(tmp_path: Path, tiny_models: ModuleType, form: str) -> None:
    """Where its groups are whole 64 inputs; those of 32 are made anew."""
    checkpoint = make_checkpoint(tmp_path, form, "qwen2")
    tiny_models.build_tokenizer(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", n_gpu_layers=0)
    packed = pack_model(model, "int4", CPU)
    decoder: Any = packed.hf.model
    for theirs, ours in zip(checkpoint.hf.model.layers, decoder.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        wanted = (
            torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            attention.o_proj.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        )
        same = [torch.equal(unpack(weight), values) for weight, values in zip(ours.packed, wanted, strict=True)]
        assert all(same) if form != "gptq-4-32-gptq" else not any(same)
        biases = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
        assert torch.equal(ours.packed[0].bias, torch.cat(biases))
    if form == "awq-128":
        tokens = [5, 17, 100, 42]
        runner = allocated(TritonRunner(packed, precision=Precision("int4")))
        logits = torch.as_tensor(runner.forward(layout(1, [(0, tokens, 0)])))
        expected = checkpoint.hf(torch.tensor([tokens])).logits[0, -1].detach()
        assert torch.allclose(logits[-1], expected, atol=1e-3 * float(expected.abs().max()))
        runner.close()
