"""Prints digests of the default model's logits by the kernels of the installed wheel, or by those compiled here."""

import hashlib
import sys

import numpy as np

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.native import library
from genbatch.nif.native.build import build_library, native_flags

if sys.argv[1] == "compiled":
    compiled = library.open_library(build_library(native_flags()))
    library.native_library.cache_clear()
    library.build_library = lambda: build_library(native_flags())
else:
    assert build_library().parent.name == "packaged", "the wheel has kernels for this machine"
for dtype, quantize in (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("float32", "int4")):
    options = EngineOptions(model_path="smollm2", dtype=dtype, quantize=quantize, n_ctx=256, runner="native")
    context = load_engine(options).open_context(n_parallel=2, n_held=0, n_batch=64)
    runner = context.runner
    digest = hashlib.sha256()
    from genbatch.nif.runner import RaggedBatch

    blocks = 4
    for length in (33, 1):
        batch = RaggedBatch(
            input_ids=np.arange(length) * 7 + 3,
            positions=np.arange(length),
            query_starts=np.array([0, length], np.int32),
            kv_lens=np.array([length], np.int32),
            max_query_len=length,
            max_kv_len=length,
            slots=(np.arange(length),),
            block_tables=(np.arange(blocks, dtype=np.int32)[None],),
            logit_rows=np.arange(length),
        )
        digest.update(runner.forward(batch).tobytes())
    print(dtype, quantize, digest.hexdigest())
