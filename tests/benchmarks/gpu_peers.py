"""The loads of the GPU benchmark in transformers."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu_loads import Plan, Request
from transformers import ContinuousBatchingConfig, GenerationConfig

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import ATTENTION_NAME


def peer_generate_batch(model: Model, plan: Plan, requests: Sequence[Request]) -> float:
    """Answer tokens a second of transformers' continuous batching over the same requests, as it configures itself."""
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default the cache and the batch take nearly all memory, which on a CPU is everybody's. One of the two alone is
    # not enough: transformers 5.17 solves for the other.
    on_cpu = model.device.type == "cpu"
    sizes = (
        {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)} if on_cpu else {}
    )
    manager = hf.init_continuous_batching(generation_config=config, **sizes)
    manager.start()
    try:
        begin = time.perf_counter()
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.max_tokens, eos_token_id=-1)
        produced = done = 0
        while done < len(requests):
            if time.perf_counter() - begin > plan.peer_limit_s:
                raise RuntimeError(f"{done} of {len(requests)} requests done after {plan.peer_limit_s:.0f} s")
            result = manager.get_result(timeout=5)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                done += 1
                produced += len(result.generated_tokens)
        elapsed = time.perf_counter() - begin
    finally:
        manager.stop(block=True)
        hf.set_attn_implementation(ATTENTION_NAME)
    return produced / elapsed


def peer_generate(model: Model, plan: Plan, batch_size: int, *, compiles: bool) -> float:
    """Answer tokens a second of `generate`, prefill included.

    Args:
        compiles: whether it has a static cache, for which transformers compiles the model: that takes minutes.
    """
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    ids = torch.randint(model.vocab_size, (batch_size, plan.context), device=model.torch_device)
    options = {
        "max_new_tokens": plan.steps,
        "min_new_tokens": plan.steps,
        "do_sample": False,
        "pad_token_id": 0,
        **({"cache_implementation": "static"} if compiles else {}),
    }
    try:
        for _ in range(2):  # the first compiles and allocates
            synchronize(model.torch_device)
            begin = time.perf_counter()
            hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
            synchronize(model.torch_device)
            elapsed = time.perf_counter() - begin
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    return batch_size * plan.steps / elapsed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
