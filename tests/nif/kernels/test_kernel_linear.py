"""Our own products, with whole and with packed weights, against plain torch; what a packed weight keeps of a weight."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels.linear import HeadShape, Residual, Rotation, TileLinear, linear_tiles
from genbatch.nif.kernels.packed_linear import num_splits, packed_linear, packed_tile
from genbatch.nif.kernels.packed_weight import GROUP, KINDS, from_groups, pack, unpack, unpacked
from tests.nif.kernels import reference

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
kinds = st.sampled_from(KINDS)
# Triton's interpreter computes bfloat16 wrongly.
dtypes = st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])])


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def products_of(kind: str, rows: int, dtype: torch.dtype) -> TileLinear:
    return TileLinear(linear_tiles(rows, dtype, 128, bits={"none": 0, "int4": 4}.get(kind, 8)))


def residual_of(hidden: torch.Tensor, products: TileLinear) -> Residual:
    """The squares in as many parts as the products want."""
    columns = products.tiles.added.columns
    parts = torch.nn.functional.pad(hidden.float().square(), (0, -hidden.shape[1] % columns))
    return Residual(hidden.clone(), parts.view(len(hidden), -1, columns).sum(2), EPS)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(kinds, dtypes, st.sampled_from([1, 5, 18]), st.sampled_from([24, 96, 200]), st.integers(0, 2**16))
def test_a_product_adds_to_the_residual_and_its_squares(
    device: Any, kind: str, dtype: torch.dtype, rows: int, inputs: int, seed: int
) -> None:
    products = products_of(kind, rows, dtype)
    x = random(rows, inputs, seed=seed, device=device, dtype=dtype)
    bias = random(40, seed=seed + 2, device=device, dtype=dtype)
    weight = pack(random(40, inputs, seed=seed + 1, device=device, dtype=dtype) / inputs**0.5, bias, kind)
    residual = residual_of(random(rows, 40, seed=seed + 3, device=device, dtype=dtype), products)
    expected = residual.hidden.float() + (x.float() @ unpack(weight).T + bias.float()).to(dtype).float()
    products.add_to(residual, x, weight)
    assert_close(residual.hidden, expected)
    torch.testing.assert_close(residual.sums.sum(1), residual.hidden.float().square().sum(1), rtol=1e-5, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(kinds, dtypes, st.sampled_from([1, 3, 17]), st.integers(0, 2**16))
def test_a_norm_before_and_a_gate_behind_equal_their_twins(
    device: Any, kind: str, dtype: torch.dtype, rows: int, seed: int
) -> None:
    products = products_of(kind, rows, dtype)
    residual = residual_of(random(rows, 72, seed=seed, device=device, dtype=dtype), products)
    norm = random(72, seed=seed + 1, device=device, dtype=dtype)
    weight = pack(random(2 * 50, 72, seed=seed + 2, device=device, dtype=dtype) / 9, None, kind)
    hidden = reference.add_rms_norm(residual.hidden.clone(), None, norm, EPS)
    expected = reference.silu_mul((hidden.float() @ unpack(weight).T).to(dtype))
    assert_close(products.gated(residual, norm, weight), expected)
    head = pack(random(61, 72, seed=seed + 3, device=device, dtype=dtype) / 9, None, "none")
    out = torch.full((rows, 61), 7.0, device=device)
    products.logits(residual, norm, head, out)
    torch.testing.assert_close(out, (hidden.float() @ head.data.float().T), rtol=1e-2, atol=1e-2)


@settings(max_examples=10, deadline=None)
@given(kinds, dtypes, st.sampled_from([8, 24, 64]), st.sampled_from([1, 4]), st.booleans(), st.integers(0, 2**16))
def test_heads_are_rotated_and_written_as_their_twin_does(
    device: Any, kind: str, dtype: torch.dtype, head_size: int, kv_heads: int, normalised: bool, seed: int
) -> None:
    rows, heads, block_size, width = 3, 4, 4, 40
    products = products_of(kind, rows, dtype)
    if not normalised:  # a head's product in parts
        products = TileLinear(replace(products.tiles, heads=replace(products.tiles.heads, columns=16)))
    residual = residual_of(random(rows, width, seed=seed, device=device, dtype=dtype), products)
    norm = random(width, seed=seed + 1, device=device, dtype=dtype)
    outputs = (heads + 2 * kv_heads) * head_size
    weight = pack(random(outputs, width, seed=seed + 2, device=device, dtype=dtype) / 6, None, kind)
    angles = random(40, head_size // 2, seed=seed + 3, device=device)
    norms = [random(head_size, seed=seed + n, device=device, dtype=dtype) if normalised else None for n in (4, 5)]
    slots = torch.tensor([6, -1, 21], device=device)  # one row is padding
    positions = torch.tensor([0, 17, 39], device=device)
    caches = [
        [torch.full((6, kv_heads, block_size, head_size), 7.0, dtype=dtype, device=device) for _ in range(2)]
        for _ in range(2)
    ]
    rotation = Rotation(*caches[0], slots, positions, angles.cos(), angles.sin())
    shape = HeadShape(heads, kv_heads, head_size, norms[0], norms[1])
    query = products.heads(residual, norm, weight, shape, rotation)
    hidden = reference.add_rms_norm(residual.hidden.clone(), None, norm, EPS)
    expected = reference.rope_and_write(
        (hidden.float() @ unpack(weight).T).to(dtype),
        *caches[1],
        slots,
        positions,
        angles.cos(),
        angles.sin(),
        num_heads=heads,
        query_norm=norms[0],
        key_norm=norms[1],
        eps=EPS,
    )
    for actual, twin in zip((query, *caches[0]), (expected, *caches[1]), strict=True):
        assert_close(actual, twin)


def test_rows_begin_with_what_is_given_or_was_drawn(device: Any) -> None:
    table = random(9, 20, seed=1, device=device)
    given_ids, drawn = torch.tensor([3, -5, -3, 8], device=device), torch.tensor([1, 5, -1, 2, 4], device=device)
    residual = TileLinear(linear_tiles(4, torch.float32, 128)).embed(table, given_ids, drawn, EPS)
    assert residual.hidden.equal(table[[3, 4, 0, 8]])
    torch.testing.assert_close(residual.sums.sum(1), residual.hidden.square().sum(1))


@pytest.mark.parametrize(("kind", "most"), [("none", 0.0), ("int8", 0.005), ("fp8", 0.04), ("int4", 0.07)])
@pytest.mark.parametrize("inputs", [64, 130])
def test_a_packed_weight_is_near_the_weight_it_was_made_of(kind: str, most: float, inputs: int) -> None:
    weight = random(50, inputs, seed=3, device=torch.device("cpu"))
    weight[7] = 0.0
    packed = pack(weight, None, kind)
    error = (unpack(packed) - weight).abs().amax(1) / weight.abs().amax(1).clamp_min(1e-9)
    assert float(error.max()) <= most
    assert unpack(packed)[7].eq(0).all()
    assert packed.num_inputs == inputs
    assert packed.num_outputs == 50


def test_groups_that_are_quantised_already_are_taken_as_they_are() -> None:
    """As a GPTQ or AWQ checkpoint has them."""
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(16, (5, 4, GROUP), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(16, (5, 4), generator=generator, dtype=torch.uint8)
    scales = torch.rand((5, 4), generator=generator).half().float()
    packed = from_groups(nibbles, scales, zeros, 4 * GROUP, None)
    expected = (nibbles.float() - zeros[..., None].float()) * scales[..., None]
    assert unpack(packed).equal(expected.flatten(1))


def test_4_bits_are_a_quarter_of_what_16_are() -> None:
    weight = torch.zeros((256, 4096), dtype=torch.bfloat16)
    assert pack(weight, None, "int4").nbytes < 0.33 * weight.nbytes
    assert pack(weight, None, "int8").nbytes < 0.51 * weight.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [24, 192, 1100])
def test_weights_that_are_unpacked_for_the_library_are_the_twins(device: Any, kind: str, inputs: int) -> None:
    weight = pack(random(5, inputs, seed=1, device=device), None, kind)
    assert unpacked(weight, torch.float32).equal(unpack(weight))
    assert unpacked(weight, torch.float16).equal(unpack(weight).half()) or kind == "none"


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(("int8", "fp8", "int4")),
    dtypes,
    st.sampled_from([1, 16, 17, 40, 70, 130]),
    st.sampled_from([(70, 192), (130, 520), (64, 1100)]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_products_of_packed_weights_and_many_rows_equal_their_twin(
    device: Any, kind: str, dtype: torch.dtype, rows: int, shape: tuple[int, int], biased: bool, seed: int
) -> None:
    """Few outputs make splits of the inputs, the last of which may have none."""
    outputs, inputs = shape
    bias = random(outputs, seed=seed + 2, device=device, dtype=dtype) if biased else None
    weight = pack(random(outputs, inputs, seed=seed + 1, device=device, dtype=dtype) / inputs**0.5, bias, kind)
    x = random(rows, 2 * inputs, seed=seed, device=device, dtype=dtype)[:, :inputs]  # rows lie further apart
    expected = x.float() @ unpack(weight).T + (0.0 if bias is None else bias.float())
    for num_processors in (1, 132):
        assert_close(packed_linear(x, weight, num_processors, 228 * 1024), expected)


@pytest.mark.parametrize(("rows", "outputs", "splits"), [(64, 4096, 4), (64, 28672, 1), (128, 4096, 4), (1, 64, 8)])
def test_few_programs_split_the_inputs(rows: int, outputs: int, splits: int) -> None:
    tile = packed_tile(rows, 4, 228 * 1024)
    assert num_splits(-(-outputs // tile.outputs) * -(-rows // tile.rows), tile, 132) == splits
