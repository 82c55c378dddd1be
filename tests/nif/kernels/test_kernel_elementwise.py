"""RMSNorm, SiLU-mul, block copy and log-prob gather against their plain-torch twins."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.kernels import sample as kernels
from genbatch.nif.kernels.elementwise import add_rms_norm, copy_blocks, silu_mul
from genbatch.nif.kernels.sample import gather_logprobs
from tests.nif.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
dtypes = st.sampled_from([torch.float32, torch.float16])


def random(*shape, seed, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 7, 64, 96]), dtypes, st.booleans(), st.integers(0, 2**16))
def test_add_rms_norm_equals_its_twin_and_updates_the_residual(device, rows, width, dtype, adding, seed):
    residual = random(rows, width, seed=seed, device=device, dtype=dtype)
    delta = random(rows, width, seed=seed + 1, device=device, dtype=dtype) if adding else None
    weight = random(width, seed=seed + 2, device=device, dtype=dtype)
    twin_residual = residual.clone()
    expected = reference.add_rms_norm(twin_residual, delta, weight, 1e-5)
    actual = add_rms_norm(residual, delta, weight, 1e-5)
    assert residual.equal(twin_residual)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 5, 64, 1100]), dtypes, st.integers(0, 2**16))
def test_silu_mul_equals_its_twin(device, rows, width, dtype, seed):
    gate_up = random(rows, 2 * width, seed=seed, device=device, dtype=dtype) * 4
    actual, expected = silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(7)), st.integers(1, 3), st.sampled_from([1, 100, 2100]))
def test_copy_blocks_copies_the_pairs_and_nothing_else(device, order, num_pairs, elements):
    pool = random(7, elements, seed=0, device=device)
    pairs = torch.tensor(order[: 2 * num_pairs], device=device).view(-1, 2)
    expected = pool.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(pool, pairs)
    assert pool.equal(expected)


def test_copy_blocks_leaves_the_pool_alone_where_an_id_is_outside(device):
    store = random(8, 5, seed=0, device=device)
    before = store.clone()
    copy_blocks(store[:6], torch.tensor([[0, 6], [7, 1], [-1, 2]], device=device))
    assert store.equal(before)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 50, 130]), st.integers(1, 3), st.integers(0, 2**16))
def test_gathered_logprobs_equal_log_softmax(device, rows, vocab_size, num_tokens, seed):
    logits = random(rows, vocab_size, seed=seed, device=device) * 10
    logits[0, : vocab_size // 2] = float("-inf")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, vocab_size + 1, (rows, num_tokens), generator=generator).to(device)
    torch.testing.assert_close(
        gather_logprobs(logits, tokens), reference.gather_logprobs(logits, tokens), rtol=1e-5, atol=1e-5
    )


def test_logprobs_of_a_vocabulary_in_several_chunks(device, monkeypatch):
    monkeypatch.setattr(kernels, "_LOGPROB_CHUNK", 16)
    logits = random(2, 70, seed=3, device=device)
    logits[1, :40] = float("-inf")  # whole chunks without a finite value come first
    tokens = torch.tensor([[0, 69], [69, 39]], device=device)
    torch.testing.assert_close(
        gather_logprobs(logits, tokens), reference.gather_logprobs(logits, tokens), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 9), st.integers(-1, 9)), min_size=4, max_size=9), st.integers(0, 5))
def test_rows_go_on_with_what_is_given_or_was_drawn_in_a_row(device, rows, unused):
    given, drawn = torch.tensor(rows, device=device).T.contiguous()
    drawn = torch.cat((drawn, torch.full((unused,), 77, device=device)))
    tokens = kernels.next_tokens(given, drawn)
    assert tokens.equal(reference.next_tokens(given, drawn))
    assert tokens.tolist() == [max(0, g if g >= 0 else rows[-1 - g][1]) for g, _ in rows]


def test_next_tokens_of_more_rows_than_a_program_covers(device, monkeypatch):
    monkeypatch.setattr(kernels, "_ROW_CHUNK", 4)
    given = torch.tensor([-1, 3, -3, 3, -5, 3, -10, 3, -9, 3], device=device)
    assert kernels.next_tokens(given, torch.arange(10, device=device)).tolist() == [0, 3, 2, 3, 4, 3, 9, 3, 8, 3]
