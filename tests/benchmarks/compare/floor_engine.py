"""The floor as an engine of the comparison: the model's kernels alone, with no Batcher around them.

python -m tests.benchmarks.compare.floor_engine --dtype bfloat16 --quantize int8
"""

import argparse

from genbatch.clients.bench.in_process import DecodeFloor
from genbatch.nif.context.engine import EngineOptions
from tests.benchmarks.compare.command_lines import CommandLines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--quantize", required=True)
    options = parser.parse_args()
    lines = CommandLines()
    floor = DecodeFloor(EngineOptions(dtype=options.dtype, quantize=options.quantize, n_gpu_layers=0))
    lines.reply({})
    lines.serve({"step": lambda batch, context: {"seconds": floor.measure(batch, context)}})


if __name__ == "__main__":
    main()
