"""What a decode step on a GPU consists of and how long it should take: launches, bytes and times, without a GPU.

    python -m tests.benchmarks.launch_model                         # Qwen3-0.6B's and Llama-3.1-8B's shapes
    python -m tests.benchmarks.launch_model --models qwen3-0.6b --rows 1 64 --context 4096 --quantize int4
    python -m tests.benchmarks.launch_model --kv-bytes 1            # if keys and values took 8 bits
    python -m tests.benchmarks.launch_model --shared 512            # if positions that all rows share were read once

The runner's own code runs over a GPU that computes nothing (`tests/nif/runners/fake_gpu.py`); every launch is counted
with the bytes of its arguments. A launch takes as long as its bytes or its products, whichever is longer, and no less
than a kernel takes to begin and end. All figures are predictions: none has been measured.
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from transformers import PreTrainedConfig

from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.runner import RaggedBatch
from genbatch.nif.runners.triton_runner import Precision, TritonRunner
from tests.benchmarks.gpu_models import SHAPES
from tests.nif.runners.fake_gpu import FakeGpu, Operation

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Card:
    """A GPU as the model sees it; the defaults are an H200's, of its data sheet less what copies do not reach."""

    bytes_per_s: float = 4.3e12
    products_per_s: float = 790e12 / 2  # multiply-adds in 16 bits
    kernel_s: float = 1.5e-6  # to begin and end a kernel inside a graph
    launch_s: float = 16e-6  # for the host to launch one, Python and Triton included
    own_share: float = 0.7  # of the bandwidth that our own kernels reach: assumed, until one has run
    kv_share: float = 1.0  # of the bytes of keys and values: 0.5 for 8 bits
    shared: int = 0  # positions that all rows share, and that attention reads once: nothing does so yet
    pass_s: float = 1.2e-6  # for one block to weigh a chunk of candidates and sum it three times: assumed, too


# By name: what a copy reaches, reading and writing together.
CARDS = {"h100": Card(bytes_per_s=3.0e12), "h200": Card()}


@dataclass(frozen=True)
class Prediction:
    """A step's launches, bytes and seconds."""

    launches: Counter[str]
    nbytes: float
    graph_s: float
    eager_s: float

    @property
    def total(self) -> int:
        return self.launches.total()


def decode_step(config: PreTrainedConfig, rows: int, context: int, quantize: str = "none") -> list[Operation]:
    """The operations of one captured decode step of so many rows, each holding `context` positions."""
    gpu = FakeGpu()
    with gpu.active():
        model = gpu.model(config)
        blocks = -(-context // BLOCK_SIZE)
        graphs = GraphOptions(max_batch_size=rows, q_padding_interval_size=rows)
        runner = TritonRunner(model, graphs=graphs, longest=blocks * BLOCK_SIZE, precision=Precision(quantize))
        runner.allocate([rows * blocks], BLOCK_SIZE)
        table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
        position = blocks * BLOCK_SIZE - 1
        batch = RaggedBatch(
            input_ids=np.zeros(rows, np.int64),
            positions=np.full(rows, position),
            query_starts=np.arange(rows + 1, dtype=np.int32),
            kv_lens=np.full(rows, position + 1, np.int32),
            slots=(table[:, -1].astype(np.int64) * BLOCK_SIZE + BLOCK_SIZE - 1,),
            block_tables=(table,),
            logit_rows=np.arange(rows),
            max_query_len=1,
            max_kv_len=position + 1,
        )
        begin = len(gpu.operations)
        runner.launch(batch, np.zeros((rows, 5)), None).wait()
        made = gpu.operations[begin:]
        runner.close()
    return made


def bytes_of(operation: Operation, rows: int, context: int, card: Card) -> float:
    """Bytes that a launch moves: of what it gathers from, only what it gathers."""
    total = 0.0
    for name, shape, nbytes, _ in operation.arguments:
        if name in ("key_ptr", "value_ptr"):
            per_position = nbytes / (shape[0] * shape[2])
            read = rows * context - (rows - 1) * min(card.shared, context)
            total += card.kv_share * per_position * (read if "attention" in operation.name else rows)
        elif name in ("table_ptr", "cos_ptr", "sin_ptr") and "attention" not in operation.name:
            total += nbytes / shape[0] * rows
        elif name in ("partial_ptr", "stats_ptr"):
            total += nbytes if "join" in operation.name or shape[0] > rows else 0
        else:
            total += nbytes
    return total


def products_of(operation: Operation) -> float:
    """Multiply-adds of a launch."""
    shapes = {name: shape for name, shape, _, _ in operation.arguments}
    if "_linear_kernel" in operation.name:
        return float(shapes["x_ptr"][0] * prod(shapes["weight_ptr"]))
    if "aten.linear" in operation.name or "aten.mm" in operation.name:
        return float(shapes["argument 0"][0] * prod(shapes["argument 1"]))
    return 0.0


def predict(operations: Sequence[Operation], rows: int, context: int, card: Card) -> Prediction:
    launches: Counter[str] = Counter()
    nbytes = graph_s = eager_s = 0.0
    for operation in operations:
        moved = bytes_of(operation, rows, context, card)
        is_copy_in = "copy over" in operation.name
        share = 1.0 if "aten" in operation.name or "copy" in operation.name else card.own_share
        seconds = max(moved / (card.bytes_per_s * share), products_of(operation) / card.products_per_s)
        busy = 0.0 if is_copy_in else seconds  # copies go beside the kernels
        launches[operation.name.removeprefix("replayed ").split(" (")[0]] += 1
        nbytes += 0 if is_copy_in else moved
        graph_s += max(busy, card.kernel_s)
        eager_s += max(busy, card.kernel_s, card.launch_s)
    return Prediction(launches, nbytes, graph_s, eager_s)


# Passes over a row's candidates: two searches of 16, for the nucleus and for the draw, and what is summed between.
DRAW_PASSES = 36


def draw_seconds(rows: int, vocab_size: int, card: Card) -> float:
    """A draw with top_p from so many rows: three kernels read the logits, and one block a row searches candidates.

    Blocks of several rows run side by side: there are more multiprocessors than rows up to 132, and two fit on each.
    """
    read_s = 4 * rows * vocab_size / (card.bytes_per_s * card.own_share)
    return 3 * max(read_s, card.kernel_s) + max(card.kernel_s, DRAW_PASSES * card.pass_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--quantize", choices=["none", "int8", "fp8", "int4"], default="none")
    parser.add_argument("--kv-bytes", type=int, choices=[1, 2], default=2, help="of an element of keys and values")
    parser.add_argument("--shared", type=int, default=0, help="positions that all rows share")
    parser.add_argument("--card", choices=list(CARDS), default="h200")
    chosen = parser.parse_args()
    card = replace(CARDS[chosen.card], kv_share=chosen.kv_bytes / 2, shared=chosen.shared)
    print(f"Predicted for one {chosen.card.upper()}, greedy; nothing of it is measured.\n")
    print("| model | rows | launches | GB | step in a graph | tok/s | step eager | tok/s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in chosen.models:
        for rows in chosen.rows:
            operations = decode_step(SHAPES[name](), rows, chosen.context, chosen.quantize)
            one = predict(operations, rows, chosen.context, card)
            print(
                f"| {name} | {rows} | {one.total} | {one.nbytes / 1e9:.2f} | {one.graph_s * 1e3:.2f} ms | "
                f"{rows / one.graph_s:,.0f} | {one.eager_s * 1e3:.2f} ms | {rows / one.eager_s:,.0f} |",
                flush=True,
            )
    draws = ", ".join(
        f"{1e3 * draw_seconds(rows, SHAPES[chosen.models[0]]().vocab_size, card):.3f} ms for {rows}"
        for rows in chosen.rows
    )
    print(f"\nDrawing with top_p instead of greedily, {chosen.models[0]}, rows: {draws}")
    print("\n" + ", ".join(f"{count} {kernel}" for kernel, count in one.launches.most_common()))


if __name__ == "__main__":
    main()
