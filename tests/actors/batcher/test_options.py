"""The options and their documented defaults."""

import pytest

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError


def test_a07_the_defaults_are_the_documented_ones() -> None:
    engine, batcher = EngineOptions(), BatcherOptions()
    assert (engine.model_path, engine.n_ctx, engine.n_gpu_layers, engine.dtype) == ("smollm2", 8192, -1, "auto")
    assert (batcher.n_parallel, batcher.batch_timeout, batcher.max_batch_tokens) == (8, 20.0, 512)
    assert (batcher.batch_size, batcher.flush_size) == (0, 8)
    assert batcher.scheduling.max_num_requests == 8


@pytest.mark.parametrize("name", ["batch_size", "batch_timeout", "max_queue", "max_held_prompts"])
def test_a_negative_option_is_named(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        BatcherOptions(**{name: -1})


def test_what_the_scheduler_refuses_is_named() -> None:
    with pytest.raises(SchedulerError, match="max_batch_tokens"):
        BatcherOptions(max_batch_tokens=0)
    with pytest.raises(OptionError, match="system_prompts"):
        BatcherOptions(system_prompts=["a", "b"], max_held_prompts=1)
