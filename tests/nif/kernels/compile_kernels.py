"""Compiles every kernel for GPUs that are not there, prints what each takes, and fails where that is not what we want.

    python -m tests.nif.kernels.compile_kernels                       # all kernels for all GPUs: some minutes at first
    python -m tests.nif.kernels.compile_kernels --capabilities 90 --slice

What holds for each: no register is spilled, shared memory is within the GPU's limit, attention copies keys and
values ahead of their use, a kernel that streams keys, values or weights loads 16 bytes at a time, prefill multiplies
with the GPU's own matrix instructions, and a step of another size needs no other variant. Triton keeps what it
compiled, so a second run takes seconds.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton

from genbatch.nif.kernels.attend_keys import Tile, programs_per_processor
from genbatch.nif.kernels.elementwise import add_rms_norm, copy_blocks, rope_and_write, silu_mul, write_kv
from genbatch.nif.kernels.linear import HeadShape, Residual, Rotation, TileLinear, linear_tiles
from genbatch.nif.kernels.lora import LoraParts, NormedRows, lora_delta
from genbatch.nif.kernels.packed_linear import packed_linear
from genbatch.nif.kernels.packed_weight import pack, unpacked
from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention, plan_shares
from genbatch.nif.kernels.sample import draw_tokens, edit_logits, gather_logprobs, next_tokens
from genbatch.nif.sampling.device_draws import row_edits
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from tests.nif.kernels.offline_compiler import SHARED_MEMORY, Compiled, record, target

VOCAB = 151936
LONGEST = 8192
BLOCK_SIZE = 16
ROWS = (1, 2, 16, 17, 256)
"""Sizes of steps, some of which divide by 16 and one of which is 1: what Triton would specialise for."""
# Kernels of which every byte counts: what they stream is most of what a step reads.
STREAMING = (
    "_decode_attention_kernel",
    "_chunk_attention_kernel",
    "_linear_kernel",
    "_packed_linear_kernel",
    "_survey_kernel",
    "_sample_kernel",
    "_unpack_kernel",
)


ATTENTION = ("_decode_attention_kernel", "_chunk_attention_kernel")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def multiprocessor_memory(capability: int) -> int:
    """Bytes of shared memory that a multiprocessor has."""
    return (SHARED_MEMORY[capability] + 1) * 1024


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


def attention(
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 4,
    query_len: int = 1,
    in_order: bool = False,
    sinks: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    cached: torch.dtype | None = None,
) -> None:
    """Decodes, or chunks of `query_len` tokens beside them; `cached` is the cache's type if it is another one."""
    # Layers lie side by side in a block, so the stride of a block is not what it takes.
    pool = meta(64, 28, 2, kv_heads, BLOCK_SIZE, head_size, dtype=cached or dtype)
    cache = pool[:, 0, 0]
    starts, lengths = ints(rows + 1), ints(rows)
    setting = AttentionSetting(132, multiprocessor_memory(target.get()), in_order=in_order)
    plan = plan_shares(starts, lengths, setting, max_kv_len=LONGEST, window=window)
    paged_attention(
        meta(rows * query_len, heads, head_size, dtype=dtype),
        cache,
        cache,
        ints(rows, LONGEST // BLOCK_SIZE),
        starts,
        lengths,
        plan,
        scale=0.1,
        max_query_len=query_len,
        window=window,
        softcap=softcap,
        sinks=meta(heads, dtype=dtype) if sinks else None,
    )


def layer(
    rows: int,
    kind: str = "none",
    *,
    hidden: int = 1024,
    wide: int = 3072,
    fixed: bool = False,
    head_size: int = 128,
    normed: bool = True,
    cached: torch.dtype = torch.bfloat16,
) -> None:
    """The products of one layer of a decode step, and the head's."""
    heads, kv_heads = 16, 8
    tiles = linear_tiles(
        rows,
        torch.bfloat16,
        head_size,
        bits={"none": 0, "int4": 4}.get(kind, 8),
        fixed=fixed,
        shared_memory=multiprocessor_memory(target.get()),
    )
    products = TileLinear(tiles)
    positions = ints(rows, dtype=torch.int64)
    cache = meta(64, kv_heads, BLOCK_SIZE, head_size, dtype=cached)
    tables = meta(LONGEST, head_size // 2, dtype=torch.float32)
    head_norm = meta(head_size) if normed else None
    shape = HeadShape(heads, kv_heads, head_size, head_norm, head_norm)
    rotation = Rotation(cache, cache, positions, positions, tables, tables)
    residual = Residual(meta(rows, hidden), meta(rows, -(-hidden // tiles.added.columns), dtype=torch.float32), 1e-6)
    norm = meta(hidden)

    def weight(outputs: int, inputs: int) -> object:
        return pack(meta(outputs, inputs), None, kind)

    products.heads(residual, norm, weight((heads + 2 * kv_heads) * head_size, hidden), shape, rotation)
    products.add_to(residual, meta(rows, heads * head_size), weight(hidden, heads * head_size))
    products.gated(residual, norm, weight(2 * wide, hidden))
    products.add_to(residual, meta(rows, wide), weight(hidden, wide))
    products.logits(residual, norm, pack(norm.expand(VOCAB, -1), None, "none"), meta(rows, VOCAB, dtype=torch.float32))


def unpacking(dtype: torch.dtype = torch.bfloat16) -> None:
    """Packed weights for the library's products."""
    for kind in ("int4", "int8"):
        unpacked(pack(meta(6144, 4096), None, kind), dtype)


def packed_products(kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Products of packed weights of an 8B, each tile of them, with splits of the inputs and without."""
    for rows in (16, 32, 64, 128):
        for outputs, inputs in ((28672, 4096), (4096, 14336)):
            weight = pack(meta(outputs, inputs), meta(outputs), kind)
            packed_linear(meta(rows, inputs, dtype=dtype), weight, 132, multiprocessor_memory(target.get()))


def prefill_parts(dtype: torch.dtype = torch.bfloat16, cached: torch.dtype = torch.bfloat16) -> None:
    """What stands between the library's products in a step of many rows."""
    slots, tables = ints(4, dtype=torch.int64), (meta(64, 64, dtype=torch.float32),) * 2
    cache = meta(4, 8, BLOCK_SIZE, 128, dtype=cached)
    rope_and_write(meta(4, 48 * 128, dtype=dtype), cache, cache, slots, slots, *tables, num_heads=32)
    norms = {"query_norm": meta(128, dtype=dtype), "key_norm": meta(128, dtype=dtype)}
    rope_and_write(meta(4, 32 * 128, dtype=dtype), cache, cache, slots, slots, *tables, num_heads=16, **norms)
    write_kv(meta(4, 8, 128, dtype=dtype), meta(8, 4, 128, dtype=dtype).transpose(0, 1), cache, cache, slots)
    add_rms_norm(meta(4, 4096, dtype=dtype), meta(4, 4096, dtype=dtype), meta(4096, dtype=dtype), 1e-6)
    add_rms_norm(meta(4, 1024, dtype=dtype), None, meta(1024, dtype=dtype), 1e-6)
    silu_mul(meta(4, 2 * 14336, dtype=dtype))


def beside_the_model(rows: int = 4) -> None:
    """The ends of a step, and the copies."""
    ids = ints(rows, dtype=torch.int64)
    TileLinear(linear_tiles(rows, torch.bfloat16, 128, fixed=True)).embed(meta(VOCAB, 1024), ids, ids, 1e-6)
    next_tokens(ids, ids)
    draw_tokens(meta(rows, VOCAB, dtype=torch.float32), meta(rows, 5, dtype=torch.float64))
    gather_logprobs(meta(rows, VOCAB, dtype=torch.float32), ints(rows, 3, dtype=torch.int64))
    copy_blocks(meta(4, 4096), ints(2, 2, dtype=torch.int64))


def adapters(rows: int = 4, rank: int = 24) -> None:
    """What adapters add to the products of a layer, with a norm before it and without."""
    hidden, width = meta(rows, 1024), 3072
    parts = LoraParts(ints(2, dtype=torch.int64), ints(2, dtype=torch.int64), ints(2), rank)
    owners = ints(rows)
    lora_delta(NormedRows(hidden, meta(rows, 64, dtype=torch.float32), meta(1024), 1e-6), owners, parts, width)
    lora_delta(NormedRows(hidden, None, None), owners, parts, 1024)


def edits() -> None:
    # Its launcher puts numbers together on the host, so this one has real tensors.
    edit_logits(torch.zeros(1, VOCAB), [row_edits(SamplerState(SamplingParams(seed=0, logit_bias={3: 1.0}), []))])


SLICE: tuple[Callable[[], None], ...] = (
    lambda: attention(32, 8, 128),
    lambda: attention(32, 8, 128, query_len=64),
    lambda: layer(1),
    beside_the_model,
    edits,
    adapters,
    unpacking,
)
"""What a change is most likely to break, and what a default model runs."""

ALL: tuple[Callable[[], None], ...] = (
    *SLICE,
    lambda: attention(16, 8, 128),
    lambda: attention(9, 3, 64),
    lambda: attention(64, 8, 64, query_len=64),
    lambda: attention(24, 8, 96, query_len=64),
    lambda: attention(32, 8, 128, query_len=64, in_order=True),
    lambda: attention(24, 8, 96, query_len=64, in_order=True),
    lambda: attention(8, 4, 192, query_len=64, in_order=True),
    lambda: attention(8, 4, 256, query_len=64, in_order=True),
    lambda: attention(8, 4, 256, query_len=64, window=4096, softcap=50.0),
    lambda: attention(8, 4, 256, window=4096, softcap=50.0),
    lambda: attention(64, 8, 64, torch.float16, query_len=64, window=128, sinks=True),
    lambda: attention(9, 3, 64, torch.float32, query_len=64),
    lambda: layer(17),
    lambda: layer(64),
    lambda: layer(4, fixed=True),
    lambda: layer(1, "int8"),
    lambda: layer(1, "int4"),
    lambda: layer(16, "int8"),
    lambda: layer(16, "int4"),
    lambda: layer(1, "int8", hidden=4096, wide=14336, normed=False),
    lambda: layer(1, "int4", hidden=4096, wide=14336, normed=False),
    lambda: layer(64, "int8", normed=False),
    lambda: layer(64, "int4", normed=False),
    lambda: layer(16, "int4", head_size=256),
    lambda: layer(16, "int8", head_size=256),
    lambda: packed_products("int4"),
    lambda: packed_products("int4", torch.float16),
    lambda: packed_products("int8"),
    prefill_parts,
)


FP8 = torch.float8_e4m3fn
FROM_89: tuple[Callable[[], None], ...] = (
    lambda: packed_products("fp8"),
    lambda: layer(1, "fp8"),
    lambda: layer(1, cached=FP8),
    lambda: attention(32, 8, 128, cached=FP8),
    lambda: attention(16, 8, 128, cached=FP8),
    lambda: attention(9, 3, 64, cached=FP8),
    lambda: attention(8, 4, 256, window=4096, softcap=50.0, cached=FP8),
    lambda: attention(32, 8, 128, query_len=64, cached=FP8),
    lambda: attention(32, 8, 128, query_len=64, in_order=True, cached=FP8),
    lambda: attention(64, 8, 64, query_len=64, cached=FP8),
    lambda: attention(8, 4, 256, query_len=64, cached=FP8),
    lambda: prefill_parts(cached=FP8),
)
"""What older GPUs have no type for."""


def faults_of(kernel: Compiled, capability: int) -> list[str]:
    """What about a compiled kernel is not as we build on it."""
    found = []
    if kernel.spilled:
        found.append(f"spills {kernel.spilled} bytes")
    if kernel.shared > SHARED_MEMORY[capability] * 1024:
        found.append(f"wants {kernel.shared} bytes of shared memory, of {SHARED_MEMORY[capability]} KiB")
    is_narrow = "'query_ptr': '*fp32'" in kernel.variant  # whose dot products are no matrix instructions
    size = 1 if "'key_ptr': '*fp8e4nv'" in kernel.variant else 2
    if kernel.name in ATTENTION and not is_narrow:
        keys, head, warps = (int(_constant(kernel.variant, name)) for name in ("KEYS", "HEAD_PAD", "num_warps"))
        # Keys and values of one tile before the loop, and of another one in it.
        least = 4 * max(1, size * keys * head // (16 * 32 * warps))
        if kernel.copies < least:
            found.append(f"copies {kernel.copies} times ahead of use, not {least}: its loop is not pipelined")
    if kernel.name == "_decode_attention_kernel" and not is_narrow:
        head, warps = (int(_constant(kernel.variant, name)) for name in ("HEAD", "num_warps"))
        stages = int(_constant(kernel.variant, "num_stages"))
        tile = Tile(0, int(_constant(kernel.variant, "KEYS")), warps, stages)
        room = multiprocessor_memory(capability)
        assumed = programs_per_processor(tile, head, size, room)
        real = min(room // (kernel.shared + 1024), 65_536 // (32 * warps * kernel.registers))
        if real < assumed:
            found.append(f"{real} programs run at a time on a multiprocessor, and {assumed} are launched")
    if kernel.name in STREAMING and not kernel.loads_wide and not is_narrow:
        found.append("loads nothing 16 bytes at a time")
    by_warp_groups = kernel.name == "_packed_linear_kernel" or "'SHARE': 0" in kernel.variant
    if kernel.name in ("_chunk_attention_kernel", "_packed_linear_kernel") and not is_narrow and by_warp_groups:
        wanted = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma")
        if kernel.products != wanted:
            found.append(f"multiplies with {kernel.products or 'nothing'}, not {wanted}")
    return found


def _constant(variant: str, name: str) -> str:
    found = re.search(rf"'{name}': (\d+)", variant)
    assert found, f"{name} is not in {variant}"
    return found[1]


def sizes_that_recompile(capability: int) -> list[str]:
    """Kernels that steps of other sizes want anew."""
    seen: dict[str, set[str]] = {}
    for rows in ROWS:
        with record(capability, compiles=False) as variants:
            attention(32, 8, 128, rows=rows)
            attention(32, 8, 128, rows=rows, query_len=64)
            layer(rows, fixed=True)
            beside_the_model(rows)
        for variant in variants:
            seen.setdefault(variant.name, set()).add(variant.variant)
    # Attention has two tiles, and the products four ends.
    usual: dict[str, int] = {}
    with record(capability, compiles=False) as variants:
        attention(32, 8, 128)
        attention(32, 8, 128, query_len=64)
        layer(4, fixed=True)
        beside_the_model()
    for variant in variants:
        usual[variant.name] = usual.get(variant.name, 0) + 1
    return [f"{name}: {len(of)} variants, not {usual[name]}" for name, of in seen.items() if len(of) > usual[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=sorted(SHARED_MEMORY), choices=SHARED_MEMORY)
    parser.add_argument("--slice", action="store_true", help="only what a change is most likely to break")
    chosen = parser.parse_args()
    faults = [f"recompiles by the size of the step: {one}" for one in sizes_that_recompile(90)]
    total, started = 0, time.monotonic()
    for capability in chosen.capabilities:
        with record(capability) as compiled:
            newer = FROM_89 if capability >= 89 else ()
            for case in SLICE if chosen.slice else (*ALL, *newer):
                case()
        for kernel in compiled:
            print(
                f"sm_{capability} {kernel.name}: {kernel.shared} bytes shared, {kernel.registers} registers, "
                f"{kernel.spilled} spilled, {kernel.copies} copies ahead"
                f"{', 16-byte loads' if kernel.loads_wide else ''} {kernel.products}".rstrip()
            )
            faults += [f"sm_{capability} {kernel.variant}: {fault}" for fault in faults_of(kernel, capability)]
        total += len(compiled)
    print(f"Triton {triton.__version__}: {total} kernels compiled in {time.monotonic() - started:.0f} s")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
