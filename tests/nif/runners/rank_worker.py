"""One rank of SmolLM2 under torchrun: `rank_worker.py DIRECTORY`; it writes the tokens that it saw be the likeliest."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from genbatch.nif.context.engine import load_engine
from genbatch.nif.context.tensor_parallel import follow
from genbatch.nif.engine_options import EngineOptions, torchrun_rank
from genbatch.nif.runner import Entry

PROMPTS = ("The capital of France is", "Water is made of", "Once upon a time there was a small")
NUM_TOKENS = 12


def main() -> None:
    options = EngineOptions(
        dtype="float32", n_gpu_layers=0, n_threads=1, tensor_parallel=int(os.environ["WORLD_SIZE"]), n_ctx=512
    )
    rank = torchrun_rank(options)
    path = Path(sys.argv[1]) / f"{rank}.json"
    seen: list[list[int]] = []
    if rank:
        try:
            follow(options, rank, on_step=lambda logits: seen.append(logits.argmax(-1).tolist()))
        except RuntimeError:  # rank 0 has left
            path.write_text(json.dumps(seen))
        os._exit(0)
    engine = load_engine(options)
    context = engine.open_context(n_parallel=len(PROMPTS), n_held=0, n_batch=64)
    tokens = [engine.model.tokenizer.encode(prompt) for prompt in PROMPTS]
    entries = [Entry(seq_id, prompt, 0) for seq_id, prompt in enumerate(tokens)]
    for _ in range(NUM_TOKENS):
        logits = np.concatenate(context.eval(entries))
        seen.append(logits.argmax(-1).tolist())
        entries = [
            Entry(entry.seq_id, (token,), entry.n_past + len(entry.tokens))
            for entry, token in zip(entries, seen[-1], strict=True)
        ]
    path.write_text(json.dumps({"prompts": tokens, "seen": seen}))
    os._exit(0)  # the others see the end of the group


main()
