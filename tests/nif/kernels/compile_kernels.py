"""Compiles every kernel for a GPU of compute capability 9.0 and prints what each takes; run by test_kernels_compile.py.

python tests/nif/kernels/compile_kernels.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests are no package

from offline_compiler import SHARED_MEMORY, record

from genbatch.nif.kernels.block_copy import copy_blocks
from genbatch.nif.kernels.edit_logits import edit_logits
from genbatch.nif.kernels.logprob import gather_logprobs
from genbatch.nif.kernels.next_tokens import next_tokens
from genbatch.nif.kernels.paged_attention import paged_attention
from genbatch.nif.kernels.rms_norm import add_rms_norm
from genbatch.nif.kernels.rope_cache import rope_and_write, write_kv
from genbatch.nif.kernels.sample import draw_tokens
from genbatch.nif.kernels.silu_mul import silu_mul
from genbatch.nif.sampling.sampler import SamplerState
from genbatch.nif.sampling.sampling_params import SamplingParams

VOCAB = 151936


def attention(heads, kv_heads, head_size, dtype, *, max_query_len=1, num_splits=1, sinks=False, **options):
    cache = torch.zeros((4, kv_heads, 16, head_size), dtype=dtype)
    paged_attention(
        torch.zeros((4, heads, head_size), dtype=dtype),
        cache,
        cache,
        torch.zeros((4, 4), dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        scale=0.1,
        max_query_len=max_query_len,
        num_splits=num_splits,
        sinks=torch.zeros(heads, dtype=dtype) if sinks else None,
        **options,
    )


def all_attention():
    attention(32, 8, 128, torch.bfloat16)
    attention(16, 8, 128, torch.bfloat16, num_splits=8)
    attention(32, 8, 128, torch.bfloat16, max_query_len=9)
    attention(8, 4, 256, torch.bfloat16, max_query_len=9, window=4096, softcap=50.0)
    attention(8, 4, 256, torch.bfloat16, num_splits=8, window=4096, softcap=50.0)
    attention(64, 8, 64, torch.float16, max_query_len=9, window=128, sinks=True)
    attention(9, 3, 64, torch.float32, max_query_len=9)


def all_others(dtype):
    def zeros(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype)

    ids = torch.zeros(4, dtype=torch.int64)
    cache = zeros(4, 8, 16, 128)
    tables = (zeros(64, 64, dtype=torch.float32),) * 2
    rope_and_write(zeros(4, 48 * 128), cache, cache, ids, ids, *tables, num_heads=32)
    norms = {"query_norm": zeros(128), "key_norm": zeros(128)}
    rope_and_write(zeros(4, 32 * 128), cache, cache, ids, ids, *tables, num_heads=16, **norms)
    write_kv(zeros(4, 8, 128), zeros(8, 4, 128).transpose(0, 1), cache, cache, ids)
    copy_blocks(zeros(4, 4096), torch.zeros((2, 2), dtype=torch.int64))
    add_rms_norm(zeros(4, 4096), zeros(4, 4096), zeros(4096), 1e-6)
    add_rms_norm(zeros(4, 1024), None, zeros(1024), 1e-6)
    silu_mul(zeros(4, 2 * 14336))
    gather_logprobs(zeros(4, VOCAB, dtype=torch.float32), torch.zeros((4, 3), dtype=torch.int64))
    draw_tokens(zeros(4, VOCAB, dtype=torch.float32), zeros(4, 5, dtype=torch.float64))
    next_tokens(ids, ids)
    biased = SamplerState(SamplingParams(seed=0, logit_bias={3: 1.0}), [])
    edit_logits(zeros(1, VOCAB, dtype=torch.float32), [biased])


def main() -> None:
    with record() as compiled:
        all_attention()
        all_others(torch.bfloat16)
    for kernel in compiled:
        print(
            f"{kernel.name}: {kernel.shared} bytes shared, {kernel.registers} registers, {kernel.spilled} bytes spilled"
        )
        if kernel.shared > SHARED_MEMORY:
            sys.exit(f"{kernel.name} wants more shared memory than there is")
        if kernel.spilled:
            sys.exit(f"{kernel.name} spills registers")
    print(f"{len(compiled)} kernels compiled")


if __name__ == "__main__":
    main()
