"""GGUF files of families with recurrent layers, read by genbatch and by llama.cpp: the largest difference of a logit.

python -m tests.nif.models.beside_llama --peer PYTHON

PYTHON is that of an environment with the packages llama-cpp-py-sync and numpy. Each random model of
`tests/nif/native/models.py` is written as llama.cpp's converter does. Both logits are compared with transformers' own.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from tests.nif.models.gguf_files import batch_of
from tests.nif.models.hybrid_files import ARCH, MODELS, write_hybrid
from tests.nif.models.test_gguf_families import written
from tests.nif.native.models import random_model

OTHERS = ("lfm2", "qwen3_5", "qwen3_5_moe")
TOKENS = [3 + (37 * i * i + 11 * i) % 310 for i in range(36)]
PEER = """
import json, sys
import numpy as np
from llama_cpp_py_sync import __version__
from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib
ffi, lib = get_ffi(), get_lib()
@ffi.callback("void(enum ggml_log_level, const char *, void *)")
def log(level, text, data):
    if level == lib.GGML_LOG_LEVEL_ERROR:
        print(ffi.string(text).decode(), file=sys.stderr, end="")
lib.llama_log_set(log, ffi.NULL)
lib.llama_backend_init()
path, out, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
if model == ffi.NULL:
    sys.exit("the file is refused")
params = lib.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 64, 64, 64, 1, 1
params.type_k = params.type_v = lib.GGML_TYPE_F32
params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
context = lib.llama_init_from_model(model, params)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
rows = []
for token in tokens:  # one after another: its own chunked scans round otherwise
    status = lib.llama_decode(context, lib.llama_batch_get_one(ffi.new("llama_token[1]", [token]), 1))
    if status:
        sys.exit(f"llama_decode: {status}")
    rows.append(np.frombuffer(ffi.buffer(lib.llama_get_logits(context), 4 * size), np.float32).copy())
np.save(out, np.stack(rows))
print(__version__)
"""


def logits_of(path: Path) -> torch.Tensor:
    """What the C kernels compute, [len(TOKENS), vocab_size]."""
    model = load_model(str(path), dtype="float32", n_gpu_layers=0)
    runner = native_runner(model, n_threads=1)
    try:
        runner.allocate([4] * len(runner.groups), 16)
        return runner.forward(batch_of(TOKENS, len(runner.groups)))
    finally:
        runner.close()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="a Python with the package llama-cpp-py-sync")
    parser.add_argument("--only", help="one model")
    chosen = parser.parse_args()
    disable_progress_bar()
    print("| model | spread of a logit | native | llama.cpp |\n|---|---|---|---|")
    for name in [chosen.only] if chosen.only else [*ARCH, *OTHERS]:
        with tempfile.TemporaryDirectory() as directory:
            path, out = Path(directory) / "model.gguf", Path(directory) / "logits.npy"
            source, changes = MODELS.get(name, (name, {}))
            model = random_model(source, **changes)
            if name in ARCH:
                write_hybrid(path, name, model)
            else:
                written(path, name, model)
            with torch.inference_mode():
                expected = model(torch.tensor([TOKENS])).logits[0]
            ours = float((logits_of(path) - expected).abs().max())
            peer = subprocess.run(
                [chosen.peer, "-c", PEER, path, out, json.dumps(TOKENS)], capture_output=True, text=True, check=False
            )
            theirs = f"{np.abs(np.load(out) - expected.numpy()).max():.1g}" if peer.returncode == 0 else peer.stderr
            print(f"| {name} | {float(expected.std()):.2g} | {ours:.1g} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
