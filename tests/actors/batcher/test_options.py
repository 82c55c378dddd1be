"""The options and their documented defaults."""

from dataclasses import replace

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


def test_an_idle_batcher_waits_for_all_of_a_window_that_somebody_set() -> None:
    assert BatcherOptions().quiet_s == 0.002
    assert BatcherOptions(batch_timeout=20.0).quiet_s is None and BatcherOptions(batch_size=4).quiet_s is None
    assert BatcherOptions(batch_timeout=20.0, batch_quiet=5.0).quiet_s == 0.005
    again = replace(BatcherOptions(), n_parallel=3)
    assert (again.window_s, again.quiet_s) == (0.02, 0.002)


@pytest.mark.parametrize("name", ["batch_size", "batch_timeout", "batch_quiet", "max_queue", "max_held_prompts"])
def test_a_negative_option_is_named(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        BatcherOptions(**{name: -1})


def test_what_the_scheduler_refuses_is_named() -> None:
    with pytest.raises(SchedulerError, match="max_batch_tokens"):
        BatcherOptions(max_batch_tokens=0)
    with pytest.raises(OptionError, match="system_prompts"):
        BatcherOptions(system_prompts=["a", "b"], max_held_prompts=1)
