"""Paged attention against its plain-torch twin."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels import paged_attention as paged_attention_module
from genbatch.nif.kernels.attend_keys import SHARE, max_shares, num_shares, programs_per_processor, tile_shape
from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention, plan_shares
from tests.nif.kernels import reference

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


WHOLE, SHARED = 256, 32  # keys a share: above every length here, and below many


def attend(case, *, share=WHOLE, in_order=False, processors=1, **options):
    query_lens = case.query_starts.diff().tolist()
    setting = AttentionSetting(num_processors=processors, share=share, in_order=in_order)
    longest = case.block_table.shape[1] * case.key_cache.shape[2]
    plan = plan_shares(
        case.query_starts, case.kv_lens, setting, max_kv_len=max(1, longest), window=options.get("window")
    )
    return paged_attention(*case.tensors(), plan, max_query_len=max(query_lens), **options)


def check(case, *, share=WHOLE, in_order=False, **options):
    expected = reference.paged_attention(*case.tensors(), **options)
    actual = attend(case, share=share, in_order=in_order, **options)
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
        "block_size": st.sampled_from([4, 5, 16, 128]),  # shares of a tile, none, a tile, wider than any
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


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(st.lists(st.one_of(chunks(), st.just((1, 0))), min_size=1, max_size=4), heads, scores, st.booleans())
def test_chunks_decodes_and_padding_together_equal_the_twin(device, lengths, heads, scores, with_sinks):
    case = make_case(lengths, device=device, **heads)
    sinks = torch.linspace(-2.0, 2.0, case.query.shape[1], device=device) if with_sinks else None
    check(case, share=SHARED, sinks=sinks, **scores)


@settings(max_examples=15, deadline=None, phases=PHASES)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=3), heads, scores, st.booleans(), st.booleans())
def test_decodes_in_shares_equal_the_twin(device, kv_lens, heads, scores, with_sinks, in_order):
    case = make_case([(1, kv_len) for kv_len in kv_lens], device=device, **heads)
    sinks = torch.linspace(-2.0, 2.0, case.query.shape[1], device=device) if with_sinks else None
    check(case, share=SHARED, in_order=in_order, sinks=sinks, **scores)


@settings(max_examples=6, deadline=None, phases=PHASES)
@given(st.lists(st.one_of(chunks(), st.just((1, 70))), min_size=1, max_size=3), heads, scores, st.booleans())
def test_a_cache_in_fp8_equals_the_twin_over_the_same_numbers(device, lengths, heads, scores, in_order):
    case = make_case(lengths, device=device, **heads)
    caches = (case.key_cache.to(torch.float8_e4m3fn), case.value_cache.to(torch.float8_e4m3fn))
    case = dataclasses.replace(case, key_cache=caches[0], value_cache=caches[1])
    check(case, share=SHARED, in_order=in_order, **scores)


def test_one_long_sequence_among_short_ones_in_a_mixed_step_equals_the_twin(device):
    case = make_case(
        [(1, 700), (9, 30), (1, 2), (1, 0), (1, 33)],
        kv_heads=2,
        group=2,
        head_size=16,
        block_size=16,
        dtype=torch.float32,
        device=device,
    )
    check(case, share=SHARED, scale=0.25)
    check(case, share=SHARED, scale=0.25, window=40)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 999)), min_size=1, max_size=9),
    st.sampled_from([None, 1, 8, 20, 400]),
    st.sampled_from([8, 16]),
)
def test_the_plan_lists_every_share_of_every_decode_once(device, entries, window, share):
    starts = torch.tensor([0] + [n for n, _ in entries]).cumsum(0).int().to(device)
    kv_lens = torch.tensor([n - 1 + held for n, held in entries], dtype=torch.int32, device=device)
    setting = AttentionSetting(num_processors=1, share=share)
    plan = plan_shares(starts, kv_lens, setting, max_kv_len=1000, window=window)
    owners, firsts = reference.plan_shares(starts, kv_lens, max_kv_len=1000, share=share, window=window)
    assert plan.firsts.tolist() == firsts
    assert plan.owners[: len(owners)].tolist() == owners
    assert len(owners) <= len(plan.owners) == max_shares(len(entries), 1000, share)


def test_a_plan_of_more_sequences_than_are_looked_at_together(device, monkeypatch):
    monkeypatch.setattr(paged_attention_module, "_PLAN_CHUNK", 4)
    starts = torch.arange(12, dtype=torch.int32, device=device)
    kv_lens = torch.arange(0, 110, 10, dtype=torch.int32, device=device)
    plan = plan_shares(starts, kv_lens, AttentionSetting(num_processors=1, share=16), max_kv_len=112)
    owners, firsts = reference.plan_shares(starts, kv_lens, max_kv_len=112, share=16)
    assert plan.firsts.tolist() == firsts
    assert plan.owners[: len(owners)].tolist() == owners


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(st.integers(1, 90), st.integers(0, 60), st.sampled_from([None, 33]), st.integers(0, 2**16))
def test_in_order_a_token_is_the_same_to_the_bit_in_a_chunk_alone_and_among_others(
    device, exact_interpreter, held, more, window, seed
):
    """The last position of a sequence: as a decode, and as the last of a chunk of several tokens, beside another."""
    whole = {"kv_heads": 1, "group": 2, "head_size": 16, "block_size": 16, "dtype": torch.float32, "device": device}
    chunk = min(held, 5)
    case = make_case([(chunk, held), (1, 3 + more)], seed=seed, **whole)
    alone = Case(
        case.query[chunk - 1 : chunk],
        case.key_cache,
        case.value_cache,
        case.block_table[:1],
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        case.kv_lens[:1],
    )
    options = {"scale": 0.25, "share": SHARED, "in_order": True, "window": window}
    together = attend(case, processors=2, **options)
    assert together[chunk - 1].equal(attend(alone, **options)[0])


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
    check(case, share=SHARED, scale=head_size**-0.5)


def test_a_chunk_longer_than_a_tile_sees_all_earlier_positions(device):
    case = make_case(
        [(70, 90), (1, 3)], kv_heads=1, group=2, head_size=16, block_size=4, dtype=torch.float16, device=device
    )
    for in_order in (False, True):
        check(case, share=SHARED, in_order=in_order, scale=0.25)
        check(case, share=SHARED, in_order=in_order, scale=0.25, window=9)


def test_a_chunk_behind_many_keys_compares_positions_at_its_edge_only(device):
    """Tiles of 16 keys: nine that all rows of a tile see, and two that some do not."""
    case = make_case(
        [(20, 170), (3, 33)], kv_heads=2, group=2, head_size=16, block_size=4, dtype=torch.float32, device=device
    )
    check(case, scale=0.25)
    check(case, scale=0.25, softcap=3.0)
    # An id outside the pool is not read there either: its block counts for nothing.
    damaged = dataclasses.replace(case, block_table=case.block_table.clone())
    damaged.block_table[0, 3] = 2**31 - 1
    expected = reference.paged_attention(*without_block(case, 0, 3).tensors(), scale=0.25)
    torch.testing.assert_close(attend(damaged, scale=0.25)[:20], expected[:20], rtol=2e-5, atol=2e-5)


def without_block(case, sequence, column):
    """The case without a block that lies before all of a sequence's queries."""
    table, kv_lens = case.block_table.clone(), case.kv_lens.clone()
    table[sequence, column:-1] = case.block_table[sequence, column + 1 :]
    kv_lens[sequence] -= case.key_cache.shape[2]
    return dataclasses.replace(case, block_table=table, kv_lens=kv_lens)


@triton.jit
def _places_kernel(out_ptr, KV_HEADS: tl.constexpr):
    tile, kv_head = paged_attention_module.place_of_chunk(KV_HEADS)
    tl.store(out_ptr + tl.program_id(0) * 2, tile)
    tl.store(out_ptr + tl.program_id(0) * 2 + 1, kv_head)


def test_the_tile_with_the_most_keys_of_a_prompt_comes_first(device):
    """Programs start in order, and a step is over when the last one ends."""
    out = torch.full((6, 2), -1, dtype=torch.int32, device=device)
    _places_kernel[(6,)](out, KV_HEADS=2)
    assert out.tolist() == [[2, 0], [2, 1], [1, 0], [1, 1], [0, 0], [0, 1]]


def test_a_padding_row_yields_zeros(device):
    case = make_case(
        [(1, 5), (1, 0)], kv_heads=1, group=2, head_size=16, block_size=4, dtype=torch.float32, device=device
    )
    for share in (4, WHOLE):
        assert attend(case, scale=1.0, share=max(16, share))[1].eq(0).all()


@pytest.mark.parametrize("share", [16, WHOLE])
@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_an_id_outside_the_pool_is_not_read(device, bad, share):
    case = make_case([(1, 10)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float32, device=device)
    hidden = Case(*(tensor.clone() for tensor in case.tensors()))
    case.block_table[0, 0] = bad
    out = attend(case, scale=1.0, share=share)
    # What is left are the positions of the other blocks: a window that ends where the bad block begins.
    expected = reference.paged_attention(*hidden.tensors(), scale=1.0, window=6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [16, WHOLE])
def test_a_table_shorter_than_the_length_is_not_overrun(device, share):
    case = make_case(
        [(1, 8), (1, 8)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float32, device=device
    )
    expected = reference.paged_attention(*case.tensors(), scale=1.0)
    case.kv_lens[0] = 16  # what follows its two entries are the other row's
    out = attend(case, scale=1.0, share=share)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("share", [16, WHOLE])
def test_offsets_beyond_2_to_the_31_elements_do_not_wrap(device, share):
    stride = 2**30  # itself an int32, unlike twice as much
    pool = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)  # the pages between stay untouched
    cache = pool.as_strided((3, 1, 4, 16), (stride, 64, 16, 1))
    cache[2] = torch.arange(64.0).view(1, 4, 16) / 64
    case = make_case([(1, 4)], kv_heads=1, group=1, head_size=16, block_size=4, dtype=torch.float16, device=device)
    case.key_cache = case.value_cache = cache
    case.block_table = torch.tensor([[2]], dtype=torch.int32, device=device)
    check(case, share=share, scale=1.0)


def test_tiles_hold_the_whole_group():
    for group in (1, 3, 8, 16, 71):
        for decode in (True, False):
            tile = tile_shape(group, 128, 2, decode=decode)
            assert tile.rows >= group
            assert tile.rows & (tile.rows - 1) == tile.keys & (tile.keys - 1) == 0


def test_chunks_in_order_have_the_decodes_tile_so_that_they_round_alike():
    for head_size in (16, 64, 128, 256):
        decode = tile_shape(4, head_size, 2, decode=True)
        chunk = tile_shape(4, head_size, 2, decode=False, in_order=True)
        assert (chunk.rows, chunk.keys, chunk.num_warps) == (decode.rows, decode.keys, decode.num_warps)


@given(st.integers(0, 2**20), st.sampled_from([16, SHARE]))
def test_the_number_of_shares_is_the_twins(length, share):
    assert num_shares(length, share) == len(reference.share_ends(length, share))


@pytest.mark.parametrize(
    ("length", "shares"), [(0, 1), (256, 1), (257, 2), (2048, 8), (8192, 32), (16_384, 48), (32_768, 64), (131_072, 96)]
)
def test_a_short_sequence_has_as_many_shares_as_it_can_use_and_a_long_one_has_few(length, shares):
    """Whatever the longest possible sequence is: 131,072 positions gave a sequence of 2,048 one share a KV head."""
    assert num_shares(length, SHARE) == shares


def test_shares_are_whole_tiles():
    assert all(SHARE % tile_shape(4, head, size, decode=True).keys == 0 for head in (64, 256) for size in (2, 4))


@pytest.mark.parametrize(
    ("head_size", "shared_kib", "programs"),
    [(128, 228, 3), (128, 164, 3), (128, 100, 2), (96, 228, 3), (64, 228, 4), (64, 100, 4), (256, 228, 3)],
)
def test_as_many_programs_are_launched_as_run_at_a_time(head_size, shared_kib, programs):
    tile = tile_shape(4, head_size, 2, decode=True)
    assert programs_per_processor(tile, head_size, 2, shared_kib * 1024) == programs


@pytest.mark.parametrize("in_order", [False, True])
def test_shares_of_all_sizes_are_joined(device, in_order):
    """Lengths on both sides of every cut, up to shares of eight times the size."""
    lengths = [(1, n) for n in (511, 512, 513, 1024, 1025, 2049, 4100)]
    case = make_case(lengths, kv_heads=1, group=2, head_size=16, block_size=16, dtype=torch.float32, device=device)
    check(case, share=16, in_order=in_order, scale=0.25)
    check(case, share=16, in_order=in_order, scale=0.25, window=700)


def test_a_chunk_over_shares_of_several_sizes_rounds_as_its_tokens_do_alone(device):
    case = make_case([(9, 1030)], kv_heads=1, group=2, head_size=16, block_size=16, dtype=torch.float32, device=device)
    together = attend(case, share=16, in_order=True, scale=0.25)
    for token in range(9):
        alone = dataclasses.replace(
            case,
            query=case.query[token : token + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([1022 + token], dtype=torch.int32, device=device),
        )
        assert torch.equal(attend(alone, share=16, in_order=True, scale=0.25)[0], together[token])
