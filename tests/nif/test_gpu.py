"""What only a GPU can show: bfloat16 kernels, captured graphs, steps that never wait for the device."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def gpu_model(tiny_model_dir: Any) -> Any:
    """gpu_model("llama") on the GPU in float32."""
    from genbatch.nif.models.model import load_model

    loaded: dict[str, Any] = {}

    def model(family: str) -> Any:
        if family not in loaded:
            directory: Path = tiny_model_dir(family)
            loaded[family] = load_model(str(directory), dtype="float32")
        return loaded[family]

    return model


def decode_batch(groups: int, num_tokens: int, length: int) -> Any:
    """Row r decodes position length - 1 in its own two blocks."""
    from genbatch.nif.batch import RaggedBatch

    table = torch.arange(2 * num_tokens, dtype=torch.int32).view(num_tokens, 2)
    position = torch.full((num_tokens,), length - 1)
    slots = table[:, (length - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    return RaggedBatch(
        input_ids=torch.arange(num_tokens) + 3,
        positions=position,
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        kv_lens=torch.full((num_tokens,), length, dtype=torch.int32),
        slots=(slots,) * groups,
        block_tables=(table,) * groups,
        logit_rows=torch.arange(num_tokens),
        max_query_len=1,
        max_kv_len=length,
    )


def runner_for(model: Any, **options: Any) -> Any:
    from genbatch.nif.runners.triton_runner import TritonRunner

    runner = TritonRunner(model, **options)
    runner.allocate([64] * len(model.groups), BLOCK_SIZE)
    return runner


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_h14_replay_equals_eager(gpu_model: Any, family: str) -> None:
    from genbatch.nif.runners.graph_options import GraphOptions

    model = gpu_model(family)
    eager, graphed = runner_for(model), runner_for(model, graphs=GraphOptions(max_batch_size=16))
    for length in range(1, 20):
        batch = decode_batch(len(model.groups), 1 + length % 9, length)
        torch.testing.assert_close(graphed.forward(batch), eager.forward(batch), rtol=1e-5, atol=1e-5)


def test_h14_no_more_graphs_are_kept_than_allowed(gpu_model: Any) -> None:
    from genbatch.nif.runners.graph_options import GraphOptions

    model = gpu_model("llama")
    runner = runner_for(model, graphs=GraphOptions(max_batch_size=16, max_cached_graphs=2))
    for num_tokens in (1, 2, 4, 8, 16, 1):
        runner.forward(decode_batch(1, num_tokens, 3))
        assert len(runner._graphs.cache) == 2


@pytest.mark.parametrize("graphed", [True, False])
def test_a_step_never_waits_for_the_device(gpu_model: Any, graphed: bool) -> None:
    from genbatch.nif.runners.graph_options import GraphOptions

    model = gpu_model("llama")
    runner = runner_for(model, graphs=GraphOptions(max_batch_size=8) if graphed else None)
    batch = decode_batch(1, 5, 3)
    runner.forward(batch)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tier", ["lean", "general"])
def test_both_tiers_equal_the_torch_runner_on_the_gpu(gpu_model: Any, tier: Any) -> None:
    from genbatch.nif.runners.torch_runner import TorchRunner

    model = gpu_model("qwen3")
    plain = TorchRunner(model)
    plain.allocate([64] * len(model.groups), BLOCK_SIZE)
    runner = runner_for(model, tier=tier)
    for length in range(1, 8):
        batch = decode_batch(len(model.groups), 4, length)
        expected = plain.forward(on(batch, model.device))
        torch.testing.assert_close(runner.forward(batch), expected, rtol=1e-3, atol=1e-3)


def on(batch: Any, device: torch.device) -> Any:
    moved = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, tuple):
            moved[field.name] = tuple(tensor.to(device) for tensor in value)
    return dataclasses.replace(batch, **moved)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_in_bfloat16_equals_its_twin(num_splits: int) -> None:
    from genbatch.nif.kernels import reference
    from genbatch.nif.kernels.paged_attention import paged_attention

    generator = torch.Generator().manual_seed(0)
    cache_shape = (40, 8, 16, 128)
    keys, values = (torch.randn(cache_shape, generator=generator).cuda().bfloat16() for _ in range(2))
    query = torch.randn((5, 16, 128), generator=generator).cuda().bfloat16()
    table = torch.randint(40, (5, 32), generator=generator, dtype=torch.int32).cuda()
    starts = torch.arange(6, dtype=torch.int32).cuda()
    kv_lens = torch.tensor([1, 17, 0, 300, 512], dtype=torch.int32).cuda()
    arguments = (query, keys, values, table, starts, kv_lens)
    expected = reference.paged_attention(*arguments, scale=0.09)
    actual = paged_attention(*arguments, scale=0.09, max_query_len=1, num_splits=num_splits)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_blocks_read_from_a_gpu_are_pinned(gpu_model: Any) -> None:
    runner = runner_for(gpu_model("llama"))
    content = runner.read_blocks(0, [3, 4])
    assert content.is_pinned()
    runner.write_blocks(0, [5, 6], content)
    assert runner.read_blocks(0, [5, 6]).equal(content)
