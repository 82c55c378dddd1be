"""Our own matrix product for steps of few rows. One launch computes x @ weight.T and the operations around it.

Before the product, a launch may compute the RMSNorm of the residual. After the product, it may compute the gated
activation, the rotation of heads with the cache writes, or the addition to the residual. A layer of a decode step then
takes six launches, including attention's two. Weights may be packed to 8 or 4 bits (weights only), because reading the
weights takes most of a decode step.

A row's result depends on the row, on the weight's shape and on the tile. With one tile for all steps, other rows cannot
change a row. The plain-torch twins are the functions in `reference` with the names of `TileLinear`'s methods.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from genbatch.nif.kernels.attend_keys import LARGE_SHARED_MEMORY
from genbatch.nif.kernels.elementwise import rope_and_write, store_in_cache
from genbatch.nif.kernels.packed_weight import (
    GROUP,
    NIBBLE_OFFSETS,
    PackedWeight,
    load_scaling,
    times_bytes,
    times_nibbles,
)

_PLAIN = tl.constexpr(0)
_RESIDUAL = tl.constexpr(1)
_SILU = tl.constexpr(2)  # from this number on, a program computes pairs of outputs
_ROPE = tl.constexpr(3)


@triton.jit
def _times_full(acc, x, weight_ptr, outputs, used, columns, inside, K: tl.constexpr):
    """Return `acc` plus the tile's product with weights [outputs, K] of the model's type."""
    weight = tl.load(
        weight_ptr + outputs.to(tl.int64)[None, :] * K + columns[:, None],
        mask=used[None, :] & inside[:, None],
        other=0.0,
    )
    return acc + tl.dot(x, weight, input_precision="ieee")


@triton.jit
def _parted_input(x_ptr, norm_ptr, factor, rows, known, columns, x_stride, K: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return the normed input [SPLITS, ROWS, KS] at columns [SPLITS, KS]. It rounds where the models round."""
    inside = columns < K
    x = tl.load(
        x_ptr + rows.to(tl.int64)[None, :, None] * x_stride + columns[:, None, :],
        mask=known[None, :, None] & inside[:, None, :],
        other=0.0,
    )
    if HAS_NORM:
        weight = tl.load(norm_ptr + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) * factor[None, :, None]).to(x.dtype) * weight[:, None, :]
    return x


@triton.jit
def _rotated(first, second, norm_ptr, dims, in_half, cos, sin, eps, HEAD: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return a head's halves [ROWS, HALF] after the optional per-head RMSNorm and the rotation, in float32."""
    kind = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD + eps)
        first_weight = tl.load(norm_ptr + dims, mask=in_half, other=0.0)
        second_weight = tl.load(norm_ptr + HEAD // 2 + dims, mask=in_half, other=0.0)
        first = ((first * factor[:, None]).to(kind) * first_weight[None, :]).to(tl.float32)
        second = ((second * factor[:, None]).to(kind) * second_weight[None, :]).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_positions"])
def _linear_kernel(
    out_ptr,  # [num_rows, out_stride]; for _ROPE the queries, for _RESIDUAL the residual, which is updated
    x_ptr,  # [num_rows, K] with stride; the residual if HAS_NORM
    weight_ptr,  # [N, K], or packed
    scale_ptr,  # see `PackedWeight.scales`; None for weights of the model's type
    bias_ptr,  # [N] or None
    sums_ptr,  # [num_rows, PARTS] float32: sums of the input's squares if HAS_NORM
    norm_ptr,  # [K] or None
    out_sums_ptr,  # [num_rows, tiles along N] float32: sums of the new residual's squares, for _RESIDUAL
    slots_ptr,  # this and the next seven are for _ROPE: see `elementwise.rope_and_write`
    positions_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    query_norm_ptr,
    key_norm_ptr,
    delta_ptr,  # [num_rows, N] float32, the adapters' addend to the product, or None
    num_rows,
    num_slots,
    num_positions,
    x_stride,
    out_stride,
    block_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KS: tl.constexpr,
    SPLITS: tl.constexpr,  # of the inputs of packed weights
    NIBBLE_OFFSET: tl.constexpr,  # see `packed_weight._nibbles`
    BITS: tl.constexpr,  # of a packed weight: 4, 8, or 0 for the model's type
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    AFTER: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
):
    """One program handles ROWS rows and COLUMNS outputs, or COLUMNS pairs of outputs.

    A pair is a gate and its up projection, or a number of a head's first half and its partner in the second half.
    """
    PAIRS: tl.constexpr = AFTER >= _SILU
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # programs with the same weights run one after another
    known = rows < num_rows
    lanes = tl.arange(0, COLUMNS)
    if AFTER == _ROPE:
        HALF: tl.constexpr = HEAD // 2
        IN_HEAD: tl.constexpr = (HALF + COLUMNS - 1) // COLUMNS  # 1 if a norm needs the whole head
        head = tile // IN_HEAD
        lanes += tile % IN_HEAD * COLUMNS
        used = lanes < HALF
        outputs = head * HEAD + lanes
        others = outputs + HALF
    else:
        outputs = tile * COLUMNS + lanes
        used = outputs < (N // 2 if AFTER == _SILU else N)
        others = outputs + N // 2
    factor = tl.zeros([ROWS], tl.float32)
    if HAS_NORM:
        parts = tl.arange(0, PARTS_PAD)
        sums = tl.load(
            sums_ptr + rows[:, None] * PARTS + parts[None, :], mask=known[:, None] & (parts < PARTS)[None, :], other=0.0
        )
        factor = 1.0 / tl.sqrt(tl.sum(sums, 1) / K + eps)
    if BITS == 0:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        more = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, KS):
            columns = start + tl.arange(0, KS)
            inside = columns < K
            x = tl.load(
                x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :],
                mask=known[:, None] & inside[None, :],
                other=0.0,
            )
            if HAS_NORM:
                weight = tl.load(norm_ptr + columns, mask=inside, other=0.0)
                x = (x.to(tl.float32) * factor[:, None]).to(x.dtype) * weight[None, :]
            acc = _times_full(acc, x, weight_ptr, outputs, used, columns, inside, K)
            if PAIRS:
                more = _times_full(more, x, weight_ptr, others, used, columns, inside, K)
    else:
        # Compute a product for each of SPLITS parts of the inputs. The warps share the inputs, because a program has
        # few outputs. The parts are added up once, at the end.
        parted = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
        parted_more = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
        NUM_BYTES: tl.constexpr = NUM_GROUPS * GROUP // 2 if BITS == 4 else K  # of an output
        splits = tl.arange(0, SPLITS)
        for first in range(0, NUM_BYTES, SPLITS * KS):
            bytes_at = first + splits[:, None] * KS + tl.arange(0, KS)[None, :]
            # In 4 bits a byte holds weights GROUP apart.
            columns = bytes_at // GROUP * (2 * GROUP) + bytes_at % GROUP if BITS == 4 else bytes_at
            x = _parted_input(x_ptr, norm_ptr, factor, rows, known, columns, x_stride, K, HAS_NORM)
            if BITS == 4:
                x_high = _parted_input(x_ptr, norm_ptr, factor, rows, known, columns + GROUP, x_stride, K, HAS_NORM)
                pair = (first + splits * KS) // GROUP  # of groups
                scaling = load_scaling(scale_ptr, outputs, used, pair, NUM_GROUPS)
                parted += times_nibbles(
                    x, x_high, weight_ptr, outputs, used, bytes_at, scaling, NUM_BYTES, NIBBLE_OFFSET
                )
                if PAIRS:
                    scaling_more = load_scaling(scale_ptr, others, used, pair, NUM_GROUPS)
                    parted_more += times_nibbles(
                        x, x_high, weight_ptr, others, used, bytes_at, scaling_more, NUM_BYTES, NIBBLE_OFFSET
                    )
            else:
                parted += times_bytes(x, weight_ptr, outputs, used, columns, K)
                if PAIRS:
                    parted_more += times_bytes(x, weight_ptr, others, used, columns, K)
        acc = tl.sum(parted, 0)
        more = tl.sum(parted_more, 0)
    if BITS == 8:
        acc = acc * tl.load(scale_ptr + outputs, mask=used, other=0.0)[None, :]
        if PAIRS:
            more = more * tl.load(scale_ptr + others, mask=used, other=0.0)[None, :]
    kind = x_ptr.dtype.element_ty
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + outputs, mask=used, other=0.0).to(tl.float32)[None, :]
        if PAIRS:
            more = more + tl.load(bias_ptr + others, mask=used, other=0.0).to(tl.float32)[None, :]
    mask = known[:, None] & used[None, :]
    if delta_ptr is not None:
        added = delta_ptr + rows.to(tl.int64)[:, None] * N
        acc = acc + tl.load(added + outputs[None, :], mask=mask, other=0.0)
        if PAIRS:
            more = more + tl.load(added + others[None, :], mask=mask, other=0.0)
    cells = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    if AFTER == _PLAIN:
        tl.store(out_ptr + cells, acc.to(kind).to(out_ptr.dtype.element_ty), mask=mask)
    if AFTER == _SILU:
        gate = acc.to(kind).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind)
        tl.store(out_ptr + cells, silu * more.to(kind), mask=mask)
    if AFTER == _RESIDUAL:
        residual = tl.load(out_ptr + cells, mask=mask, other=0.0)
        # Add in float32, then round: the squares are taken of the rounded sum, to which the next layer adds.
        residual = (residual.to(tl.float32) + acc.to(kind).to(tl.float32)).to(kind)
        tl.store(out_ptr + cells, residual, mask=mask)
        wide = residual.to(tl.float32)
        tl.store(out_sums_ptr + rows * tl.num_programs(1) + tile, tl.sum(wide * wide, 1), mask=known)
    if AFTER == _ROPE:
        first = acc.to(kind)
        second = more.to(kind)
        if head < QUERY_HEADS + KV_HEADS:
            positions = tl.load(positions_ptr + rows, mask=known, other=-1)
            turned = ((positions >= 0) & (positions < num_positions))[:, None] & used[None, :]
            angles = positions[:, None] * (HEAD // 2) + lanes[None, :]
            cos = tl.load(cos_ptr + angles, mask=turned, other=0.0)
            sin = tl.load(sin_ptr + angles, mask=turned, other=0.0)
            if head < QUERY_HEADS:
                low, high = _rotated(first, second, query_norm_ptr, lanes, used, cos, sin, eps, HEAD, HAS_HEAD_NORM)
                tl.store(out_ptr + cells, low.to(kind), mask=mask)
                tl.store(out_ptr + cells + HEAD // 2, high.to(kind), mask=mask)
            else:
                low, high = _rotated(first, second, key_norm_ptr, lanes, used, cos, sin, eps, HEAD, HAS_HEAD_NORM)
                _store_in_cache(
                    key_ptr, low, high, slots_ptr, rows, known, lanes, used, head - QUERY_HEADS, num_slots,
                    block_stride, HEAD, BLOCK_SIZE,
                )  # fmt: skip
        else:
            _store_in_cache(
                value_ptr, first, second, slots_ptr, rows, known, lanes, used, head - QUERY_HEADS - KV_HEADS, num_slots,
                block_stride, HEAD, BLOCK_SIZE,
            )  # fmt: skip


@triton.jit
def _store_in_cache(
    cache_ptr,
    first,
    second,
    slots_ptr,
    rows,
    known,
    lanes,
    used,
    head,
    num_slots,
    block_stride,
    HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write a head's halves [ROWS, HALF] to each row's slot; a slot outside the pool is skipped."""
    slots = tl.load(slots_ptr + rows, mask=known, other=-1)
    inside = (slots >= 0) & (slots < num_slots)
    offsets = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * HEAD + head * BLOCK_SIZE * HEAD
    mask = inside[:, None] & used[None, :]
    cells = cache_ptr + offsets[:, None] + lanes[None, :]
    store_in_cache(cells, first, mask)
    store_in_cache(cells + HEAD // 2, second, mask)


@triton.jit(do_not_specialize=["num_rows", "vocab_size"])
def _embed_kernel(
    out_ptr,  # [R, WIDTH]
    sums_ptr,  # [R, PARTS] float32
    table_ptr,  # [vocab_size, WIDTH]
    given_ptr,
    drawn_ptr,
    num_rows,
    vocab_size,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """One program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(given_ptr + row)
    if HAS_DRAWN:
        token = tl.where(token < 0, tl.load(drawn_ptr - 1 - token, mask=token < 0, other=0), token)
    # A row without a drawable token holds -1, which is no row of the embedding.
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    columns = tl.arange(0, PAD)
    mask = columns < WIDTH
    hidden = tl.load(table_ptr + token * WIDTH + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * WIDTH + columns, hidden, mask=mask)
    wide = hidden.to(tl.float32)
    parts = tl.arange(0, PARTS_PAD)
    tl.store(sums_ptr + row * PARTS + parts, tl.where(parts == 0, tl.sum(wide * wide, 0), 0.0), mask=parts < PARTS)


@dataclass(frozen=True, slots=True)
class LinearTile:
    """The rows and outputs that one program computes, and the inputs that it reads at a time."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int
    splits: int = 1  # parts of packed weights' inputs; a program reads `inputs` inputs of each part at a time


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """The tiles of a step's products.

    Args:
        heads: for queries, keys and values; `columns` counts outputs of a head's half.
        gated: for gate and up.
        added: for products that are added to the residual.
        logits: for the model's head.
    """

    heads: LinearTile
    gated: LinearTile
    added: LinearTile
    logits: LinearTile


def linear_tiles(
    num_rows: int,
    dtype: torch.dtype,
    head_size: int,
    *,
    bits: int = 0,
    fixed: bool = False,
    shared_memory: int = LARGE_SHARED_MEMORY,
) -> LinearTiles:
    """Choose the tiles for a step of `num_rows` rows.

    Few outputs for each program make many programs. Many inputs at a time keep many loads in flight. The tiles for
    weights of 16 bits were the fastest of 12 to 14 on one H100 (docs/lab/2026-11-26-h100.md).

    Args:
        bits: bits of packed weights. The head's weights are never packed.
        fixed: whether every number of rows gets the same tiles.
        shared_memory: bytes of a multiprocessor.
    """
    lanes = max(16, triton.next_power_of_2(head_size // 2))
    if dtype == torch.float32:
        tile = LinearTile(16, 32, 32, 4, 2, splits=2)
        return LinearTiles(replace(tile, columns=lanes), tile, tile, tile)
    rows = 64 if fixed or num_rows > 32 else 32 if num_rows > 16 else 16
    is_large = shared_memory >= LARGE_SHARED_MEMORY
    logits = {
        16: LinearTile(16, 32, 256, 4, 3),
        32: LinearTile(32, 16, 256, 4, 3),
        64: LinearTile(64, 64, 64, 4, 4),
    }[rows]
    if bits:
        return _packed_tiles(bits, 16 if fixed else num_rows, logits)
    tile = LinearTile(rows, 32, 128, 4, 3) if rows == 64 else LinearTile(rows, 16, 256, 4, 3)
    # Whole heads make wide tiles. All stages together must fit into shared memory.
    heads = replace(tile, columns=lanes, inputs=min(tile.inputs, GROUP) if lanes > 32 else tile.inputs)
    gated = added = tile
    if rows == 16:
        added = LinearTile(16, 16, 128, 4, 6)
        gated = LinearTile(16, 32, 256, 4, 3) if is_large else LinearTile(16, 32, 128, 2, 4)
        if is_large and lanes == 64:
            heads = LinearTile(16, 64, 256, 4, 3)
    elif rows == 64 and is_large:
        added = LinearTile(64, 32, 128, 4, 4)
        gated = LinearTile(64, 64, 128, 8, 4)
        if lanes == 64:
            heads = LinearTile(64, 64, 128, 8, 4)
    return LinearTiles(heads, gated, added, logits)


def _packed_tiles(bits: int, num_rows: int, logits: LinearTile) -> LinearTiles:
    """Choose the tiles of packed weights: the fastest of four to seven on one H100 (docs/lab/2026-11-26-h100.md).

    Each warp has its own split, because two warps for one split would both unpack the split's weights. With more than
    16 rows the unpacked weights take more registers than the GPU has.
    """
    rows = 1 if num_rows == 1 else 16
    added = LinearTile(rows, 8 if rows == 1 else 16, 64, 4, 4, splits=4)
    gated = LinearTile(rows, 16 if bits == 8 and rows == 1 else 32, 64, 4, 3, splits=4)
    heads = LinearTile(rows, 16, 64, 4, 3, splits=4)  # Triton 3.9 spills registers with 8 outputs of one row
    return LinearTiles(heads, gated, added, logits)


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of a step, with the sums of squares that the norms need."""

    hidden: torch.Tensor  # [R, width], contiguous, changed in place
    sums: torch.Tensor  # [R, parts] float32, each tile of columns' part of a row's sum of squares
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's queries and keys, and the cache for its keys and values; see `rope_and_write`."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The parts of the merged projection of queries, keys and values."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    query_norm: torch.Tensor | None  # [head_size] weights of a per-head RMSNorm, both or neither
    key_norm: torch.Tensor | None


class TileLinear:
    """The products of one step.

    Args:
        tiles: see `linear_tiles`.
    """

    def __init__(self, tiles: LinearTiles) -> None:
        self.tiles = tiles

    def embed(self, table: torch.Tensor, given: torch.Tensor, drawn: torch.Tensor | None, eps: float) -> Residual:
        """Return the residual at the beginning of a step: the tokens' embeddings.

        Args:
            table: [vocab_size, width].
            given: [R] int64: token ids; -1 - row stands for the token that was drawn in that row.
            drawn: int64, each row's token from the previous step; None if `given` has all token ids.
        """
        vocab_size, width = table.shape
        parts = triton.cdiv(width, self.tiles.added.columns)
        hidden = torch.empty((len(given), width), dtype=table.dtype, device=table.device)
        sums = torch.empty((len(given), parts), dtype=torch.float32, device=table.device)
        _embed_kernel[(len(given),)](
            hidden,
            sums,
            table,
            given,
            drawn,
            len(given),
            vocab_size,
            WIDTH=width,
            PAD=triton.next_power_of_2(width),
            PARTS=parts,
            PARTS_PAD=triton.next_power_of_2(parts),
            HAS_DRAWN=drawn is not None,
            num_warps=4,
        )
        return Residual(hidden, sums, eps)

    def heads(
        self,
        residual: Residual,
        norm: torch.Tensor,
        weight: PackedWeight,
        shape: HeadShape,
        rotation: Rotation,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to their slots; returns the rotated queries [R, num_heads, head_size].

        Args:
            delta: here and below, [R, outputs] float32, the adapters' addend to the product.
        """
        rows, hidden = len(residual.hidden), residual.hidden
        tile = self.tiles.heads
        if weight.bits and shape.query_norm is not None:
            # A norm for each head needs a program for each whole head. Whole heads take too many registers unpacked.
            qkv = torch.empty((rows, weight.num_outputs), dtype=hidden.dtype, device=hidden.device)
            tile = self.tiles.added
            num_tiles = triton.cdiv(weight.num_outputs, tile.columns)
            self._launch(qkv, residual, norm, weight, _PLAIN, num_tiles, tile, delta=delta)
            return rope_and_write(
                qkv,
                rotation.key_cache,
                rotation.value_cache,
                rotation.slots,
                rotation.positions,
                rotation.cos,
                rotation.sin,
                num_heads=shape.num_heads,
                query_norm=shape.query_norm,
                key_norm=shape.key_norm,
                eps=residual.eps,
            ).view(rows, shape.num_heads, shape.head_size)
        query = torch.empty((rows, shape.num_heads * shape.head_size), dtype=hidden.dtype, device=hidden.device)
        num_tiles = (shape.num_heads + 2 * shape.num_kv_heads) * triton.cdiv(shape.head_size // 2, tile.columns)
        self._launch(query, residual, norm, weight, _ROPE, num_tiles, tile, heads=(shape, rotation), delta=delta)
        return query.view(rows, shape.num_heads, shape.head_size)

    def gated(
        self, residual: Residual, norm: torch.Tensor, weight: PackedWeight, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(gate) * up [R, width] of the merged projection [2 * width, hidden]."""
        width = weight.num_outputs // 2
        out = torch.empty((len(residual.hidden), width), dtype=residual.hidden.dtype, device=residual.hidden.device)
        tile = self.tiles.gated
        self._launch(out, residual, norm, weight, _SILU, triton.cdiv(width, tile.columns), tile, delta=delta)
        return out

    def add_to(
        self, residual: Residual, x: torch.Tensor, weight: PackedWeight, delta: torch.Tensor | None = None
    ) -> None:
        """Compute residual += x @ weight.T for x [R, K]; the last dimension of x is contiguous."""
        num_tiles = residual.sums.shape[1]
        tile, sums = self.tiles.added, residual.sums
        self._launch(residual.hidden, x, None, weight, _RESIDUAL, num_tiles, tile, sums=sums, delta=delta)

    def logits(self, residual: Residual, norm: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        """Write the normed residual times the head [vocab_size, hidden] to `out` [R, vocab_size] float32."""
        tile = self.tiles.logits
        self._launch(out, residual, norm, weight, _PLAIN, triton.cdiv(weight.num_outputs, tile.columns), tile)

    def _launch(
        self,
        out: torch.Tensor,
        source: Residual | torch.Tensor,
        norm: torch.Tensor | None,
        weight: PackedWeight,
        after: tl.constexpr,
        num_tiles: int,
        tile: LinearTile,
        *,
        heads: tuple[HeadShape, Rotation] | None = None,
        sums: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> None:
        x = source.hidden if isinstance(source, Residual) else source
        in_sums = source.sums if isinstance(source, Residual) else None
        shape, rotation = heads if heads is not None else (None, None)
        cache = rotation.key_cache if rotation is not None else None
        parts = 1 if in_sums is None else in_sums.shape[1]
        _linear_kernel[(triton.cdiv(len(x), tile.rows), num_tiles)](
            out,
            x,
            weight.data,
            weight.scales,
            weight.bias,
            in_sums,
            norm,
            sums,
            None if rotation is None else rotation.slots,
            None if rotation is None else rotation.positions,
            None if rotation is None else rotation.cos,
            None if rotation is None else rotation.sin,
            cache,
            None if rotation is None else rotation.value_cache,
            None if shape is None else shape.query_norm,
            None if shape is None else shape.key_norm,
            delta,
            len(x),
            0 if cache is None else cache.shape[0] * cache.shape[2],
            0 if rotation is None else rotation.cos.shape[0],
            x.stride(0),
            out.stride(0),
            0 if cache is None else cache.stride(0),
            source.eps if isinstance(source, Residual) else 0.0,
            N=weight.num_outputs,
            K=weight.num_inputs,
            PARTS=parts,
            PARTS_PAD=triton.next_power_of_2(parts),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            KS=tile.inputs,
            SPLITS=tile.splits,
            NIBBLE_OFFSET=0 if x.device.type == "cpu" else NIBBLE_OFFSETS.get(x.dtype, 0),
            BITS=weight.bits,
            GROUP=GROUP,
            NUM_GROUPS=weight.num_groups,
            HAS_NORM=norm is not None,
            AFTER=after,
            QUERY_HEADS=0 if shape is None else shape.num_heads,
            KV_HEADS=0 if shape is None else shape.num_kv_heads,
            HEAD=2 if shape is None else shape.head_size,
            BLOCK_SIZE=1 if cache is None else cache.shape[2],
            HAS_HEAD_NORM=shape is not None and shape.query_norm is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
