"""Times tiles of the decode kernels on the GPU that is here, each as a share of a copy's bandwidth.

    python tests/benchmarks/gpu_tiles.py --results DIR [--only attention|linear|packed] [--rows 1 64]

Weights and keys are taken from several buffers in turn, larger together than the L2 cache. A captured graph of these
launches is replayed, so that the host's time is not in it. Children compile the variants first, one a core.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from genbatch.nif.kernels import paged_attention as attention
from genbatch.nif.kernels.attend_keys import Tile
from genbatch.nif.kernels.linear import HeadShape, LinearTile, LinearTiles, Residual, Rotation, TileLinear
from genbatch.nif.kernels.packed_weight import PackedWeight, pack

IS_DRY = "GPU_DRY_RUN" in os.environ
DEVICE = torch.device("cpu" if IS_DRY else "cuda")
DTYPE = torch.float32 if IS_DRY else torch.bfloat16
L2 = 120 << 20  # bytes that all buffers hold together at least
SHARED = 227 * 1024
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
# Name: hidden, intermediate, query heads, KV heads, vocabulary.
SHAPES = {"0.6B": (1024, 3072, 16, 8, 151936), "8B": (4096, 14336, 32, 8, 128256)}
NORMED = ("0.6B", "tiny")  # a norm for each head needs whole heads
if IS_DRY:
    SHAPES = {"tiny": (128, 64, 2, 1, 128)}


def seconds_of(launches: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Seconds of one launch, in a graph of all of them."""
    for launch in launches[:2]:
        launch()
    if IS_DRY:
        return 1.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / len(launches))
    return median(times[1:])


def copies_of(nbytes: int) -> int:
    return 1 if IS_DRY else max(4, min(64, -(-L2 // nbytes)))


def attention_cases(rows: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    tiles = [(64, 4, 5, 168), (64, 4, 5, None), (64, 4, 4, 168), (64, 4, 3, 168), (32, 4, 5, 168), (32, 4, 3, 168),
             (128, 4, 3, None), (128, 8, 3, None), (64, 8, 5, None), (64, 2, 5, None)]  # fmt: skip
    for name, tile, share in itertools.product(SHAPES, tiles, (64, 128, 256, 512)):
        if share >= tile[0] and (share != 64 or tile[:3] == (64, 4, 5)):
            case = {"kind": "attention", "model": name, "tile": tile, "share": share, "rows": [1, 16, 64, 256]}
            yield f"attention {name} {tile} share={share}", case


TILES = {  # by rows of a program: outputs, inputs at a time, warps, stages
    16: [
        (16, 256, 4, 3), (16, 256, 4, 4), (16, 512, 4, 3), (16, 512, 8, 3), (16, 128, 4, 6), (16, 128, 2, 6),
        (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (32, 256, 8, 4), (64, 128, 4, 4), (64, 128, 8, 4),
        (64, 256, 8, 3), (32, 128, 2, 4),
    ],
    64: [
        (32, 128, 4, 3), (32, 128, 4, 4), (32, 128, 8, 4), (32, 256, 8, 2), (64, 64, 4, 4), (64, 128, 4, 3),
        (64, 128, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (16, 128, 4, 4), (32, 64, 4, 6), (128, 128, 8, 2),
    ],
}  # fmt: skip


# By product: outputs, inputs at a time, warps, stages, splits.
PACKED_TILES = {
    "int4": {
        "added": [(16, 64, 4, 4, 4), (8, 64, 4, 4, 4), (16, 64, 8, 3, 8), (8, 64, 8, 4, 8), (32, 64, 4, 4, 4),
                  (16, 64, 2, 4, 2)],
        "gated": [(16, 64, 4, 3, 4), (16, 64, 4, 4, 4), (16, 64, 2, 4, 2), (8, 64, 4, 4, 4), (32, 64, 4, 3, 4),
                  (16, 64, 8, 3, 8)],
        "heads": [(16, 64, 4, 3, 4), (8, 64, 4, 4, 4), (16, 64, 8, 3, 8), (32, 64, 4, 3, 4)],
        "whole heads": [(64, 32, 8, 3, 8), (64, 64, 8, 2, 8), (64, 32, 4, 4, 4), (64, 64, 4, 2, 4), (64, 32, 8, 2, 8)],
    },
    "int8": {
        "added": [(16, 64, 4, 4, 4), (8, 64, 4, 4, 4), (16, 64, 8, 4, 8), (16, 128, 4, 3, 4), (32, 64, 4, 4, 4),
                  (16, 128, 8, 3, 8), (8, 128, 4, 4, 4)],
        "gated": [(16, 64, 4, 4, 4), (8, 64, 4, 4, 4), (16, 128, 4, 3, 4), (32, 64, 4, 3, 4), (16, 64, 2, 4, 2)],
        "heads": [(16, 64, 4, 4, 4), (8, 64, 4, 4, 4), (16, 128, 4, 3, 4), (32, 64, 4, 3, 4)],
        "whole heads": [(64, 64, 4, 3, 4), (64, 64, 8, 3, 8), (64, 128, 4, 2, 4), (64, 64, 4, 4, 4)],
    },
}  # fmt: skip
PACKED_TILES["fp8"] = PACKED_TILES["int8"]
PLACES = {"qkv": "heads", "out": "added", "gate_up": "gated", "down": "added"}


def packed_cases(rows: list[int], weights: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for packing, name, product, count in itertools.product(weights, SHAPES, PLACES, rows):
        place = "whole heads" if product == "qkv" and name in NORMED else PLACES[product]
        for columns, inputs, warps, stages, splits in PACKED_TILES[packing][place]:
            tile = (min(count, 16), columns, inputs, warps, stages, splits)
            case = {"kind": product, "model": name, "tile": tile, "rows": [count], "weights": packing}
            yield f"{product} {name} {packing} R={count} {tile}", case


def linear_cases(rows: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, product, count in itertools.product(SHAPES, PRODUCTS, rows):
        tall = 16 if count <= 16 else 64
        for columns, inputs, warps, stages in TILES[tall]:
            wide = columns * (2 if product in ("gate_up", "qkv") else 1)
            if product == "qkv" and columns != 64 and not (tall == 16 and columns == 16):
                continue
            if product == "qkv":  # whole heads
                columns, inputs, wide = 64, min(inputs, 256), 128
            if inputs * 2 * (wide + tall) * stages > SHARED - 8192:
                continue
            tile = (tall, columns, inputs, warps, stages)
            yield f"{product} {name} R={count} {tile}", {"kind": product, "model": name, "tile": tile, "rows": [count]}


def run_attention(case: dict[str, Any], *, compile_only: bool) -> Iterator[tuple[str, float, float]]:
    _, _, heads, kv_heads, _ = SHAPES[case["model"]]
    keys, warps, stages, registers = case["tile"]
    tile = Tile(16, keys, warps, stages, registers)
    vars(attention)["tile_shape"] = lambda *_, **__: tile
    vars(attention)["_WAVES"] = 1
    head, block, context = 128, 16, 64 if IS_DRY else 1024
    for rows in case["rows"]:
        nbytes = rows * context * kv_heads * head * 4
        blocks = rows * context // block
        shape = (2, blocks, kv_heads, block, head)
        stores = [
            torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(1 if compile_only else copies_of(nbytes))
        ]
        query = torch.randn((rows, heads, head), dtype=DTYPE, device=DEVICE)
        table = torch.randperm(blocks, device=DEVICE).int().view(rows, -1)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        processors = 2 if IS_DRY else torch.cuda.get_device_properties(DEVICE).multi_processor_count
        setting = attention.AttentionSetting(processors, share=case["share"])
        plan = attention.plan_shares(starts, lengths, setting, max_kv_len=context + 64)
        arguments = (table, starts, lengths, plan)
        launches = [partial(attend, query, store, *arguments) for store in stores]
        if compile_only:
            launches[0]()
            return
        for programs in (1, 2, 3, 4, 6, 64):
            vars(attention)["programs_per_processor"] = partial(constant, programs)
            yield f"R={rows} programs={programs}", seconds_of(launches), nbytes


def constant(value: int, *_: object) -> int:
    return value


def attend(query: torch.Tensor, store: torch.Tensor, *arguments: Any) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5
    return attention.paged_attention(query, store[0], store[1], *arguments, scale=scale, max_query_len=1)


def run_linear(case: dict[str, Any], *, compile_only: bool) -> Iterator[tuple[str, float, float]]:
    hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[case["model"]]
    rows, kind = case["rows"][0], case["kind"]
    k, n = {
        "qkv": (hidden, (heads + 2 * kv_heads) * 128),
        "out": (heads * 128, hidden),
        "gate_up": (hidden, 2 * intermediate),
        "down": (intermediate, hidden),
        "head": (hidden, vocabulary),
    }[kind]
    packing = case.get("weights", "none")
    first = pack(torch.randn((n, k), dtype=DTYPE, device=DEVICE), None, packing)
    nbytes = first.nbytes
    weights = [first] + [cloned(first) for _ in range(0 if compile_only else copies_of(nbytes) - 1)]
    x = torch.randn((rows, k), dtype=DTYPE, device=DEVICE)
    if case["tile"] is None:
        yield "library", seconds_of([partial(torch.nn.functional.linear, x, weight.data) for weight in weights]), nbytes
        return
    tile = LinearTile(*case["tile"])
    ours = TileLinear(LinearTiles(tile, tile, tile, tile))
    norm = torch.ones(k, dtype=DTYPE, device=DEVICE)
    width = n if kind in ("out", "down") else k
    sums = torch.ones((rows, -(-width // tile.columns)), dtype=torch.float32, device=DEVICE)
    residual = Residual(torch.randn((rows, width), dtype=DTYPE, device=DEVICE), sums, 1e-5)
    work: Callable[[PackedWeight], object]
    if kind in ("out", "down"):
        work = partial(ours.add_to, residual, x)
    elif kind == "gate_up":
        work = partial(ours.gated, residual, norm)
    elif kind == "head":
        work = partial(ours.logits, residual, norm, out=torch.empty((rows, n), dtype=torch.float32, device=DEVICE))
    else:
        cache = torch.zeros((2, rows, kv_heads, 16, 128), dtype=DTYPE, device=DEVICE)
        angles = torch.randn((2048, 64), device=DEVICE)
        positions = torch.arange(rows, device=DEVICE)
        rotation = Rotation(cache[0], cache[1], positions * 16, positions, angles, angles)
        head_norm = torch.ones(128, dtype=DTYPE, device=DEVICE) if case["model"] in NORMED else None
        shape = HeadShape(heads, kv_heads, 128, head_norm, head_norm)
        work = partial(ours.heads, residual, norm, shape=shape, rotation=rotation)
    launches = [partial(work, weight) for weight in weights]
    if compile_only:
        launches[0]()
        return
    yield "own", seconds_of(launches), nbytes


def cloned(weight: PackedWeight) -> PackedWeight:
    parts = {name: getattr(weight, name) for name in ("data", "scales")}
    return replace(weight, **{name: part if part is None else part.clone() for name, part in parts.items()})


def run(case: dict[str, Any], *, compile_only: bool = False) -> Iterator[tuple[str, float, float]]:
    work = run_attention if case["kind"] == "attention" else run_linear
    yield from work(case, compile_only=compile_only)


def compile_all(count: int) -> None:
    """Compiles all variants in children."""
    begin = time.monotonic()
    many = min(14, os.cpu_count() or 1)
    children = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--compile", f"{index}/{many}"])
        for index in range(many)
    ]
    for child in children:
        child.wait()
    print(f"{count} variants compiled in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", choices=["attention", "linear", "packed"])
    parser.add_argument("--weights", nargs="+", default=list(PACKED_TILES), choices=list(PACKED_TILES), help="packed")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--compile", help="I/N: only compile every N-th variant from the I-th on")
    parser.add_argument("--seconds", type=float, default=120.0, help="most, of all timing")
    chosen = parser.parse_args()
    cases = []
    packed = partial(packed_cases, weights=chosen.weights)
    for kind, made in (("attention", attention_cases), ("linear", linear_cases), ("packed", packed)):
        if chosen.only in (None, kind):
            cases += made(chosen.rows)
    if chosen.compile:
        first, step = map(int, chosen.compile.split("/"))
        for name, case in cases[first::step]:
            try:
                list(run(case, compile_only=True))
            except Exception as error:
                print(name, repr(error)[:200], flush=True)
        return
    compile_all(len(cases))
    begin = time.monotonic()
    if chosen.only in (None, "linear"):
        for name, product, count in itertools.product(SHAPES, PRODUCTS, chosen.rows):
            cases.append(
                (f"{product} {name} R={count} library", {"kind": product, "model": name, "tile": None, "rows": [count]})
            )
    with (chosen.results / "tiles.jsonl").open("a") as file:
        for name, case in sorted(cases, key=lambda named: named[1]["tile"] is not None):
            if time.monotonic() - begin > chosen.seconds:
                print("time is over", flush=True)
                break
            try:
                for detail, seconds, nbytes in run(case):
                    row = {"case": name, **case, "detail": detail, "us": seconds * 1e6, "TBps": nbytes / seconds / 1e12}
                    file.write(json.dumps(row) + "\n")
            except Exception as error:
                file.write(json.dumps({"case": name, "error": repr(error)[:300]}) + "\n")
            file.flush()
    print(f"timed in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
