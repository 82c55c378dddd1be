"""Weights in the blocks of a GGUF file: their values to the bit, and products that depend on nothing but the row."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.errors import TensorError
from genbatch.nif.models.model import describe_model
from genbatch.nif.models.weight_source import (
    CODE_KINDS,
    FP4_KINDS,
    FP8_KINDS,
    GROUP_KINDS,
    SafetensorsWeights,
    StoredTensor,
)
from genbatch.nif.native.library import (
    COLUMNS,
    STORED,
    STORED_KINDS,
    WEIGHT_F32,
    WEIGHT_I8,
    WEIGHT_I24,
    Linear,
    native_library,
)
from genbatch.nif.native.runner import native_runner
from genbatch.nif.native.weights import WeightPacker, interleave_gate_up
from tests.nif.models.gguf_files import block_size, dequantized
from tests.nif.native import reference

# Where a block has its float16 factors; any other byte may have any value.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
_HALVES |= {"Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}


def random_tensor(kind: str, n: int, blocks: int, seed: int = 0) -> StoredTensor:
    """A matrix of arbitrary blocks with finite factors."""
    random = np.random.default_rng(seed)
    if kind in GROUP_KINDS:
        return random_groups(kind, n, blocks, random)
    if kind in FP8_KINDS or kind in FP4_KINDS:
        return random_fp(kind, n, blocks, random)
    per_block, size = block_size(kind)
    if kind in ("F16", "BF16", "F32"):
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[kind]
        values = torch.from_numpy(random.normal(size=(n, 32 * blocks))).to(dtype)
        return StoredTensor("w", kind, tuple(values.shape), values.view(torch.uint8).numpy())
    raw = random.integers(0, 256, (n, blocks, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        factors = random.normal(size=(n, blocks)).astype(np.float16)
        raw[:, :, at : at + 2] = factors.view(np.uint8).reshape(n, blocks, 2)
    if kind == "MXFP4":
        raw[:, :, 0] = random.choice([0, 1, 2, 120, 124, 126, 127, 128, 129], (n, blocks))
    if kind == "IQ1_M":  # a float16 in the highest bits of four scales
        factor = random.normal(size=(n, blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            raw[:, :, 49 + 2 * i] = raw[:, :, 49 + 2 * i] & 15 | (factor >> (4 * i) & 15) << 4
    return StoredTensor("w", kind, (n, blocks * per_block), raw.reshape(n, -1))


def random_groups(kind: str, n: int, blocks: int, random: np.random.Generator) -> StoredTensor:
    """A matrix of arbitrary codes in groups, with scales of 16 bits, as nearly all checkpoints have them."""
    bits, inputs = GROUP_KINDS[kind]
    raw = random.integers(0, 256, (n, blocks, 6 + inputs * bits // 8), dtype=np.uint8)
    scales = random.normal(size=(n, blocks, 1)).astype(np.float16).astype(np.float32)
    raw[:, :, :4] = scales.view(np.uint8)
    raw[:, :, 4:6] = random.integers(0, 2**bits, (n, blocks, 1)).astype(np.float16).view(np.uint8)
    return StoredTensor("w", kind, (n, blocks * inputs), raw.reshape(n, -1))


def random_fp(kind: str, n: int, blocks: int, random: np.random.Generator) -> StoredTensor:
    """A matrix of arbitrary numbers in FP8 or NVFP4."""
    inputs = FP8_KINDS.get(kind) or FP4_KINDS[kind]
    size = inputs if kind in FP8_KINDS else inputs // 16 + inputs // 2
    raw = random.integers(0, 256, (n, blocks, 4 + size), dtype=np.uint8)
    raw[:, :, :4] = random.normal(size=(n, blocks, 1)).astype(np.float32).view(np.uint8)
    fp8 = raw[:, :, 4:] if kind in FP8_KINDS else raw[:, :, 4 : 4 + inputs // 16]
    fp8[(fp8 & 127) == 127] ^= 1  # NaN
    return StoredTensor("w", kind, (n, blocks * inputs), raw.reshape(n, -1))


def packed(
    tensors: Sequence[StoredTensor], *, interleaved: bool = False, kind: int = WEIGHT_F32
) -> tuple[WeightPacker, Linear]:
    packer = WeightPacker(native_library(), 2)
    return packer, packer.linear(kind, tensors, interleaved=interleaved)


def values_of(linear: Linear) -> torch.Tensor:
    """The weights that the kernels make of a linear, part after part, [n, k]."""
    library = native_library()
    rows = []
    for part in linear.parts[: linear.num_parts]:
        size = library.stored_block_bytes(part.kind, linear.k)
        for row in range(part.n):
            out = torch.empty(linear.k)
            block = part.weights + row // COLUMNS * size
            library.stored_row(part.kind, block, linear.k, row % COLUMNS, out.data_ptr())
            rows.append(out)
    return torch.stack(rows)


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), linear.n)
    x = x.contiguous()
    library = native_library()
    assert library.linear_probe(ctypes.byref(linear), x.data_ptr(), len(x), x.shape[1], out.data_ptr()) == 0
    return out


def random_rows(count: int, k: int) -> torch.Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", STORED)
@settings(max_examples=6, deadline=None)
@given(n=st.integers(1, 70), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_weights_are_to_the_bit_what_gguf_makes_of_the_file(kind: str, n: int, blocks: int, seed: int) -> None:
    tensor = random_tensor(kind, n, blocks, seed)
    _packer, linear = packed([tensor])
    assert linear.parts[0].kind == STORED_KINDS[kind]
    assert torch.equal(values_of(linear), tensor.floats())


@pytest.mark.parametrize("kind", STORED)
def test_a_product_is_right_and_depends_on_its_row_only(kind: str) -> None:
    tensor = random_tensor(kind, 45, 3)
    _packer, linear = packed([tensor])
    x = random_rows(27, linear.k)
    together = multiply(linear, x)
    want = x.double() @ tensor.floats().double().T
    assert torch.allclose(together.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))
    for rows in (slice(0, 1), slice(3, 5), slice(9, 22)):
        assert torch.equal(multiply(linear, x[rows]), together[rows])


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in ("F16", "BF16", "Q4_1", *FP8_KINDS)])
@pytest.mark.parametrize("group", [16, 32])
def test_an_int8_product_is_that_of_the_rounded_row_and_depends_on_it_only(kind: str, group: int) -> None:
    tensor = random_tensor(kind, 45, 3)
    _packer, linear = packed([tensor], kind=WEIGHT_I8)
    if group < linear.group:
        linear.group = group  # as beside a part with scales for 16
    x = random_rows(27, linear.k)
    together = multiply(linear, x)
    rows, scales = reference.quantize_rows(x, linear.group)
    rounded = (rows * scales[:, :, None]).double().flatten(1)
    want = rounded @ tensor.floats().double().T
    assert torch.allclose(together.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    for rows in (slice(0, 1), slice(3, 5), slice(9, 22)):
        assert torch.equal(multiply(linear, x[rows]), together[rows])


def outliers(count: int, k: int) -> torch.Tensor:
    """Rows whose elements differ by up to 2^40, with zeros, and with the largest fractions of a power of two."""
    rows = random_rows(count, k)
    draw = torch.Generator().manual_seed(2)
    rows *= torch.exp2(torch.randint(-20, 20, rows.shape, generator=draw).float())
    rows[0] = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    rows[1, : k // 2] = 0
    rows[2] *= 1e-30
    rows[3] *= 1e20
    rows[4] = -rows[0]
    return rows


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_blocks_that_the_gguf_package_does_not_compute_are_what_their_definition_says(kind: str) -> None:
    tensor = random_tensor(kind, 5, 3)
    assert np.array_equal(tensor.floats().numpy(), dequantized(tensor.rows, kind))


OURS = {*GROUP_KINDS, *FP8_KINDS, *FP4_KINDS}
BLOCKS = [kind for kind in STORED if kind not in ("F16", "BF16", *FP8_KINDS)]
FINE = ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4", "N4_32", "N4_128")


@pytest.mark.skipif(not native_library().digits_pay(), reason="floats are multiplied as floats here")
@pytest.mark.parametrize("kind", BLOCKS)
def test_integers_of_24_bits_come_nearer_to_the_true_sum_than_float_sums(kind: str) -> None:
    tensor = random_tensor(kind, 45, 4)
    _packer, linear = packed([tensor])
    assert (linear.kind, linear.group) == (WEIGHT_I24, 16 if kind in FINE else 32)
    x = random_rows(24, linear.k)
    want = x.double() @ tensor.floats().double().T
    by_integers = (multiply(linear, x).double() - want).square().mean()
    linear.kind, linear.group = WEIGHT_F32, 1
    by_floats = (multiply(linear, x).double() - want).square().mean()
    assert by_integers < by_floats


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_loses_no_more_than_the_last_bits_of_its_groups_largest(kind: str) -> None:
    tensor = random_tensor(kind, 45, 4)
    _packer, linear = packed([tensor])
    x = outliers(24, linear.k)
    weights = tensor.floats().double()
    largest = x.double().abs().view(len(x), -1, 32).amax(dim=2)
    size = largest @ weights.abs().view(45, -1, 32).sum(dim=2).T
    error = (multiply(linear, x).double() - x.double() @ weights.T).abs()
    assert (error <= 2.0**-21 * size).all()


@pytest.mark.parametrize(("kind", "at", "bad"), [("MXFP4", 0, 255), ("F8_32", 9, 255), ("N4_32", 4, 127)])
def test_a_number_of_the_format_that_is_none_is_refused(kind: str, at: int, bad: int) -> None:
    tensor = random_tensor(kind, 45, 2)
    rows = tensor.rows.copy()
    rows[40, at] = bad
    with pytest.raises(TensorError):
        packed([replace(tensor, rows=rows)])


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_row_with_a_number_that_is_none_gives_none_and_leaves_the_others_alone(kind: str, bad: float) -> None:
    _packer, linear = packed([random_tensor(kind, 45, 2)])
    x = random_rows(6, linear.k)
    before = multiply(linear, x)
    x[3, 17] = bad
    after = multiply(linear, x)
    assert not after[3].isfinite().any()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(after[others], before[others])


def test_a_merged_linear_may_hold_several_types_and_sizes_that_fill_no_block() -> None:
    tensors = [random_tensor("Q4_K", 48, 1), random_tensor("Q4_K", 16, 1, 1), random_tensor("Q6_K", 16, 1, 2)]
    tensors.append(random_tensor("F16", 40, 8, 3))
    _packer, linear = packed(tensors)
    assert [(part.column, part.n, part.first_block) for part in linear.parts[:3]] == [
        (0, 64, 0),
        (64, 16, 2),
        (80, 40, 3),
    ]
    x = random_rows(5, 256)
    want = x.double() @ torch.cat([tensor.floats() for tensor in tensors]).double().T
    assert torch.allclose(multiply(linear, x).double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


def test_gates_and_ups_alternate_and_rows_come_in_their_order() -> None:
    order = np.random.default_rng(0).permutation(24)
    stored = random_tensor("Q5_0", 24, 2)
    gate = StoredTensor("g", "Q5_0", stored.shape, stored.rows, order)
    up = random_tensor("Q5_0", 24, 2, seed=1)
    _packer, linear = packed([gate, up], interleaved=True)
    assert torch.equal(gate.floats(), stored.floats()[order])
    got = values_of(linear)
    assert torch.equal(torch.cat([got[:16], got[32:40]]), gate.floats())
    assert torch.equal(torch.cat([got[16:32], got[48:56]]), up.floats())
    assert not got[40:48].any()


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q2_K", "IQ4_XS"), ("BF16", "Q8_0"), ("Q5_1", "F16")])
def test_gates_and_ups_of_two_types_stay_what_they_are(kinds: tuple[str, str]) -> None:
    blocks = [1 if kind.endswith(("K", "XS")) else 8 for kind in kinds]
    gate, up = (
        random_tensor(kind, 40, count, seed) for seed, (kind, count) in enumerate(zip(kinds, blocks, strict=True))
    )
    _packer, linear = packed([gate, up], interleaved=True)
    assert [part.kind for part in linear.parts[: linear.num_parts]] == [STORED_KINDS[kind] for kind in kinds]
    weights = interleave_gate_up(gate.floats(), up.floats())
    assert linear.n == len(weights)
    x = random_rows(333, linear.k)  # several passes
    together = multiply(linear, x)
    want = x.double() @ weights.double().T
    assert torch.allclose(together.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))
    for rows in (slice(0, 1), slice(3, 5), slice(90, 103), slice(100, 333)):
        assert torch.equal(multiply(linear, x[rows]), together[rows])


def test_gates_and_ups_of_two_types_in_8_bits_are_those_of_the_rounded_row() -> None:
    gate, up = random_tensor("Q4_K", 40, 1), random_tensor("Q6_K", 40, 1)
    _packer, linear = packed([gate, up], interleaved=True, kind=WEIGHT_I8)
    assert (linear.num_parts, linear.group) == (2, 16)
    x = random_rows(133, linear.k)
    together = multiply(linear, x)
    rows, scales = reference.quantize_rows(x, linear.group)
    rounded = (rows * scales[:, :, None]).double().flatten(1)
    want = rounded @ interleave_gate_up(gate.floats(), up.floats()).double().T
    assert torch.allclose(together.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert torch.equal(multiply(linear, x[100:101]), together[100:101])


def test_every_type_is_one_that_gguf_reads_or_has_groups_of_its_own() -> None:
    assert all(hasattr(gguf.GGMLQuantizationType, kind) for kind in set(STORED) - OURS - {"Q2_0"})
    assert set(STORED) > OURS


def test_the_pages_of_a_file_are_given_back_layer_by_layer(
    models: ModuleType, tiny_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.build_native_model("llama", tmp_path, tiny_models.build_tokenizer)
    done: list[str] = []
    tensor, release = SafetensorsWeights.tensor, SafetensorsWeights.release

    def read(self: SafetensorsWeights, name: str) -> StoredTensor:
        done.append(name)
        return tensor(self, name)

    def give_back(self: SafetensorsWeights) -> None:
        done.append("given back")
        release(self)

    monkeypatch.setattr(SafetensorsWeights, "tensor", read)
    monkeypatch.setattr(SafetensorsWeights, "release", give_back)
    model = describe_model(str(tmp_path), dtype="float32")
    assert model is not None
    done.clear()
    native_runner(model, quantize="none", n_threads=1).close()
    assert done[-1] == "given back"
    parts = " ".join(done).split("given back")
    for layer in range(model.config.num_hidden_layers):
        assert [f"layers.{layer}." in part for part in parts].count(True) == 1
        assert not any(f"layers.{layer}." in part and f"layers.{layer + 1}." in part for part in parts)
