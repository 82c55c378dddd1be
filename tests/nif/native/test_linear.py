"""The C linears and their packing against their twins in torch."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.models.weight_source import StoredTensor
from genbatch.nif.native import weights
from genbatch.nif.native.library import (
    COLUMNS,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    WEIGHT_U4,
    Linear,
    native_library,
)
from genbatch.nif.native.weights import WeightPacker, interleave_gate_up
from tests.nif.native import reference

KINDS = {"float32": WEIGHT_F32, "bfloat16": WEIGHT_BF16, "int8": WEIGHT_I8, "4-bit grid": WEIGHT_U4}
GROUP = 64


def random_matrix(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def grid_matrix(n: int, k: int) -> torch.Tensor:
    """Weights that Q4_1 holds without loss: both ends of every group's grid are taken."""
    draw = torch.Generator().manual_seed(1)
    nibbles = torch.randint(16, (n, k // 32, 32), generator=draw)
    nibbles[:, :, 3], nibbles[:, :, 17] = 0, 15
    steps = (torch.rand(n, k // 32, 1, generator=draw) * 0.02 + 0.001).half().float()
    offsets = (torch.randn(n, k // 32, 1, generator=draw) * 0.05).half().float()
    return (nibbles * steps + offsets).flatten(1)


def matrix_of(kind: str, n: int, k: int) -> torch.Tensor:
    return grid_matrix(n, k) if kind == "4-bit grid" else random_matrix(n, k)


def packed(kind: str, matrix: torch.Tensor, n_threads: int = 2) -> tuple[WeightPacker, Linear]:
    """The packer must outlive the linear."""
    packer = WeightPacker(native_library(), n_threads)
    asked = WEIGHT_I8 if kind == "4-bit grid" else KINDS[kind]
    linear = packer.pack(asked, matrix, GROUP)
    assert linear.kind == KINDS[kind]
    return packer, linear


def content(linear: Linear, size: int) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * size).from_address(linear.weights)
    return torch.frombuffer(buffer, dtype=torch.uint8).clone()


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), linear.n), torch.nan)
    x = x.contiguous()
    status = native_library().linear_probe(ctypes.byref(linear), x.data_ptr(), len(x), x.shape[1], out.data_ptr())
    assert status == 0
    return out


def expected(kind: str, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if kind == "int8":
        return reference.linear_i8(x, matrix, GROUP)
    if kind == "4-bit grid":
        grid = reference.find_u4_grid(matrix, 1e-5)
        assert grid is not None
        return reference.linear_u4(x, *grid)
    weights = matrix.bfloat16() if kind == "bfloat16" else matrix
    if kind == "bfloat16" and native_library().gemm_bf16_rows_kind() == WEIGHT_BF16:
        x = x.bfloat16()  # where the CPU multiplies pairs of bfloat16, the rows are rounded, too
    return x.double() @ weights.double().T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (70, 96), (33, 1600)])
def test_packing_gives_the_bytes_of_its_twin(kind: str, n: int, k: int) -> None:
    matrix = matrix_of(kind, n, k)
    twin = {
        "float32": lambda: reference.pack_f32(matrix),
        "bfloat16": lambda: reference.pack_bf16(matrix),
        "int8": lambda: reference.pack_i8(matrix, GROUP),
        "4-bit grid": lambda: reference.pack_u4(*(reference.find_u4_grid(matrix, 1e-5) or ())),
    }[kind]()
    _packer, linear = packed(kind, matrix, n_threads=3)
    assert torch.equal(content(linear, len(twin)), twin)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (70, 96), (33, 1600)])
@pytest.mark.parametrize("count", [1, 5, 12, 13, 40])
def test_a_linear_multiplies_like_its_twin(kind: str, n: int, k: int, count: int) -> None:
    matrix, x = matrix_of(kind, n, k), random_matrix(count, k, seed=2)
    _packer, linear = packed(kind, matrix)
    want = expected(kind, x, matrix)
    assert torch.allclose(multiply(linear, x).double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_an_odd_number_of_inputs_is_padded(kind: str) -> None:
    matrix, x = random_matrix(40, 77), random_matrix(3, 77, seed=2)
    _packer, linear = packed(kind, matrix)
    assert torch.allclose(multiply(linear, x).double(), expected(kind, x, matrix), atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 60), row=st.integers(0, 59), seed=st.integers(0, 99))
def test_a_row_is_the_same_to_the_bit_in_every_company(kind: str, count: int, row: int, seed: int) -> None:
    row %= count
    matrix, x = matrix_of(kind, 64, 448), random_matrix(count, 448, seed)
    _packer, linear = packed(kind, matrix)
    assert torch.equal(multiply(linear, x)[row], multiply(linear, x[row : row + 1])[0])


@pytest.mark.parametrize("kind", ["int8", "4-bit grid"])
def test_an_outlier_costs_precision_to_its_own_group_and_row_alone(kind: str) -> None:
    matrix, x = matrix_of(kind, 64, 256), random_matrix(4, 256, seed=3)
    _packer, linear = packed(kind, matrix)
    calm = multiply(linear, x)
    x[2, 5] = 1e4
    assert torch.equal(multiply(linear, x)[[0, 1, 3]], calm[[0, 1, 3]])
    x[2, 5], matrix[:, 5] = 1e4, 0  # the outlier itself contributes nothing: what is left is the damage
    if kind == "int8":
        _packer, linear = packed(kind, matrix)
        exact = x.double() @ matrix.double().T
        outside = x.double()[:, GROUP:] @ matrix.double()[:, GROUP:].T
        error, group = multiply(linear, x)[2].double() - exact[2], exact[2] - outside[2]
        assert float(error.norm()) < 1.2 * float(group.norm())


@pytest.mark.parametrize("kind", ["int8", "4-bit grid"])
def test_rows_of_zeros_and_of_the_smallest_numbers_give_zeros(kind: str) -> None:
    _packer, linear = packed(kind, matrix_of(kind, 32, 64))
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-42), torch.full((64,), -1e-39)])
    assert torch.equal(multiply(linear, x), torch.zeros(3, 32))


def test_weights_off_the_grid_by_more_than_rounding_take_8_bits() -> None:
    matrix = grid_matrix(32, 64)
    matrix[7, 40] += 0.002
    packer = WeightPacker(native_library(), 1)
    assert packer.pack(WEIGHT_I8, matrix, GROUP).kind == WEIGHT_I8


def test_a_grid_is_found_behind_bfloat16_too() -> None:
    matrix = grid_matrix(64, 96).bfloat16()
    packer = WeightPacker(native_library(), 1)
    assert packer.pack(WEIGHT_I8, matrix, GROUP).kind == WEIGHT_U4


def test_gates_and_ups_share_their_blocks() -> None:
    gate, up = torch.arange(20.0)[:, None], torch.arange(100.0, 120.0)[:, None]
    mixed = interleave_gate_up(gate, up)[:, 0]
    half = COLUMNS // 2
    assert torch.equal(mixed[:half], gate[:half, 0]) and torch.equal(mixed[half:COLUMNS], up[:half, 0])
    assert torch.equal(mixed[COLUMNS : COLUMNS + 4], gate[half:, 0]) and not mixed[COLUMNS + 4 : -half].any()


@pytest.mark.parametrize("kind", KINDS)
def test_packing_a_stretch_after_another_gives_the_same_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of(kind, 150, 96)
    _whole, at_once = packed(kind, matrix)
    monkeypatch.setattr(weights, "_FLOATS_AT_ONCE", 2 * COLUMNS * 96)
    _stretches, linear = packed(kind, matrix)
    size = 160 * 96 * (4 if kind == "float32" else 1) // (2 if kind == "4-bit grid" else 1)
    assert torch.equal(content(linear, size), content(at_once, size))


@pytest.mark.parametrize("interleaved", [False, True])
def test_merged_matrices_are_made_a_stretch_after_another(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_FLOATS_AT_ONCE", COLUMNS * 40)
    matrices = [random_matrix(41, 40, seed) for seed in (1, 2)] + [random_matrix(70, 40, 3)] * (not interleaved)
    stored = [StoredTensor("w", "F32", (len(m), 40), m.view(torch.uint8).numpy()) for m in matrices]
    packer = WeightPacker(native_library(), 2)
    linear = packer.linear(WEIGHT_BF16, stored, interleaved=interleaved)
    merged = interleave_gate_up(*matrices) if interleaved else torch.cat(matrices)
    twin = reference.pack_bf16(merged)
    assert linear.n == len(merged)
    assert torch.equal(content(linear, len(twin)), twin)


def test_a_matrix_is_off_the_grid_wherever_its_last_weight_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_FLOATS_AT_ONCE", COLUMNS * 64)
    matrix = grid_matrix(96, 64)
    matrix[95, 63] += 0.002
    packer = WeightPacker(native_library(), 1)
    linear = packer.pack(WEIGHT_I8, matrix, GROUP)
    assert linear.kind == WEIGHT_I8
    twin = reference.pack_i8(matrix, GROUP)
    assert torch.equal(content(linear, len(twin)), twin)


def values_of(linear: Linear) -> torch.Tensor:
    """The weights: rows of one number that 8 bits hold exactly."""
    return multiply(linear, torch.eye(linear.k) * (127 / 128)).T * (128 / 127)


def rounded_from_end_to_end(matrix: torch.Tensor) -> torch.Tensor:
    """4-bit weights as a quantiser makes them that searches nothing."""
    groups = matrix.reshape(len(matrix), -1, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = ((high - low) / 15).half().float()
    return (((groups - low.half()) / step).round().clamp(0, 15) * step + low.half()).flatten(1)


@pytest.mark.parametrize("shape", [(96, 128), (33, 32), (5, 416)])
def test_4_bits_are_nearer_than_rounding_from_end_to_end(shape: tuple[int, int]) -> None:
    matrix = torch.distributions.StudentT(5.0).sample(torch.Size(shape)) * 0.02
    packer = WeightPacker(native_library(), 2)
    linear = packer.pack(WEIGHT_U4, matrix, GROUP)
    assert linear.kind == WEIGHT_U4
    values = values_of(linear)
    error, plain = (values - matrix).square().mean(), (rounded_from_end_to_end(matrix) - matrix).square().mean()
    assert error < 0.9 * plain
    groups = matrix.reshape(shape[0], -1, 32)
    spread = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1)
    assert bool(((values - matrix).abs() <= 0.13 * spread).all())


def test_4_bits_of_weights_on_a_grid_lose_nothing() -> None:
    matrix = grid_matrix(40, 96)
    packer = WeightPacker(native_library(), 1)
    linear = packer.pack(WEIGHT_U4, matrix, GROUP)
    assert linear.kind == WEIGHT_U4 and torch.allclose(values_of(linear), matrix, atol=1e-6)


def test_groups_of_one_value_or_of_the_smallest_numbers_stay_what_they_are() -> None:
    matrix = torch.tensor([0.0, 0.5, -0.25, 1e-38]).repeat_interleave(32)[None].repeat(4, 1)
    packer = WeightPacker(native_library(), 1)
    linear = packer.pack(WEIGHT_U4, matrix, GROUP)
    assert torch.allclose(values_of(linear), matrix, atol=1e-7)


@pytest.mark.parametrize("matrix", [random_matrix(40, 80), random_matrix(8, 64) * 1e5])
def test_what_4_bits_cannot_hold_takes_8(matrix: torch.Tensor) -> None:
    """Inputs that fill no groups, and weights beyond float16."""
    packer = WeightPacker(native_library(), 1)
    assert packer.pack(WEIGHT_U4, matrix, GROUP).kind == WEIGHT_I8
