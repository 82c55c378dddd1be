"""Measurements without a service: the batch manager, and the floor of a decode step's time.

GptManagerClient turns the batch manager's callbacks into a client's streams, and counts the returned logits.

async with open_gpt_manager(model, [load], n_parallel=8, gather_context_logits=True) as client:
    async with client.stream([5, 6, 7], max_tokens=4, ignore_eos=True) as stream: ...
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import trio

from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.clients.bench.workloads import ScriptedLoad
from genbatch.clients.gpt_manager.manager import GptManager
from genbatch.clients.gpt_manager.requests import BuildConfig, InferenceRequest, Tensor, TrtGptModelType
from genbatch.clients.interface import TokenStream
from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import ChoosingRunner, RaggedBatch, Runner, host_copy
from genbatch.proto.errors import EngineError
from genbatch.proto.messages import Result, Token, Usage

_NO_END = -1


@dataclass(slots=True)
class LogitsSeen:
    """Counts of the returned logits, without dummy tensors.

    Args:
        context_rows, generation_rows: rows of logits, each as wide as the vocabulary.
        num_bytes: bytes of both kinds of rows.
    """

    context_rows: int = 0
    generation_rows: int = 0
    num_bytes: int = 0


class GptManagerClient:
    """Streams over a GptManager. Use it on the event loop on which it was made."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seen = LogitsSeen()
        self._trio = trio.lowlevel.current_trio_token()
        self._ids = count(1)
        self._waiting: list[InferenceRequest] = []
        self._stopped: set[int] = set()
        self._streams: dict[int, tuple[TokenStream, int]] = {}  # by request id, with the prompt's length

    @asynccontextmanager
    async def stream(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = True
    ) -> AsyncIterator[TokenStream]:
        """Stream as `Client.stream` does, for token ids and always to the end of `max_tokens`."""
        assert ignore_eos, "the batch manager is asked for scripted lengths"
        request_id, stream = next(self._ids), TokenStream()
        tensors = {
            "input_ids": np.array([prompt], np.int32),
            "request_output_len": np.array([[max_tokens]], np.int32),
            "end_id": np.array([[_NO_END]], np.int32),
            "streaming": np.array([[True]]),
        }
        self._streams[request_id] = stream, len(prompt)
        self._waiting.append(InferenceRequest(request_id, tensors))
        try:
            yield stream
        finally:
            if self._streams.pop(request_id, None) is not None and stream.final is None:
                self._stopped.add(request_id)

    def take_logits(self) -> LogitsSeen:
        """Return the counts since the last call, and reset them."""
        seen, self.seen = self.seen, LogitsSeen()
        return seen

    def stop_all(self) -> None:
        """Stop all requests."""
        self._waiting.clear()
        self._stopped.update(self._streams)

    # The callbacks, on the manager's thread: a list's append, pop and a set's copy are atomic.

    def get_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        """GetInferenceRequestsCallback."""
        room = len(self._waiting) if max_num_requests < 0 else max_num_requests
        return [self._waiting.pop(0) for _ in range(min(room, len(self._waiting)))]

    def send_response(self, request_id: int, tensors: Sequence[Tensor], final: bool, error: str) -> None:
        """SendResponseCallback."""
        self._trio.run_sync_soon(self._receive, request_id, tensors, final, error)

    def poll_stop(self) -> set[int]:
        """PollStopSignalCallback."""
        return self._stopped.copy()

    def _receive(self, request_id: int, tensors: Any, final: bool, error: str) -> None:
        stream, prompt_tokens = self._streams.get(request_id, (None, 0))
        if final:
            self._stopped.discard(request_id)
        if stream is None:
            return
        if error:
            stream.fail(EngineError(error))
            return
        self._count(tensors)
        received = int(tensors.sequence_length[0, 0]) - prompt_tokens
        for token_id in tensors.output_ids[0, 0].tolist():
            stream.push(Token(text="", token_id=token_id, index=received - 1))
        if final:
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=received)
            stream.finish(Result(text="", token_ids=[], finish_reason="length", usage=usage))

    def _count(self, tensors: Any) -> None:
        context, generation = tensors.context_logits, tensors.generation_logits
        for logits in (context, generation):
            if logits.shape[-1] == self.vocab_size:
                self.seen.num_bytes += logits.nbytes
        if context.shape[-1] == self.vocab_size:
            self.seen.context_rows += context.shape[1]
        if generation.shape[-1] == self.vocab_size:
            self.seen.generation_rows += generation.shape[2]


@asynccontextmanager
async def open_gpt_manager(
    model: Model, loads: Sequence[ScriptedLoad], n_parallel: int, **build: bool
) -> AsyncIterator[GptManagerClient]:
    """Run a batch manager with room for the loads while the body runs.

    Args:
        n_parallel: most requests in flight.
        build: fields of BuildConfig, which select the logits to gather.

    Raises:
        OptionError: the manager's KV does not fit into memory.
    """
    client = GptManagerClient(model.vocab_size)
    requests = [request for load in loads for request in load.requests]
    config = BuildConfig.named(
        max_batch_size=n_parallel,
        max_input_len=max(len(request.prompt) for request in requests),
        max_output_len=max(request.max_tokens for request in requests),
        **build,
    )

    def start() -> GptManager:
        return GptManager(
            model,
            TrtGptModelType.INFLIGHT_FUSED_BATCHING,
            1,
            SchedulerPolicy.MAX_UTILIZATION,
            client.get_requests,
            client.send_response,
            client.poll_stop,
            build_config=config,
        )

    manager = await trio.to_thread.run_sync(start)
    try:
        yield client
    finally:
        client.stop_all()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(manager.close)


# The number of timed steps, and of warm-up steps before them.
STEPS, WARM_UP = 25, 3


class DecodeFloor:
    """A model's runner over a KV pool of its own.

    Args:
        options: the options of the measured engine.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: Model = load_model(
            options.model_path, dtype=options.dtype, n_gpu_layers=options.n_gpu_layers, main_gpu=options.main_gpu
        )
        self._new_runner = choose_runner(self._model, options)

    def measure(self, sequences: int, context: int, steps: int = STEPS) -> float:
        """Return the median seconds of a step in which `sequences` sequences each get position `context`.

        The step also finds each row's likeliest token, as greedy decoding needs it.
        """
        runner = self._new_runner(sequences, sequences)
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
        tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        slots = tables[:, last // size].astype(np.int64) * size + last % size
        groups = len(runner.groups)
        return RaggedBatch(
            input_ids=np.random.default_rng(sequences).integers(self._model.vocab_size, size=sequences),
            positions=np.full(sequences, last),
            query_starts=np.arange(sequences + 1, dtype=np.int32),
            kv_lens=np.full(sequences, context, np.int32),
            logit_rows=np.arange(sequences),
            slots=(slots,) * groups,
            block_tables=(tables,) * groups,
            max_query_len=1,
            max_kv_len=context,
        )


def _forward(runner: Runner, batch: RaggedBatch) -> None:
    if isinstance(runner, ChoosingRunner):
        runner.forward_largest(batch, with_logits=False)
    else:
        host_copy(runner.forward(batch).argmax(-1))  # waits for a GPU
