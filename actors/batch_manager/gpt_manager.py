"""GptManager: TensorRT-LLM's batch manager, a facade over the Batcher for clients that speak in callbacks.

    manager = GptManager(
        "smollm2",
        TrtGptModelType.INFLIGHT_FUSED_BATCHING,
        max_beam_width,
        SchedulerPolicy.MAX_UTILIZATION,
        get_inference_requests_cb,      # (max_num_requests) -> iterable of InferenceRequest; -1: any number
        send_response_cb,               # (request_id, tensors, final, error_message)
        poll_stop_signal_cb,            # () -> set of request ids to stop
        return_batch_manager_stats_cb,  # (json_string)
    )
    ...
    manager.close()                     # what is active ends first

The constructor starts a worker thread, on which all callbacks run.
"""

import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import trio

from genbatch.actors.batch_manager.gpt_engine import open_engine
from genbatch.actors.batch_manager.gpt_iterations import (
    GetInferenceRequestsCallback,
    GptCallbacks,
    GptIterations,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from genbatch.actors.batch_manager.gpt_manager_params import BuildConfig, TrtGptModelOptionalParams
from genbatch.actors.batching.paced_batcher import PacedBatcher
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.batching_type import BatchingType
from genbatch.actors.scheduling.capacity import SchedulerPolicy
from genbatch.nif.models.model import Model

# Room for the calls of one iteration: a client may hand over any number of requests at once.
MAILBOX_SIZE = 2**20
SHUTDOWN_S = 30.0


class GptManager:
    """Reads requests from the client and answers them until it is closed.

    Each request gets exactly one final response, whatever happens to it. A request the engine cannot take is refused
    alone: its id is in flight, a tensor is wrong, it exceeds a limit, or it exceeds the number asked for.

    Args:
        model_path: a Hugging Face directory, a name or a .gguf file; or a model that is loaded already.
        model_type: see BatchingType.
        max_beam_width: most beams of one request.
        scheduler_policy: whether requests may be paused (MAX_UTILIZATION) or are started only once their whole KV
            fits (GUARANTEED_NO_EVICT).
        get_inference_requests_cb: called at the start of every iteration with how many requests can be taken.
        send_response_cb: called at the end of an iteration, with ResponseTensors (none with an error). When it
            raises, the request it was called for ends.
        poll_stop_signal_cb: called at the end of every iteration; those requests end with what they have.
        return_batch_manager_stats_cb: called at the end of every iteration in which a request was active.
        optional_params: see TrtGptModelOptionalParams.
        build_config: limits and outputs that the documents fix when an engine is built.

    Raises:
        ModelError: the model cannot be found, read or served.
        OptionError, SchedulerError: a parameter is out of range, or contradicts another.
    """

    def __init__(
        self,
        model_path: str | Path | Model,
        model_type: BatchingType,
        max_beam_width: int,
        scheduler_policy: SchedulerPolicy,
        get_inference_requests_cb: GetInferenceRequestsCallback,
        send_response_cb: SendResponseCallback,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        *,
        build_config: BuildConfig | None = None,
    ) -> None:
        self._engine = open_engine(
            model_path,
            model_type,
            max_beam_width,
            scheduler_policy,
            optional_params or TrtGptModelOptionalParams(),
            build_config or BuildConfig(),
        )
        self._callbacks = GptCallbacks(
            get_inference_requests_cb, send_response_cb, poll_stop_signal_cb, return_batch_manager_stats_cb
        )
        self._closing = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="genbatch-batch-manager")
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self.close()

    def close(self) -> None:
        """Takes no more requests, waits until none is active, ends the worker. Closing twice is fine.

        Called by a callback it does not wait.

        Raises:
            Exception: what ended the worker early: a callback other than the send callback, or the model's actor.
        """
        self._closing.set()
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_closing(self) -> bool:
        # A program that ends without closing must not wait for its own worker for ever.
        return self._closing.is_set() or not threading.main_thread().is_alive()

    def _work(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failure = _innermost(error)
        finally:
            self._started.set()

    async def _main(self) -> None:
        engine = self._engine
        batcher = PacedBatcher(
            partial(
                engine.engine.open_context,
                n_parallel=engine.options.n_parallel,
                n_held=0,
                n_batch=engine.options.max_batch_tokens,
            ),
            engine.options,
        )
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, batcher, name="batcher", mailbox_size=MAILBOX_SIZE, shutdown_s=SHUTDOWN_S)
            self._started.set()
            await GptIterations(ref, nursery, engine, self._callbacks, self._is_closing).run()
            await ref.stop(timeout=None)


def _innermost(error: BaseException) -> BaseException:
    """The failure itself, out of the groups that nurseries put around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
