"""Prints the kernel variants that a service would compile after it is ready; a process in which Triton compiles.

python -m tests.nif.runners.late_variants graphs:none eager:int8
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
from genbatch.nif.runner import LoraAdapter, LoraLinear, RaggedBatch
from genbatch.nif.runners.triton_runner import Precision, TritonRunner
from tests.nif.runners.fake_gpu import FakeGpu
from tests.nif.runners.test_stream_order import BLOCK_SIZE, CONFIG

RANKS = {1: 8, 2: 40}


def adapter(handle: int) -> LoraAdapter:
    width = CONFIG.num_attention_heads * CONFIG.head_dim
    linear = LoraLinear(
        np.zeros((RANKS[handle], CONFIG.hidden_size), np.float32), np.zeros((width, RANKS[handle]), np.float32), 1.0
    )
    linears = {f"model.layers.{layer}.self_attn.q_proj": linear for layer in range(CONFIG.num_hidden_layers)}
    return LoraAdapter(f"a{handle}", None, "", handle, linears)  # type: ignore[arg-type]


def decodes(rows: int) -> RaggedBatch:
    """Row r decodes position r."""
    return RaggedBatch(
        input_ids=np.arange(rows) + 7,
        positions=np.arange(rows),
        query_starts=np.arange(rows + 1, dtype=np.int32),
        kv_lens=np.arange(rows, dtype=np.int32) + 1,
        slots=(np.arange(rows),),
        block_tables=(np.ones((rows, BLOCK_SIZE * 20), np.int32),),
        logit_rows=np.arange(rows),
        max_query_len=1,
        max_kv_len=rows + 1,
    )


def late_variants(way: str, quantize: str) -> list[str]:
    """Those of a service that captures graphs, or that runs eagerly."""
    gpu = FakeGpu()
    with gpu.active():
        model = gpu.model(CONFIG)
        graphs = GraphOptions(max_batch_size=20) if way == "graphs" else None
        runner = TritonRunner(model, graphs=graphs, precision=Precision(quantize))
        runner.allocate([100], BLOCK_SIZE)
        ready = set(gpu.variants)
        assert ready, "nothing was warmed"
        for handle in RANKS:
            runner.add_adapter(adapter(handle))
        for rows in (1, 2, 9, 16, 17, 20, 40, 64, 70):
            batch = decodes(rows)
            for adapters in (None, np.arange(rows) % 3):
                named = dataclasses.replace(batch, adapters=adapters)
                runner.forward(named)
                prompt = dataclasses.replace(
                    named,
                    query_starts=np.array([0, rows], np.int32),
                    kv_lens=np.array([rows], np.int32),
                    block_tables=(batch.block_tables[0][:1],),
                    logit_rows=np.array([rows - 1]),
                    max_query_len=rows,
                )
                runner.forward(prompt)
                runner.launch(named, np.zeros((rows, 5)), None).is_read = True
        with on_device(model.device):
            logits = torch.zeros((3, CONFIG.vocab_size), device=model.torch_device)
            for number in (1, 3, 16, 40):
                ones = np.ones(number, np.float32)
                edit_logits(logits, [(np.arange(number), ones, ones)] * 3)
            for number in (1, 2, 5, 21):
                gather_logprobs(logits, torch.zeros((3, number), dtype=torch.int64, device=model.torch_device))
            runner.copy_blocks(0, [(1, 2), (3, 4)])
            runner.close()
    return sorted(gpu.variants - ready)


def main() -> None:
    for way in sys.argv[1:]:
        for late in late_variants(*way.split(":")):
            print(way, late)


if __name__ == "__main__":
    main()
