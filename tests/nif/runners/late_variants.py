"""Prints the kernel variants that a service would compile after it is ready; a process in which Triton compiles.

python -m tests.nif.runners.late_variants none
"""

import dataclasses
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch

from genbatch.nif.cuda_device import on_device
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.kernels.sample import edit_logits, gather_logprobs
from genbatch.nif.runner import LoraAdapter, LoraLinear
from genbatch.nif.runners.triton_runner import TritonRunner
from tests.nif.runners.fake_gpu import FakeGpu
from tests.nif.runners.test_cuda_graphs import decodes
from tests.nif.runners.test_stream_order import BLOCK_SIZE, CONFIG

RANKS = {1: 8, 2: 40}


def adapter(handle: int) -> LoraAdapter:
    width = CONFIG.num_attention_heads * CONFIG.head_dim
    linear = LoraLinear(torch.zeros(RANKS[handle], CONFIG.hidden_size), torch.zeros(width, RANKS[handle]), 1.0)
    linears = {f"model.layers.{layer}.self_attn.q_proj": linear for layer in range(CONFIG.num_hidden_layers)}
    return LoraAdapter(f"a{handle}", None, "", handle, linears)  # type: ignore[arg-type]


def main() -> None:
    gpu = FakeGpu()
    with gpu.active():
        model = gpu.model(CONFIG)
        graphs = GraphOptions(max_batch_size=20) if sys.argv[1] == "graphs" else None
        runner = TritonRunner(model, graphs=graphs, quantize="none")
        runner.allocate([100], BLOCK_SIZE)
        ready = set(gpu.variants)
        assert ready, "nothing was warmed"
        for handle in RANKS:
            runner.add_adapter(adapter(handle))
        for rows in (1, 2, 16, 17, 20, 40, 64, 70):
            batch = decodes(rows, max_kv_len=rows + 1, width=BLOCK_SIZE * 20)
            for adapters in (None, torch.arange(rows) % 3):
                named = dataclasses.replace(batch, adapters=adapters)
                runner.forward(named)
                prompt = dataclasses.replace(
                    named,
                    query_starts=torch.tensor([0, rows], dtype=torch.int32),
                    kv_lens=torch.tensor([rows], dtype=torch.int32),
                    block_tables=(batch.block_tables[0][:1],),
                    logit_rows=torch.tensor([rows - 1]),
                    max_query_len=rows,
                )
                runner.forward(prompt)
            draws = torch.zeros((rows, 5), dtype=torch.float64)
            runner.launch(batch, draws, None).is_read = True
        with on_device(model.device):
            logits = torch.zeros((3, CONFIG.vocab_size), device=model.device)
            for number in (1, 3, 16, 40):
                ones = np.ones(number, np.float32)
                edit_logits(logits, [(np.arange(number), ones, ones)] * 3)
            for number in (1, 2, 5, 21):
                gather_logprobs(logits, torch.zeros((3, number), dtype=torch.int64, device=model.device))
            runner.copy_blocks(0, [(1, 2), (3, 4)])
            runner.close()
    for late in sorted(gpu.variants - ready):
        print(late)


if __name__ == "__main__":
    main()
