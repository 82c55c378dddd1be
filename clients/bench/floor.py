"""The floor of a decode step: the same step by the model's kernels alone, with nothing around them."""

import time
from statistics import median

import torch

from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.model import Model, load_model
from genbatch.nif.runner import ChoosingRunner, RaggedBatch, Runner

# Steps timed, and steps before that.
STEPS, WARM_UP = 25, 3


class DecodeFloor:
    """A model's runner over a KV pool of its own.

    Args:
        options: of the engine whose floor this is.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: Model = load_model(options.model_path, dtype=options.dtype, n_gpu_layers=options.n_gpu_layers)
        self._new_runner = choose_runner(self._model, options)

    def measure(self, sequences: int, context: int, steps: int = STEPS) -> float:
        """Seconds of a step in which `sequences` sequences get their `context`-th position each, the median.

        Each row's likeliest token is found as well, which is all that greedy decoding needs.
        """
        runner = self._new_runner(sequences)
        blocks = -(-context // self._options.block_size)
        runner.allocate([sequences * blocks] * len(runner.groups), self._options.block_size)
        try:
            batch = self._batch(runner, sequences, context)
            times = []
            for _ in range(WARM_UP + steps):
                started_at = time.perf_counter()
                _forward(runner, batch)
                times.append(time.perf_counter() - started_at)
        finally:
            runner.close()
        return median(times[WARM_UP:])

    def _batch(self, runner: Runner, sequences: int, context: int) -> RaggedBatch:
        size, last = self._options.block_size, context - 1
        blocks = -(-context // size)
        tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
        slots = tables[:, last // size].long() * size + last % size
        generator = torch.Generator().manual_seed(sequences)
        tensors = {
            "input_ids": torch.randint(self._model.vocab_size, (sequences,), generator=generator),
            "positions": torch.full((sequences,), last),
            "query_starts": torch.arange(sequences + 1, dtype=torch.int32),
            "kv_lens": torch.full((sequences,), context, dtype=torch.int32),
            "logit_rows": torch.arange(sequences),
        }
        groups = len(runner.groups)
        return RaggedBatch(
            **{name: tensor.to(runner.device) for name, tensor in tensors.items()},
            slots=(slots.to(runner.device),) * groups,
            block_tables=(tables.to(runner.device),) * groups,
            max_query_len=1,
            max_kv_len=context,
        )


def _forward(runner: Runner, batch: RaggedBatch) -> None:
    if isinstance(runner, ChoosingRunner):
        runner.forward_largest(batch, with_logits=False)
    else:
        runner.forward(batch).argmax(dim=-1)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
