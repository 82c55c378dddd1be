"""Log-probabilities of given tokens, without writing a whole log-softmax.

The plain-torch twin is `reference.gather_logprobs`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_CHUNK = 4096  # vocabulary entries read at a time


@triton.jit(do_not_specialize=["vocab_size", "num_tokens"])
def _gather_logprobs_kernel(
    out_ptr,  # [R, num_tokens] float32
    logits_ptr,  # [R, vocab_size] with row stride
    tokens_ptr,  # [R, num_tokens] int64
    vocab_size,
    num_tokens,
    row_stride,
    TOKENS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one row; the sum of exponentials is kept relative to the running maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.arange(0, CHUNK)
    maximum = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab_size, CHUNK):
        logits = tl.load(logits_ptr + start + columns, mask=start + columns < vocab_size, other=float("-inf"))
        logits = logits.to(tl.float32)
        new_maximum = tl.maximum(maximum, logits)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - shift) + tl.exp(logits - shift)
        maximum = new_maximum
    overall = tl.max(maximum, 0)
    log_total = overall + tl.log(tl.sum(total * tl.exp(maximum - overall), 0))
    wanted = tl.arange(0, TOKENS_PAD)
    tokens = tl.load(tokens_ptr + row * num_tokens + wanted, mask=wanted < num_tokens, other=-1)
    known = (tokens >= 0) & (tokens < vocab_size)
    chosen = tl.load(logits_ptr + tokens, mask=known, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + row * num_tokens + wanted, chosen - log_total, mask=wanted < num_tokens)


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits)[row, token] for each row's tokens.

    Args:
        logits: [R, vocab_size], the last dimension contiguous; every row holds at least one finite value.
        tokens: [R, N] int64; one outside the vocabulary gives -inf.

    Returns:
        [R, N] float32.
    """
    rows, vocab_size = logits.shape
    num_tokens = tokens.shape[1]
    out = torch.empty((rows, num_tokens), dtype=torch.float32, device=logits.device)
    _gather_logprobs_kernel[(rows,)](
        out,
        logits,
        tokens,
        vocab_size,
        num_tokens,
        logits.stride(0),
        TOKENS_PAD=triton.next_power_of_2(num_tokens),
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return out
