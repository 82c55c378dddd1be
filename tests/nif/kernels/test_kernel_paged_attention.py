"""Paged attention against its plain-torch twin."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels import reference
from genbatch.nif.kernels.attention_tiles import choose_num_splits, tile_shape
from genbatch.nif.kernels.paged_attention import paged_attention

# Shrinking a failure under the interpreter takes minutes and hardly helps.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor

    def tensors(self):
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.query_starts,
            self.kv_lens,
        )


def make_case(lengths, *, kv_heads, group, head_size, block_size, dtype, device, seed=0, num_blocks=11):
    """`lengths` are (query length, positions held) pairs; blocks are drawn at random, shared ones included."""
    generator = torch.Generator().manual_seed(seed)
    width = max(1, *(-(-kv_len // block_size) for _, kv_len in lengths))
    shape = (num_blocks, kv_heads, block_size, head_size)
    query_lens = torch.tensor([0] + [query_len for query_len, _ in lengths])
    total = int(query_lens.sum())
    return Case(
        query=torch.randn((total, kv_heads * group, head_size), generator=generator).to(device, dtype),
        key_cache=torch.randn(shape, generator=generator).to(device, dtype),
        value_cache=torch.randn(shape, generator=generator).to(device, dtype),
        block_table=torch.randint(num_blocks, (len(lengths), width), generator=generator, dtype=torch.int32).to(device),
        query_starts=query_lens.cumsum(0).int().to(device),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32, device=device),
    )


def check(case, *, max_query_len, num_splits=1, **options):
    expected = reference.paged_attention(*case.tensors(), **options)
    actual = paged_attention(*case.tensors(), max_query_len=max_query_len, num_splits=num_splits, **options)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@st.composite
def chunks(draw):
    query_len = draw(st.integers(1, 9))
    return query_len, query_len + draw(st.integers(0, 40))


heads = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 2, 3, 5, 8]),
        "head_size": st.sampled_from([16, 24, 64]),
        "block_size": st.sampled_from([4, 5, 16]),
        "dtype": st.sampled_from([torch.float32, torch.float16]),
        "seed": st.integers(0, 2**16),
    }
)
scores = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([0.125, 0.3]),
        "window": st.sampled_from([None, 1, 3, 17]),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
    }
)


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(st.lists(st.one_of(chunks(), st.just((1, 0))), min_size=1, max_size=4), heads, scores, st.booleans())
def test_chunks_decodes_and_padding_in_one_launch_equal_the_twin(device, lengths, heads, scores, with_sinks):
    case = make_case(lengths, device=device, **heads)
    sinks = torch.linspace(-2.0, 2.0, case.query.shape[1], device=device) if with_sinks else None
    check(case, max_query_len=max(n for n, _ in lengths), sinks=sinks, **scores)


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=3), heads, scores, st.sampled_from([2, 4]))
def test_split_decodes_equal_the_twin(device, kv_lens, heads, scores, num_splits):
    case = make_case([(1, kv_len) for kv_len in kv_lens], device=device, **heads)
    check(case, max_query_len=1, num_splits=num_splits, **scores)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_every_head_size_is_served(device, head_size):
    case = make_case(
        [(1, 20), (7, 19), (1, 70)],
        kv_heads=1,
        group=4,
        head_size=head_size,
        block_size=16,
        dtype=torch.float16,
        device=device,
    )
    check(case, max_query_len=7, scale=head_size**-0.5)


def test_a_chunk_longer_than_a_tile_sees_all_earlier_positions(device):
    case = make_case(
        [(70, 90), (1, 3)], kv_heads=1, group=2, head_size=16, block_size=4, dtype=torch.float16, device=device
    )
    check(case, max_query_len=70, scale=0.25)
    check(case, max_query_len=70, scale=0.25, window=9)


def test_a_padding_row_yields_zeros(device):
    case = make_case(
        [(1, 5), (1, 0)], kv_heads=1, group=2, head_size=16, block_size=4, dtype=torch.float32, device=device
    )
    for num_splits in (1, 2):
        out = paged_attention(*case.tensors(), scale=1.0, max_query_len=1, num_splits=num_splits)
        assert out[1].eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_an_id_outside_the_pool_is_not_read(device, bad, num_splits):
    case = make_case([(1, 10)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float32, device=device)
    hidden = Case(*(tensor.clone() for tensor in case.tensors()))
    case.block_table[0, 0] = bad
    out = paged_attention(*case.tensors(), scale=1.0, max_query_len=1, num_splits=num_splits)
    # What is left are the positions of the other blocks: a window that ends where the bad block begins.
    expected = reference.paged_attention(*hidden.tensors(), scale=1.0, window=6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_table_shorter_than_the_length_is_not_overrun(device, num_splits):
    case = make_case(
        [(1, 8), (1, 8)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float32, device=device
    )
    expected = reference.paged_attention(*case.tensors(), scale=1.0)
    case.kv_lens[0] = 16  # what follows its two entries are the other row's
    out = paged_attention(*case.tensors(), scale=1.0, max_query_len=1, num_splits=num_splits)
    if num_splits == 1:  # the query lies past the table and sees all of it
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_offsets_beyond_2_to_the_31_elements_do_not_wrap(device, num_splits):
    stride = 2**30  # itself an int32, unlike twice as much
    pool = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)  # the pages between stay untouched
    cache = pool.as_strided((3, 1, 4, 16), (stride, 64, 16, 1))
    cache[2] = torch.arange(64.0).view(1, 4, 16) / 64
    case = make_case([(1, 4)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float16, device=device)
    case.key_cache = case.value_cache = cache
    case.block_table = torch.tensor([[2]], dtype=torch.int32, device=device)
    check(case, max_query_len=1, num_splits=num_splits, scale=1.0)


def test_tiles_hold_the_whole_group():
    for group in (1, 3, 8, 16, 71):
        for decode in (True, False):
            rows, keys, _, _ = tile_shape(group, 128, 2, decode=decode)
            assert rows >= group
            assert rows & (rows - 1) == keys & (keys - 1) == 0


@given(st.integers(0, 300), st.integers(1, 16), st.integers(0, 10**6), st.integers(1, 200))
def test_the_number_of_splits_is_a_power_of_two_that_the_keys_can_fill(rows, kv_heads, max_kv_len, processors):
    splits = choose_num_splits(rows, kv_heads, max_kv_len, processors)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= max(1, max_kv_len // 128)
    assert splits == 1 or splits * rows * kv_heads <= 2 * processors or rows == 0
