"""Rotation and cache writes against their plain-torch twins."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels.elementwise import rope_and_write, write_kv
from tests.nif.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}

shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3]),
        "head_size": st.sampled_from([8, 24, 64]),
        "block_size": st.sampled_from([2, 4, 16]),
        "dtype": st.sampled_from([torch.float32, torch.float16]),
        "num_tokens": st.integers(1, 5),
    }
)


def caches(shape, device, num_blocks=6):
    size = (num_blocks, shape["kv_heads"], shape["block_size"], shape["head_size"])
    return [torch.full(size, 7.0, dtype=shape["dtype"], device=device) for _ in range(2)]


def slots(shape, generator, device, num_blocks=6):
    """Distinct slots, the last one skipped."""
    drawn = torch.randperm(num_blocks * shape["block_size"], generator=generator)[: shape["num_tokens"]]
    drawn[-1] = -1
    return drawn.to(device)


@settings(max_examples=20, deadline=None)
@given(shapes, st.booleans(), st.integers(0, 2**16))
def test_rope_and_write_equals_its_twin_and_skips_negative_slots(device, shape, normalised, seed):
    generator = torch.Generator().manual_seed(seed)
    heads, head_size, dtype = shape["kv_heads"] * shape["group"], shape["head_size"], shape["dtype"]
    width = (heads + 2 * shape["kv_heads"]) * head_size
    qkv = torch.randn((shape["num_tokens"], width), generator=generator).to(device, dtype)
    angles = torch.randn((40, head_size // 2), generator=generator).to(device)
    positions = torch.randint(40, (shape["num_tokens"],), generator=generator).to(device)
    norms = {}
    if normalised:
        norms = {
            name: torch.randn(head_size, generator=generator).to(device, dtype) for name in ("query_norm", "key_norm")
        }
    where = slots(shape, generator, device)
    actual, expected = caches(shape, device), caches(shape, device)
    arguments = (where, positions, angles.cos(), angles.sin())
    query = rope_and_write(qkv, *actual, *arguments, num_heads=heads, eps=1e-5, **norms)
    twin = reference.rope_and_write(qkv, *expected, *arguments, num_heads=heads, eps=1e-5, **norms)
    tolerance = TOLERANCE[dtype]
    for left, right in zip((query, *actual), (twin, *expected), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(shapes, st.integers(0, 2**16))
def test_write_kv_takes_strided_heads_and_equals_its_twin(device, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (shape["kv_heads"], shape["num_tokens"], shape["head_size"])
    key, value = (torch.randn(size, generator=generator).to(device, shape["dtype"]).transpose(0, 1) for _ in range(2))
    where = slots(shape, generator, device)
    actual, expected = caches(shape, device), caches(shape, device)
    write_kv(key, value, *actual, where)
    reference.write_kv(key, value, *expected, where)
    for left, right in zip(actual, expected, strict=True):
        assert left.equal(right)


def test_a_slot_past_the_pool_is_not_written(device):
    store = torch.zeros((4, 1, 2, 8), device=device)
    cache = store[:3]  # the fourth block lies behind the pool
    write_kv(
        torch.ones((1, 1, 8), device=device),
        torch.ones((1, 1, 8), device=device),
        cache,
        cache,
        torch.tensor([6], device=device),
    )
    assert store.eq(0).all()


def test_a_cache_in_fp8_gets_every_number_rounded_as_torch_rounds_it(device):
    """Numbers of every size, those in the middle of two codes and their neighbours, infinities and NaN."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = [halves, torch.nextafter(halves, torch.zeros(1)), torch.nextafter(halves, torch.full((1,), 500.0))]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(5000, generator=generator) * torch.rand(5000, generator=generator).mul(26).sub(16).exp2()
    numbers = torch.cat((codes, *near, drawn, torch.tensor([447.9, 448.1, 464.0, 465.0, float("inf"), float("nan")])))
    numbers = torch.cat((numbers, -numbers))
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).reshape(-1, 2, 32).to(device)
    shape = (-(-len(numbers) // 16), 2, 16, 32)
    keys, values = (torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    write_kv(numbers, 2 * numbers, keys, values, torch.arange(len(numbers), device=device))
    for cache, written in ((keys, numbers), (values, 2 * numbers)):
        rounded = written.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        read = cache.float().transpose(1, 2).reshape(-1, 2, 32)[: len(numbers)]
        torch.testing.assert_close(read, rounded, rtol=0, atol=0, equal_nan=True)
        is_zero = rounded == 0
        assert torch.equal(torch.signbit(read[is_zero]), torch.signbit(rounded[is_zero]))


def test_keys_that_are_rotated_on_the_way_into_a_cache_in_fp8_equal_those_of_their_twin_rounded(device):
    shape = {"kv_heads": 2, "head_size": 16, "block_size": 4, "dtype": torch.float32, "num_tokens": 5}
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn((5, (4 + 2 * 2) * 16), generator=generator).to(device)
    angles = torch.randn((40, 8), generator=generator).to(device)
    where, positions = slots(shape, generator, device), torch.arange(5, device=device)
    expected = caches(shape, device)
    actual = [cache.to(torch.float8_e4m3fn) for cache in expected]
    arguments = (where, positions, angles.cos(), angles.sin())
    query = rope_and_write(qkv, *actual, *arguments, num_heads=4)
    twin = reference.rope_and_write(qkv, *expected, *arguments, num_heads=4)
    torch.testing.assert_close(query, twin, rtol=1e-5, atol=1e-5)
    for left, right in zip(actual, expected, strict=True):
        assert (left.float() == right.to(torch.float8_e4m3fn).float()).float().mean() > 0.99  # the rest are near halves
        torch.testing.assert_close(left.float(), right, rtol=1 / 16, atol=2**-9)
