"""What a Batcher opens its context with."""

from collections.abc import Callable
from functools import partial

from genbatch.actors.batching.options import BatcherOptions
from genbatch.nif.context import Context
from genbatch.nif.engine import Engine


def context_factory(engine: Engine, options: BatcherOptions) -> Callable[[], Context]:
    """Makes a context over the loaded model, at a Batcher's start and at each restart."""
    return partial(
        engine.open_context,
        n_parallel=options.n_parallel,
        n_held=options.max_held_prompts,
        n_batch=options.max_batch_tokens,
    )
