"""Attention in C over each kind of cache, by itself: against its twin, against exact attention, against itself."""

import ctypes
import os
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.native.build import build_library
from genbatch.nif.native.library import (
    ALL_POSITIONS,
    KV_BF16,
    KV_F32,
    KV_I8,
    Cache,
    Layer,
    native_library,
    open_library,
)
from tests.nif.native import reference

LANES = 16
FACTOR_BYTES = 12
KINDS = {"float32": (KV_F32, 4), "bfloat16": (KV_BF16, 2), "int8": (KV_I8, 1)}  # kind, bytes of an element
# Largest error of a row against exact attention, to the rows' mean size.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2}


class Attention(ctypes.Structure):
    """`attention` of genbatch.h."""

    _fields_ = (
        ("queries", c_void_p),
        ("index", c_void_p),
        ("out", c_void_p),
        ("query_stride", c_int64),
        ("cache", c_void_p),
        ("sinks", c_void_p),
        ("score_cap", c_float),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int32),
        ("sink_tokens", c_int32),
    )


class Entry(ctypes.Structure):
    """`attention_entry` of genbatch.h."""

    _fields_ = (("first_token", c_int64), ("query_len", c_int32), ("kv_len", c_int32), ("table", c_void_p))


@dataclass
class Case:
    """One sequence, with keys [num_kv_heads, num_keys, head_dim] and the queries of its last positions."""

    kind: str
    queries: torch.Tensor  # [query_len, num_heads, head_dim]
    keys: torch.Tensor
    values: torch.Tensor
    block_size: int = 16
    window: int = ALL_POSITIONS
    sink_tokens: int = 0
    garbage: int = 0  # the byte that fills the pool before
    cap: float = 0.0
    sinks: torch.Tensor | None = None  # [num_heads]

    def padded_keys(self) -> int:
        return self.block_size + -self.block_size % LANES

    def tiles(self) -> list[int]:
        """Keys that stand in each tile of 16 lanes, in order."""
        left, tiles = self.keys.shape[1], list[int]()
        while left > 0:
            for first in range(0, self.block_size, LANES):
                tiles.append(max(0, min(left, LANES, self.block_size - first)))
                left -= tiles[-1]
        return tiles

    def run(self, library: ctypes.CDLL | None = None) -> torch.Tensor:
        """[query_len, num_heads, head_dim] as the C computes it; the pool's blocks are used back to front."""
        library = library or native_library()
        kind, size = KINDS[self.kind]
        kv_heads, num_keys, head_dim = self.keys.shape
        rows = self.block_size + -self.block_size % (4 // size)
        values_offset = self.padded_keys() * (head_dim * size + (FACTOR_BYTES if kind == KV_I8 else 0))
        head_bytes = values_offset + rows * head_dim * size
        blocks = -(-num_keys // self.block_size)
        # Blocks that fell behind the window of every row and hold no sink are somebody else's by now.
        behind = range(
            -(-self.sink_tokens // self.block_size),
            max(0, num_keys - len(self.queries) - self.window + 1) // self.block_size,
        )
        pool = torch.full((blocks * kv_heads * head_bytes,), self.garbage, dtype=torch.uint8)
        cache = Cache(
            base=pool.data_ptr(),
            layer_stride=len(pool),
            block_stride=kv_heads * head_bytes,
            head_stride=head_bytes,
            values_offset=values_offset,
            num_blocks=blocks,
            block_size=self.block_size,
            kind=kind,
            padded_keys=self.padded_keys(),
        )
        pointer = ctypes.POINTER(c_float)
        layer = Layer(index_in_group=0, key_dim=head_dim, value_dim=head_dim)
        for head in range(kv_heads):
            for at in range(num_keys):
                if at // self.block_size in behind:
                    continue
                slot = (blocks - 1 - at // self.block_size) * self.block_size + at % self.block_size
                key, value = (
                    ctypes.cast(x[head, at].contiguous().data_ptr(), pointer) for x in (self.keys, self.values)
                )
                library.kv_write(ctypes.byref(cache), ctypes.byref(layer), head, c_int64(slot), key, value)
        queries, out = self.queries.contiguous(), torch.empty(self.queries.shape)
        query_len, heads, _ = queries.shape
        table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)
        table[list(behind)] = 0
        attention = Attention(
            queries=queries.data_ptr(),
            out=out.data_ptr(),
            query_stride=heads * head_dim,
            cache=ctypes.addressof(cache),
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
            score_cap=self.cap,
            layer=0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            window=self.window,
            sink_tokens=self.sink_tokens,
        )
        entry = Entry(0, query_len, num_keys, table.data_ptr())
        library.attention_tiles.restype = c_int
        for head in range(kv_heads):
            for tile in range(library.attention_tiles(query_len, heads // kv_heads)):
                library.attention_tile(ctypes.byref(attention), ctypes.byref(entry), head, tile)
        return out

    def exact(self) -> torch.Tensor:
        """The same in float64."""
        query_len, heads, _ = self.queries.shape
        kv_heads, num_keys, _ = self.keys.shape
        keys, values = (x.double().repeat_interleave(heads // kv_heads, 0) for x in (self.keys, self.values))
        scores = self.queries.double().transpose(0, 1) @ keys.transpose(1, 2)
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        at, row = torch.arange(num_keys), torch.arange(num_keys - query_len, num_keys)[:, None]
        behind = (at <= row - self.window) & (at >= self.sink_tokens)
        scores = scores.masked_fill((at > row) | behind, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, query_len, 1)], dim=2)
        return (scores.softmax(-1)[..., :num_keys] @ values).transpose(0, 1)

    def twin(self) -> torch.Tensor:
        """What rounding to 8 bits leaves, in float64."""
        kv_heads = len(self.keys)
        heads = []
        for head in range(self.queries.shape[1]):
            of = head // (self.queries.shape[1] // kv_heads)
            heads.append(
                reference.attention_i8(
                    self.queries[:, head], self.keys[of], self.values[of], window=self.window, tiles=self.tiles()
                )
            )
        return torch.stack(heads, 1)


def random_case(
    kind: str,
    *,
    head_dim: int = 64,
    heads: int = 3,
    kv_heads: int = 1,
    num_keys: int = 150,
    query_len: int = 1,
    **more: int,
) -> Case:
    draw = torch.Generator().manual_seed(head_dim + num_keys)
    queries = torch.randn(query_len, heads, head_dim, generator=draw) * (2.0 / head_dim**0.5)
    keys, values = torch.randn(2, kv_heads, num_keys, head_dim, generator=draw).unbind(0)
    # Tokens differ in the size of their values, and the one that is attended to most has small ones.
    values = values * torch.rand(1, num_keys, 1, generator=draw).exp()
    values[:, 0] *= 0.01
    keys[:, 0] = 1.5 * queries[0, 0]
    return Case(kind, queries, keys, values, **more)


def worst_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm(dim=-1).max() / want.norm(dim=-1).mean())


SHAPES = [
    {"head_dim": 16, "heads": 2, "kv_heads": 2, "num_keys": 1},
    {"head_dim": 64, "num_keys": 64},
    {"head_dim": 64, "num_keys": 150, "query_len": 9, "heads": 6, "kv_heads": 2},
    {"head_dim": 80, "num_keys": 131, "query_len": 131, "heads": 4},
    {"head_dim": 48, "num_keys": 97, "heads": 13, "block_size": 5},
    {"head_dim": 64, "num_keys": 150, "query_len": 40, "block_size": 20, "window": 24},
    {"head_dim": 256, "num_keys": 70, "query_len": 3, "heads": 8, "block_size": 64, "window": 33},
    {"head_dim": 32, "num_keys": 30, "query_len": 7, "block_size": 1},
]
WITH_SINKS = [
    {"num_keys": 150, "query_len": 40, "block_size": 20, "window": 24, "sink_tokens": 4},
    {"num_keys": 900, "block_size": 5, "window": 33, "sink_tokens": 71, "heads": 13},
    {"num_keys": 700, "query_len": 3, "window": 7, "sink_tokens": 256},
    {"num_keys": 260, "query_len": 260, "block_size": 64, "window": 1, "sink_tokens": 1, "heads": 6, "kv_heads": 2},
    {"num_keys": 40, "query_len": 5, "window": 30, "sink_tokens": 20},
]


@pytest.mark.parametrize("shape", [*SHAPES, *WITH_SINKS], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_its_definition(kind: str, shape: dict[str, int]) -> None:
    case = random_case(kind, **shape)
    assert worst_error(case.run(), case.exact()) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [24, ALL_POSITIONS])
@pytest.mark.parametrize(("cap", "sink"), [(1.5, None), (0.0, 3.0), (1.5, -2.0), (0.0, 8.0)])
def test_scores_are_capped_and_sinks_take_their_share(kind: str, window: int, cap: float, sink: float | None) -> None:
    case = random_case(kind, num_keys=150, query_len=40, heads=6, kv_heads=2, window=window)
    case.cap = cap
    if sink is not None:
        case.sinks = sink + torch.arange(6) / 8
    # Beside a sink that takes nearly all weight, errors of the scores in 8 bits no longer cancel in the total.
    allowed = 5 if kind == "int8" and sink == 8.0 else 2
    assert worst_error(case.run(), case.exact()) < allowed * TOLERANCE[kind]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_8_bits_are_rounded_as_in_the_twin(shape: dict[str, int]) -> None:
    case = random_case("int8", **shape)
    # A weight half way between two integers may fall to either side.
    assert worst_error(case.run(), case.twin()) < 3e-3


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize(("flag", "needs"), [("-march=haswell", " avx2 "), ("-march=x86-64", " sse2 ")])
def test_other_vectors_round_to_the_same_8_bits(flag: str, needs: str) -> None:
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU lacks{needs}")
    library = open_library(build_library((flag, "-O1")))
    for shape in SHAPES:
        case = random_case("int8", **shape)
        assert worst_error(case.run(library), case.twin()) < 3e-3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(
    num_keys=st.integers(2, 300),
    query_len=st.integers(2, 40),
    block_size=st.sampled_from([1, 4, 5, 16, 20, 64]),
    window=st.sampled_from([7, 24, ALL_POSITIONS]),
    sink_tokens=st.sampled_from([0, 1, 17, 90]),
)
def test_a_row_is_the_same_to_the_bit_with_others_and_alone_and_over_garbage(
    kind: str, num_keys: int, query_len: int, block_size: int, window: int, sink_tokens: int
) -> None:
    query_len = min(query_len, num_keys)
    shape = {"num_keys": num_keys, "query_len": query_len, "block_size": block_size}
    case = random_case(kind, **shape, window=window, sink_tokens=sink_tokens)
    together = case.run()
    case.garbage = 0xFF  # no numbers behind the last key
    assert torch.equal(case.run(), together)
    for row in {0, query_len // 2, query_len - 1}:
        keys = num_keys - query_len + row + 1
        alone = Case(
            kind,
            case.queries[row : row + 1],
            case.keys[:, :keys],
            case.values[:, :keys],
            block_size=block_size,
            window=window,
            sink_tokens=sink_tokens,
            garbage=0xFF,
        )
        assert torch.equal(alone.run()[0], together[row])


def test_values_of_zeros_take_their_share_of_the_weight() -> None:
    case = random_case("int8", num_keys=80)
    case.values[:, 1::2] = 0
    assert worst_error(case.run(), case.exact()) < TOLERANCE["int8"]
    case.values[:] = 0
    assert torch.equal(case.run(), torch.zeros(case.queries.shape))
