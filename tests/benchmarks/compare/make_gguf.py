"""Requantises a GGUF file with llama.cpp's own quantiser. Runs in the peers' environment.

python -m tests.benchmarks.compare.make_gguf SOURCE.gguf DIRECTORY Q4_0 BF16 ...
"""

import ctypes
import os
import sys
from pathlib import Path

import llama_cpp

TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
}


def quantise(source: Path, target: Path, name: str) -> None:
    """Writes `target`, whole or not at all.

    Raises:
        OSError: llama.cpp could not.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[name], len(os.sched_getaffinity(0))
    params.allow_requantize = True
    scratch = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(scratch).encode(), ctypes.byref(params))
    if status != 0:
        raise OSError(f"llama.cpp's quantiser returned {status} for {name}")
    scratch.replace(target)


def main() -> None:
    source, directory = Path(sys.argv[1]), Path(sys.argv[2])
    llama_cpp.llama_backend_init()
    whole = directory / "F32.gguf"
    quantise(source, whole, "F32")
    for name in sys.argv[3:]:
        quantise(whole, directory / f"{name}.gguf", name)
    whole.unlink()


if __name__ == "__main__":
    main()
