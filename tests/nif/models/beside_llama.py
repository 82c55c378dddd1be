"""GGUF files of families with recurrent layers, read by genbatch and by llama.cpp: the largest difference of log-probs.

python -m tests.nif.models.beside_llama --peer PYTHON

PYTHON is that of an environment with the packages xllamacpp and numpy. Each random model of the native tests is written
as llama.cpp's converter does. Both are compared with transformers' own log-probs after prompts of LENGTHS.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from genbatch.nif.models.model import describe_model
from genbatch.nif.native.runner import native_runner
from tests.nif.models.gguf_files import batch_of
from tests.nif.models.hybrid_files import ARCH, MODELS, write_hybrid
from tests.nif.models.test_gguf_families import written
from tests.nif.native.models import random_model

# What a file cannot say set as every file's is, and sizes that llama.cpp takes: values as large as keys.
_LAYERS = 24
_SQUARE = {"linear_value_head_dim": 64, "linear_key_head_dim": 64}
CHANGES: dict[str, dict[str, object]] = {
    "lfm2": {"conv_bias": False},
    "qwen3_5": {"attention_bias": False, **_SQUARE},
    "qwen3_5_moe": {"attention_bias": False, **_SQUARE},
    "qwen3_next": _SQUARE,
    # llama.cpp has numbers of Gemma 3n's in its code: streams, ranks, sparse layers, layers with keys of their own.
    "gemma3n": {
        "num_hidden_layers": _LAYERS,
        "intermediate_size": [4096] * _LAYERS,  # its deviation divides by one gate less
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4
        + ["sliding_attention"] * 3
        + ["full_attention"],
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": _LAYERS - 20,
        "hidden_size": 64,
        "initializer_range": 0.05,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "laurel_rank": 64,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (_LAYERS - 10),
        "final_logit_softcapping": 30.0,
    },
}
OTHERS = ("lfm2", "qwen3_5", "qwen3_5_moe", "gemma3n")
TOKENS = [3 + (37 * i * i + 11 * i) % 310 for i in range(36)]
LENGTHS = (1, 2, 7, 16, 17, 36)
PEER = """
import json, sys
import numpy as np
import xllamacpp
path, out, tokens, lengths, size = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.n_batch, params.n_ubatch = path, 1, 256, 64, 64
params.verbosity, params.cache_prompt, params.cache_ram_mib, params.warmup = 0, False, 0, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, rows = xllamacpp.Server(params), []
for length in lengths:
    asked = {"prompt": tokens[:length], "n_predict": 1, "n_probs": size, "temperature": -1.0, "cache_prompt": False}
    got = []
    server.handle_completions(json.dumps(asked | {"ignore_eos": False}), got.append)
    answer = got[-1] if isinstance(got[-1], dict) else json.loads(got[-1])
    row = np.full(size, np.nan, np.float32)
    for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        row[one["id"]] = one["logprob"]
    rows.append(row)
np.save(out, np.stack(rows))
"""


def logits_of(path: Path) -> torch.Tensor:
    """The logits of the C kernels, [len(TOKENS), vocab_size]."""
    model = describe_model(str(path), dtype="float32")
    assert model is not None
    runner = native_runner(model, n_threads=1)
    try:
        runner.allocate([4] * len(runner.groups), 16)
        return torch.as_tensor(runner.forward(batch_of(TOKENS, len(runner.groups))))
    finally:
        runner.close()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="a Python with the package xllamacpp")
    parser.add_argument("--only", help="one model")
    chosen = parser.parse_args()
    disable_progress_bar()
    print("| model | spread of a log-prob | native | llama.cpp |\n|---|---|---|---|")
    for name in [chosen.only] if chosen.only else [*ARCH, *OTHERS]:
        with tempfile.TemporaryDirectory() as directory:
            path, out = Path(directory) / "model.gguf", Path(directory) / "logits.npy"
            source, changes = MODELS.get(name, (name, {}))
            model = random_model(source, **changes, **CHANGES.get(name, {}))
            if name in ARCH:
                write_hybrid(path, name, model)
            else:
                written(path, name, model)
            with torch.inference_mode():
                expected = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
            ours = float((logits_of(path).log_softmax(-1) - expected).abs().max())
            asked = [json.dumps(TOKENS), json.dumps(LENGTHS), str(expected.shape[1])]
            peer = subprocess.run(
                [chosen.peer, "-c", PEER, path, out, *asked], capture_output=True, text=True, check=False
            )
            wanted = expected[[length - 1 for length in LENGTHS]].numpy()
            theirs = f"{np.abs(np.load(out) - wanted).max():.1g}" if peer.returncode == 0 else peer.stderr
            print(f"| {name} | {float(expected.std()):.2g} | {ours:.1g} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
