"""The loads of the GPU benchmark in transformers, and FlashInfer's decode attention beside ours."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from gpu_loads import Plan, Request
from transformers import ContinuousBatchingConfig, GenerationConfig

from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention, plan_shares
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


def peer_flashinfer(plan: Plan, batch_size: int) -> tuple[float, float]:
    """Seconds of one layer's decode attention, 16 heads over 8 of 128 elements: FlashInfer's, and ours."""
    import flashinfer  # type: ignore[import-not-found]

    device, heads, kv_heads, head_size = torch.device("cuda"), 16, 8, 128
    blocks_each = -(-plan.context // plan.block_size)
    shape = (batch_size * blocks_each, kv_heads, plan.block_size, head_size)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn((batch_size, heads, head_size), dtype=torch.bfloat16, device=device)
    table = torch.randperm(shape[0], device=device).int().view(batch_size, blocks_each)
    lengths = torch.full((batch_size,), plan.context, dtype=torch.int32, device=device)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
    theirs = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "HND"
    )
    last = plan.context - (blocks_each - 1) * plan.block_size
    theirs.plan(
        (starts * blocks_each).int(), table.flatten(), torch.full_like(lengths, last), heads, kv_heads, head_size,
        plan.block_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    shares = plan_shares(starts, lengths, AttentionSetting(processors), max_kv_len=plan.context)
    scale = head_size**-0.5

    def ours() -> torch.Tensor:
        return paged_attention(query, keys, values, table, starts, lengths, shares, scale=scale, max_query_len=1)

    torch.testing.assert_close(ours(), theirs.run(query, (keys, values)), rtol=2e-2, atol=2e-2)
    return seconds_of(lambda: theirs.run(query, (keys, values))), seconds_of(ours)


def seconds_of(work: Callable[[], object], repeats: int = 50) -> float:
    """Median seconds of work on the GPU, by its own clock; the host's launches are not in it."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # cycles, while which the host launches all of it
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[5:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
