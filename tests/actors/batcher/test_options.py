"""The options and their documented defaults."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio

from genbatch.actors.batcher import parts
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import decode_options, encode_options
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.nif.context.engine import Engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.loaded_model import Model


def test_a07_the_defaults_are_the_documented_ones() -> None:
    engine, batcher = EngineOptions(), BatcherOptions()
    assert (engine.model_path, engine.n_ctx, engine.n_gpu_layers, engine.dtype) == ("smollm2", 8192, -1, "auto")
    assert (batcher.n_parallel, batcher.batch_timeout, batcher.max_batch_tokens) == (8, 20.0, 512)
    assert (batcher.batch_size, batcher.flush_size) == (0, 8)
    assert batcher.scheduling.max_num_requests == 8


def test_an_idle_batcher_waits_for_all_of_a_window_that_somebody_set() -> None:
    assert BatcherOptions().quiet_s == 0.002
    assert BatcherOptions(batch_timeout=20.0).quiet_s is None and BatcherOptions(batch_size=4).quiet_s is None
    assert BatcherOptions(batch_timeout=20.0, batch_quiet=5.0).quiet_s == 0.005
    again = replace(BatcherOptions(), n_parallel=3)
    assert (again.window_s, again.quiet_s) == (0.02, 0.002)


@pytest.mark.parametrize(("gib", "slots", "tokens"), [(8, 32, 512), (24, 64, 1024), (80, 256, 4096), (141, 256, 4096)])
def test_a_gpu_takes_what_its_memory_holds_where_nothing_is_given(gib: int, slots: int, tokens: int) -> None:
    sent = decode_options(encode_options(BatcherOptions(max_queue=7)), BatcherOptions)  # to the engine's process
    on_gpu = sent.on_device(gib * 2**30)
    assert (on_gpu.n_parallel, on_gpu.max_batch_tokens, on_gpu.target_inter_token_latency_ms) == (slots, tokens, 20.0)
    assert (on_gpu.scheduling.max_num_requests, on_gpu.scheduling.max_batch_tokens) == (slots, tokens)
    assert decode_options(encode_options(EngineOptions()), EngineOptions).on_device("cuda").positions is None
    chosen = BatcherOptions(n_parallel=8, max_batch_tokens=512, target_inter_token_latency_ms=5.0)
    assert chosen.on_device(gib * 2**30) == chosen
    assert EngineOptions(n_ctx=8192).on_device("cuda").positions == 8192


def test_a_cpu_keeps_the_documented_defaults() -> None:
    on_cpu = BatcherOptions().on_device(0)
    assert (on_cpu.n_parallel, on_cpu.max_batch_tokens, on_cpu.target_inter_token_latency_ms) == (8, 512, 12.0)
    assert EngineOptions().on_device("cpu").positions == 8192
    sent = [on_cpu.n_parallel, on_cpu.max_batch_tokens, EngineOptions().on_device("cpu").n_ctx]  # in answers
    assert all(type(number) is int for number in sent)


@pytest.mark.trio
async def test_a_batcher_has_the_defaults_of_the_device_that_holds_the_model(
    tiny_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's runner takes its batches from the host, so its own device says nothing."""
    monkeypatch.setattr(parts, "memory_of", lambda device: 24 * 2**30)
    engine = Engine(tiny_model("llama"), EngineOptions(runner="torch", n_ctx=512))
    options = BatcherOptions(max_queue=7)
    async with trio.open_nursery() as nursery:
        batcher = Batcher(parts.context_factory(engine, options), options)
        ref = await start(nursery, batcher, name="batcher")
        assert batcher.ctx.num_sequences == 64 + options.max_held_prompts
        assert batcher.ctx.n_batch == 1024
        assert (batcher.options.n_parallel, batcher.options.target_inter_token_latency_ms) == (64, 20.0)
        await ref.stop()


@pytest.mark.parametrize("name", ["batch_size", "batch_timeout", "batch_quiet", "max_queue", "max_held_prompts"])
def test_a_negative_option_is_named(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        BatcherOptions(**{name: -1})


def test_what_the_scheduler_refuses_is_named() -> None:
    with pytest.raises(SchedulerError, match="max_batch_tokens"):
        BatcherOptions(max_batch_tokens=0)
    with pytest.raises(OptionError, match="system_prompts"):
        BatcherOptions(system_prompts=["a", "b"], max_held_prompts=1)
