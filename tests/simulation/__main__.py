"""Simulates the whole service under faults, a world for each seed, and prints how to replay those that fail.

python -m tests.simulation --seeds 10000
python -m tests.simulation --first 4711 --seeds 1 --trace
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from genbatch.nif.models.model import load_model
from tests.nif.tiny_models import build_model
from tests.simulation.world import simulate


def main() -> int:
    """Exit code 1 if a seed fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    chosen = parser.parse_args()
    torch.set_num_threads(1)

    failed, num_events, started = [], 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        model = load_model(str(build_model("llama", Path(directory))), dtype="float32", n_gpu_layers=0)
        for seed in range(chosen.first, chosen.first + chosen.seeds):
            try:
                events = simulate(seed, model)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed.append(seed)
                if chosen.trace or len(failed) <= 3:
                    traceback.print_exc()
                print(f"seed {seed} failed; replay: python -m tests.simulation --first {seed} --seeds 1 --trace")
                continue
            num_events += len(events)
            if chosen.trace:
                print("\n".join(events))
    seconds = time.perf_counter() - started
    print(f"{chosen.seeds} seeds, {num_events} events, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
