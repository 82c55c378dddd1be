"""What adapters cost a decode step of the native runner; a program.

python -m tests.benchmarks.adapters --modes float32 int8 --batch 16 --rank 16 --adapters 1 4 16

Each row of the batch has one of the adapters in turn. Steps with and without take turns, so that a shared machine is as
busy for the one as for the other; the figures are medians, and the ratio is to the step without.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import describe_model
from genbatch.nif.native.runner import NativeRunner, native_runner
from genbatch.nif.runner import LoraAdapter, LoraLinear
from tests.nif.native.measure_steps import BLOCK_SIZE, decode_batch

TARGETS = {
    "q v": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def random_adapter(model: Model, targets: tuple[str, ...], rank: int, handle: int) -> LoraAdapter:
    """One that nobody has trained."""
    random = np.random.default_rng(handle)

    def drawn(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) / 64

    linears = {
        name: LoraLinear(drawn(rank, module.in_features), drawn(module.out_features, rank), 2.0)
        for name, module in model.hf.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(targets)
    }
    return LoraAdapter(str(handle), Path(), str(handle), handle, linears)


def measure(
    runner: NativeRunner, vocab_size: int, batch_size: int, context: int, counts: list[int], rounds: int
) -> None:
    """Prints a row for each number of adapters."""
    plain = decode_batch(vocab_size, batch_size, context)
    owners = {count: np.arange(batch_size) % count + 1 for count in counts}
    batches = {0: plain, **{count: replace(plain, adapters=owner) for count, owner in owners.items()}}
    walls: dict[int, list[float]] = {count: [] for count in batches}
    for batch in batches.values():
        runner.forward_largest(batch, with_logits=False)
    for _ in range(rounds):
        for count, batch in batches.items():
            started = time.perf_counter()
            runner.forward_largest(batch, with_logits=False)
            walls[count].append(time.perf_counter() - started)
    base = median(walls[0])
    for count, times in walls.items():
        print(f"  {count:3} adapters   {1e3 * median(times):8.2f} ms   {median(times) / base:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--modes", nargs="+", default=["float32", "int8"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    torch.manual_seed(0)
    for mode in given.modes:
        model = describe_model(given.model, dtype="bfloat16" if mode == "bfloat16" else "float32")
        assert model is not None, "a family that the native runner does not know"
        quantize = "int8" if mode == "int8" else "none"
        runner = native_runner(model, quantize=quantize, n_threads=given.threads)
        runner.allocate([given.batch * -(-given.context // BLOCK_SIZE)], BLOCK_SIZE)
        for targets in given.targets:
            made = [random_adapter(model, TARGETS[targets], given.rank, i + 1) for i in range(max(given.adapters))]
            for adapter in made:
                runner.add_adapter(adapter)
            print(
                f"{mode}, rank {given.rank} on {targets}, {given.batch} sequences, context {given.context}", flush=True
            )
            measure(runner, model.vocab_size, given.batch, given.context, given.adapters, given.rounds)
            for adapter in made:
                runner.drop_adapter(adapter)
        runner.close()


if __name__ == "__main__":
    main()
