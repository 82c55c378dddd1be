"""What ranks cost and bring on CPUs: steps of a Llama of a billion weights by one process and by two, over gloo.

    python -m tests.benchmarks.ranks                     # makes the model, 2.1 GB in bfloat16, and removes it again
    python -m tests.benchmarks.ranks --layers 4 --ranks 1 2

Each rank has one thread. The weights are random; the steps are the engine's own, draws included. The time of
all-reduces is rank 0's, from its call to its return, so that it holds the wait for the other ranks.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from genbatch.nif.context.engine import load_engine
from genbatch.nif.context.tensor_parallel import RankGroup
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from tests.nif.tiny_models import build_tokenizer

BATCHES, PROMPT, STEPS = (1, 8), 64, 8


def make_model(path: Path, layers: int) -> None:
    """A model of the shape of Llama-3.2-1B with random weights and a tiny model's tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    build_tokenizer(path)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32768,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def measure(model: str, ranks: int) -> dict[str, Any]:
    """Milliseconds of a decode step and of a prefill, and of the all-reduces in them."""
    reduced = [0.0]
    all_reduce = RankGroup.all_reduce

    def timed(self: RankGroup, tensor: torch.Tensor) -> None:
        begin = time.perf_counter()
        all_reduce(self, tensor)
        reduced[0] += time.perf_counter() - begin

    RankGroup.all_reduce = timed  # type: ignore[method-assign]
    options = EngineOptions(
        model_path=model,
        dtype="bfloat16",
        n_gpu_layers=0,
        n_threads=1,
        runner="torch",
        n_ctx=2048,
        tensor_parallel=ranks,
    )
    context = load_engine(options).open_context(n_parallel=max(BATCHES), n_held=0, n_batch=512)
    draw, found = random.Random(0), {}
    prefills, prefill_reduced = [], []
    for seq_id in range(max(BATCHES)):
        prompt = [draw.randrange(100, 32000) for _ in range(PROMPT)]
        reduced[0], begin = 0.0, time.perf_counter()
        context.prefill(prompt, seq_id, 0)
        prefills.append(time.perf_counter() - begin)
        prefill_reduced.append(reduced[0])
    found[f"prefill of {PROMPT}"] = [1e3 * median(prefills), 1e3 * median(prefill_reduced)]
    position = PROMPT
    for batch in BATCHES:
        states = [SamplerState(SamplingParams(seed=seq_id), ()) for seq_id in range(batch)]
        times, waits = [], []
        for step in range(STEPS):
            entries = [Entry(seq_id, (200 + step,), position + step) for seq_id in range(batch)]
            reduced[0], begin = 0.0, time.perf_counter()
            context.step(entries, states)
            times.append(time.perf_counter() - begin)
            waits.append(reduced[0])
        for seq_id in range(batch):
            context.seq_rm(seq_id, PROMPT)
        found[f"decode of {batch}"] = [1e3 * median(times), 1e3 * median(waits)]
    context.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the model there, and take it from there")
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure, chosen.ranks[0])))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = chosen.keep or Path(directory) / "model"
        if not (path / "model.safetensors").exists():
            make_model(path, chosen.layers)
        print("| ranks | step | ms | of which all-reduce, ms |\n|---|---|---|---|")
        for ranks in chosen.ranks:
            command = [sys.executable, "-m", "tests.benchmarks.ranks", "--measure", str(path), "--ranks", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            for step, (took, reduced) in json.loads(done.stdout.splitlines()[-1]).items():
                print(f"| {ranks} | {step} | {took:,.1f} | {reduced:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
