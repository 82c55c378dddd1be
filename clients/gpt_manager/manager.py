"""GptManager: TensorRT-LLM's batch manager, as a facade over the Batcher for clients with callbacks.

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
    manager.close()                     # active requests end first

The constructor starts a worker thread, on which all callbacks run. An iteration of its loop:

    fetch       GetInferenceRequestsCallback(free capacity); refused requests wait for the respond phase
    step        one `Iterate` of the Batcher: finish, plan, start, step
    stop        PollStopSignalCallback; the Batcher ends those requests and frees their slots and blocks
    respond     SendResponseCallback, once for each new token of a stream and for each request that has ended
    report      ReturnBatchManagerStatsCallback, if any request was active

The callbacks run one at a time, and the loop waits for each.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import trio

from genbatch.actors.batcher.paced import Interrupt, Iterate, Iteration, PacedBatcher
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.runtime.errors import ActorError
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.clients.gpt_manager.requests import (
    BuildConfig,
    GptEngine,
    GptRequest,
    InferenceRequest,
    ResponseTensors,
    Tensor,
    TrtGptModelOptionalParams,
    last_response,
    open_engine,
    read_request,
    stream_response,
    whole_response,
)
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.messages import Token

TIMESTAMP = "%m-%d-%Y %H:%M:%S"


class GptStatistics:
    """Turns iterations into reports. It keeps the counter, and V1's group, from one iteration to the next.

    Args:
        model_type: determines the fields of a report.
        max_requests: the "Max Request Count".
    """

    def __init__(self, model_type: BatchingType, max_requests: int) -> None:
        self._model_type = model_type
        self._max_requests = max_requests
        self._counter = 0
        self._group: dict[Hashable, int] = {}  # V1: widths by tag, of ended requests too

    def report(self, iteration: Iteration, widths: Mapping[Hashable, int], micro_batch: int) -> str:
        """Return the statistics of one iteration.

        Args:
            widths: beams of the active requests, by tag.
            micro_batch: the micro-batch that the iteration evaluated.
        """
        self._counter += 1
        fields: dict[str, str | int] = {
            "Timestamp": time.strftime(TIMESTAMP),
            "Iteration Counter": self._counter,
            "Active Request Count": len(widths),
            "Max Request Count": self._max_requests,
            "Max KV cache blocks": iteration.kv_blocks_max,
            "Free KV cache blocks": iteration.kv_blocks_free,
            "Used KV cache blocks": iteration.kv_blocks_used,
            "Tokens per KV cache block": iteration.kv_block_size,
            "Scheduled Requests": len(iteration.context) + len(iteration.generation),
            "Context Requests": len(iteration.context),
        }
        if self._model_type is BatchingType.V1:
            fields |= {
                "Total Generation Tokens": iteration.num_generated_tokens,
                "Total Context Tokens": iteration.num_context_tokens,
                "Empty Generation Slots": self._empty_slots(iteration, widths),
            }
        else:
            fields |= {
                "Generation Requests": len(iteration.generation),
                "Total Context Tokens": iteration.num_context_tokens,
                "MicroBatch ID": micro_batch,
            }
        return json.dumps(fields)

    def _empty_slots(self, iteration: Iteration, widths: Mapping[Hashable, int]) -> int:
        """Return the slots of the group's ended members, which stay empty until the whole group has ended."""
        if not _overlaps(self._group, widths):
            self._group = {}
        for tag in iteration.context:
            self._group[tag] = widths[tag]
        if not iteration.generation:
            return 0
        return sum(self._group.values()) - sum(widths[tag] for tag in iteration.generation)


def _overlaps(group: Collection[Hashable], active: Collection[Hashable]) -> bool:
    return any(tag in active for tag in group)


log = logging.getLogger("genbatch")

# Seconds between two fetches of an idle loop. The documented loop never sleeps; this loop leaves the core to others.
IDLE_POLL_S = 0.002

GetInferenceRequestsCallback = Callable[[int], Iterable[InferenceRequest]]
SendResponseCallback = Callable[[int, Sequence[Tensor], bool, str], None]
PollStopSignalCallback = Callable[[], Set[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GptCallbacks:
    """The client's functions; the last two are optional."""

    get_inference_requests: GetInferenceRequestsCallback
    send_response: SendResponseCallback
    poll_stop_signal: PollStopSignalCallback | None = None
    return_batch_manager_stats: ReturnBatchManagerStatsCallback | None = None


class GptIterations:
    """The loop over a paced Batcher.

    Args:
        batcher: the Batcher's ref.
        nursery: the calls wait for their replies in it.
        is_closing: whether to take no more requests, and to end without active requests.
    """

    def __init__(
        self,
        batcher: ActorRef,
        nursery: trio.Nursery,
        engine: GptEngine,
        callbacks: GptCallbacks,
        is_closing: Callable[[], bool],
    ) -> None:
        self._batcher = batcher
        self._nursery = nursery
        self._engine = engine
        self._callbacks = callbacks
        self._is_closing = is_closing
        self._statistics = GptStatistics(engine.options.batching_type, engine.max_requests)
        self._active: dict[int, GptRequest] = {}  # by request id
        self._refused: list[tuple[int, str]] = []
        self._micro_batch = 0

    async def run(self) -> None:
        """Iterate until the manager closes and no request is active. In every case, each request gets its final."""
        try:
            while True:
                closing = self._is_closing()
                if not closing:
                    await self._fetch()
                if not self._active and not self._refused:
                    if closing:
                        return
                    await trio.sleep(IDLE_POLL_S)
                    continue
                await self._iterate()
        except BaseException as error:
            if isinstance(error, Exception):
                # Shielded, because a crash of the model's actor cancels this task before the finals are sent.
                with trio.CancelScope(shield=True), suppress(ActorError):
                    await self._interrupt(self._active)
            for request in self._active.values():
                request.fault = f"the batch manager has ended: {error!r}"
                request.error = request.error or EngineError(request.fault)
            self._respond()
            raise

    # The phases

    async def _fetch(self) -> None:
        limit = self._engine.build.max_batch_size
        capacity = -1 if limit is None else limit - len(self._active)
        for inference_request in self._callbacks.get_inference_requests(capacity):
            try:
                await self._accept(inference_request)
            except GenbatchError as error:
                self._refused.append((inference_request.request_id, str(error)))

    async def _accept(self, inference_request: InferenceRequest) -> None:
        if inference_request.request_id in self._active:
            raise InvalidRequest("request_id", f"{inference_request.request_id} is in flight")
        limit = self._engine.build.max_batch_size
        if limit is not None and len(self._active) >= limit:
            raise QueueFull(f"{limit} requests are in flight, as many as max_batch_size allows")
        request = read_request(inference_request, self._engine)
        if self._engine.overlap:
            sizes = [sum(other.micro_batch == index for other in self._active.values()) for index in (0, 1)]
            request.micro_batch = int(sizes[1] < sizes[0])
        self._active[request.request_id] = request
        # Tasks start one after another, so that the mailbox has the requests in the client's order.
        await self._nursery.start(self._serve, request)

    async def _serve(self, request: GptRequest, task_status: trio.TaskStatus[None]) -> None:
        keep = request.message.keep

        def on_token(token: Token) -> None:
            request.tokens.append((token, keep.last_generation_row() if keep is not None else None))

        message = replace(request.message, on_token=on_token) if request.streaming else request.message
        task_status.started()
        try:
            request.result = await self._batcher.call(message, timeout=None)
        except GenbatchError as error:
            request.error = error
        except ActorError as error:
            request.error = Unavailable(f"the model's actor has ended: {error}")

    async def _iterate(self) -> None:
        widths = {request.message.tag: request.message.beam_width for request in self._active.values()}
        turn = self._turn()
        sit_out = frozenset(entry.message.tag for entry in self._active.values() if entry.micro_batch != turn)
        iteration: Iteration = await self._batcher.call(Iterate(sit_out), timeout=None)
        # The replies of ended requests have arrived by now, but their tasks may not have run.
        await trio.lowlevel.checkpoint()
        await self._stop()
        self._respond()
        self._report(iteration, widths, turn)
        if not iteration.context and not iteration.generation:
            await trio.sleep(IDLE_POLL_S)

    def _turn(self) -> int:
        """Return this iteration's micro-batch: the other micro-batch, unless it is empty."""
        there = {request.micro_batch for request in self._active.values()}
        other = 1 - self._micro_batch
        if other in there or not there:
            self._micro_batch = other if self._engine.overlap else 0
        return self._micro_batch

    async def _stop(self) -> None:
        stopped = {request_id for request_id, request in self._active.items() if request.fault is not None}
        if self._callbacks.poll_stop_signal is not None:
            stopped |= self._callbacks.poll_stop_signal()
        await self._interrupt(stopped)

    async def _interrupt(self, request_ids: Iterable[int]) -> None:
        tags = frozenset(
            self._active[request_id].message.tag for request_id in request_ids if request_id in self._active
        )
        if tags:
            await self._batcher.call(Interrupt(tags), timeout=None)
            await trio.lowlevel.checkpoint()

    def _respond(self) -> None:
        refused, self._refused = self._refused, []
        for request_id, reason in refused:
            self._send(request_id, (), True, reason)
        for request in list(self._active.values()):
            self._respond_to(request)

    def _respond_to(self, request: GptRequest) -> None:
        """Send the new tokens or the end of a request. Its id is free again before its final response."""
        while request.tokens and request.fault is None:
            token, row = request.tokens.pop(0)
            final = request.result is not None and not request.tokens
            if final:
                del self._active[request.request_id]
            tensors = stream_response(request, token, row, self._engine)
            taken = self._send(request.request_id, tensors, final, "")
            if final:
                return
            if not taken:
                request.fault = "the send callback raised"  # it is stopped in the next iteration
                return
        if request.result is None and request.error is None:
            return
        del self._active[request.request_id]
        if request.fault is not None or request.error is not None:
            self._send(request.request_id, (), True, request.fault or str(request.error) or repr(request.error))
        elif request.streaming:
            self._send(request.request_id, last_response(request), True, "")
        else:
            self._send(request.request_id, whole_response(request, self._engine), True, "")

    def _report(self, iteration: Iteration, widths: dict[Hashable, int], micro_batch: int) -> None:
        if self._callbacks.return_batch_manager_stats is not None and widths:
            self._callbacks.return_batch_manager_stats(self._statistics.report(iteration, widths, micro_batch))

    # Helpers

    def _send(self, request_id: int, tensors: ResponseTensors | tuple[()], final: bool, error: str) -> bool:
        """Call the send callback; return False if it raised, which ends this request only."""
        try:
            self._callbacks.send_response(request_id, tensors, final, error)
        except Exception:
            log.exception("the send callback failed on request %d", request_id)
            return False
        return True


# Room for the calls of one iteration: a client may send any number of requests at once.
MAILBOX_SIZE = 2**20
SHUTDOWN_S = 30.0


class GptManager:
    """Reads requests from the client and answers them until it is closed.

    Each request gets exactly one final response in every case. The engine refuses a request without effect on others:
    its id is in flight, a tensor is wrong, it exceeds a limit, or the client returned more requests than requested.

    Args:
        model_path: a Hugging Face directory, a name or a .gguf file; or a loaded model.
        model_type: see BatchingType.
        max_beam_width: most beams of one request.
        scheduler_policy: MAX_UTILIZATION may pause requests; GUARANTEED_NO_EVICT starts a request only if its whole
            KV fits.
        get_inference_requests_cb: called at the start of every iteration with the free capacity in requests.
        send_response_cb: called at the end of an iteration with ResponseTensors; an error has none. If the callback
            raises, its request ends.
        poll_stop_signal_cb: called at the end of every iteration; these requests end with their output so far.
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
        """Take no more requests, wait for the active requests, and end the worker. A second call does nothing.

        A call by a callback does not wait.

        Raises:
            Exception: the error that ended the worker early, of the model's actor or of a callback (but not of the
                send callback).
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
        # A program that ends without `close` must not wait for its worker for ever.
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
    """Return the error inside the groups that nurseries raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
