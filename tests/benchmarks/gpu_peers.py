"""What transformers does with the loads of the GPU benchmark."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu_loads import Plan, Request
from transformers import ContinuousBatchingConfig, GenerationConfig

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.attention import ATTENTION_NAME


def peer_generate_batch(model: Model, plan: Plan, requests: Sequence[Request]) -> float:
    """Answer tokens a second of transformers' continuous batching over the same requests, as it configures itself."""
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Left to itself it takes nearly all memory for its cache, which is the GPU's but not the CPU's.
    on_cpu = model.device.type == "cpu"
    sizes = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=16)} if on_cpu else {}
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


def peer_static_cache(model: Model, plan: Plan, batch_size: int) -> float:
    """Answer tokens a second of `generate` with a static cache, prefill included."""
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    ids = torch.randint(model.vocab_size, (batch_size, plan.context), device=model.device)
    options = {
        "max_new_tokens": plan.steps,
        "min_new_tokens": plan.steps,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": "static",
    }
    try:
        for _ in range(2):  # the first compiles and allocates
            synchronize(model.device)
            begin = time.perf_counter()
            hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
            synchronize(model.device)
            elapsed = time.perf_counter() - begin
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    return batch_size * plan.steps / elapsed


def peer_vllm(model: Model, plan: Plan, batch_size: int) -> float:
    """Answer tokens a second of vLLM over random weights of the same shape, where it is installed."""
    import tempfile

    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        engine = LLM(directory, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.4)
        prompts = [{"prompt_token_ids": [1 + row] * plan.context} for row in range(batch_size)]
        settings = SamplingParams(temperature=0.0, max_tokens=plan.steps, ignore_eos=True, detokenize=False)
        for _ in range(2):
            begin = time.perf_counter()
            engine.generate(prompts, settings, use_tqdm=False)
            elapsed = time.perf_counter() - begin
    return batch_size * plan.steps / elapsed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
