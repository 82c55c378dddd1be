"""Times single steps of NativeRunner; a program. Absolute figures mean something on a quiet machine only.

python tests/nif/native/measure_steps.py --mode int8 --batch 1 8 16 32 --prefill 512
"""

import argparse
import time

import numpy as np

from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import RaggedBatch, Runner

BLOCK_SIZE = 16
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "float32"}


def decode_batch(vocab_size: int, sequences: int, context: int, shared: int = 0) -> RaggedBatch:
    """The step in which every sequence gets its `context`-th position behind `shared` common ones, whole blocks."""
    blocks = -(-context // BLOCK_SIZE)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    prefix = np.arange(shared // BLOCK_SIZE, dtype=np.int32) + sequences * blocks
    tables = np.concatenate((np.tile(prefix, (sequences, 1)), tables), axis=1)
    context += shared
    last = context - 1
    return RaggedBatch(
        input_ids=np.random.default_rng(1).integers(vocab_size, size=sequences),
        positions=np.full(sequences, last),
        query_starts=np.arange(sequences + 1, dtype=np.int32),
        kv_lens=np.full(sequences, context, np.int32),
        slots=(tables[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,),
        block_tables=(tables,),
        logit_rows=np.arange(sequences),
        max_query_len=1,
        max_kv_len=context,
    )


def prefill_batch(vocab_size: int, length: int) -> RaggedBatch:
    """A prompt in one step, the last token's logits wanted."""
    return RaggedBatch(
        input_ids=np.random.default_rng(1).integers(vocab_size, size=length),
        positions=np.arange(length),
        query_starts=np.array([0, length], np.int32),
        kv_lens=np.array([length], np.int32),
        slots=(np.arange(length),),
        block_tables=(np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)[None],),
        logit_rows=np.array([length - 1]),
        max_query_len=length,
        max_kv_len=length,
    )


def report(name: str, runner: Runner, batch: RaggedBatch, seconds: float) -> None:
    """Prints the fastest and the median step, and the least CPU time of the calling thread: all of it with one."""
    tokens = batch.input_ids.size
    runner.forward(batch)
    walls, cpus = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(walls) < 5:
        wall, cpu = time.perf_counter(), time.thread_time()
        runner.forward(batch)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
    best, median = min(walls), sorted(walls)[len(walls) // 2]
    print(
        f"{name:12} min {best * 1e3:8.2f} ms {tokens / best:7.0f} tok/s   "
        f"median {median * 1e3:8.2f} ms {tokens / median:7.0f} tok/s   cpu {min(cpus) * 1e3:8.2f} ms",
        flush=True,
    )


def main() -> None:
    """Reads the arguments and measures each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mode", choices=DTYPES, default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--shared", type=int, nargs="*", default=[0], help="common positions before each context")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    model = load_model(options.model, dtype=DTYPES[options.mode], n_gpu_layers=0)
    runner = native_runner(model, quantize="int8" if options.mode == "int8" else "none", n_threads=options.threads)
    batches = [
        (f"decode {n}" + f" +{shared}" * (shared > 0), decode_batch(model.vocab_size, n, options.context, shared))
        for n in options.batch
        for shared in options.shared
    ]
    batches += [(f"prefill {n}", prefill_batch(model.vocab_size, n)) for n in options.prefill]
    runner.allocate([max(int(batch.block_tables[0].max()) for _, batch in batches) + 1], BLOCK_SIZE)
    print(f"{model.name}, {runner.name}, context {options.context}")
    for name, batch in batches:
        report(name, runner, batch, options.seconds)
    runner.close()


if __name__ == "__main__":
    main()
