"""A GGUF file's weights as a checkpoint in bfloat16, for peers that read no GGUF.

python -m tests.benchmarks.compare.make_checkpoint FILE.gguf DIRECTORY
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    file, directory = Path(sys.argv[1]), sys.argv[2]
    options = {"gguf_file": file.name, "dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(file.parent, **options).save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    main()
