"""GptIterations: the token generation loop of the batch manager, its callbacks at the documented points.

An iteration:

    fetch       GetInferenceRequestsCallback(free capacity); what is refused waits for the respond phase
    step        one `Iterate` of the Batcher: finish, plan, start, step
    stop        PollStopSignalCallback; the Batcher ends those requests and frees what they hold
    respond     SendResponseCallback, once for each new token of a stream and for each request that has ended
    report      ReturnBatchManagerStatsCallback, if any request was active

The callbacks run on the event loop's thread, one at a time: while one runs nothing else happens here.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from genbatch.actors.batch_manager.gpt_engine import GptEngine
from genbatch.actors.batch_manager.gpt_request import GptRequest, read_request
from genbatch.actors.batch_manager.gpt_statistics import GptStatistics
from genbatch.actors.batch_manager.response_tensors import (
    ResponseTensors,
    last_response,
    stream_response,
    whole_response,
)
from genbatch.actors.batching.iteration import Interrupt, Iterate, Iteration
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorError
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.inference_request import InferenceRequest, Tensor
from genbatch.proto.messages import Token

log = logging.getLogger("genbatch")

# How soon an idle loop asks for requests again: the documented loop never rests, and this one takes no core of it.
IDLE_POLL_S = 0.002

GetInferenceRequestsCallback = Callable[[int], Iterable[InferenceRequest]]
SendResponseCallback = Callable[[int, Sequence[Tensor], bool, str], None]
PollStopSignalCallback = Callable[[], Set[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GptCallbacks:
    """The client's functions; the last two may be missing."""

    get_inference_requests: GetInferenceRequestsCallback
    send_response: SendResponseCallback
    poll_stop_signal: PollStopSignalCallback | None = None
    return_batch_manager_stats: ReturnBatchManagerStatsCallback | None = None


class GptIterations:
    """The loop over a paced Batcher.

    Args:
        batcher: the Batcher's ref.
        nursery: where the calls wait for their replies.
        is_closing: whether to take no more requests and to end once none is active.
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
        """Iterates until told to close and nothing is active; whatever ends it, every request gets its final."""
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
                # Shielded: a crash of the model's actor cancels this task too, and the finals come first.
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
        for wanted in self._callbacks.get_inference_requests(capacity):
            try:
                await self._accept(wanted)
            except GenbatchError as error:
                self._refused.append((wanted.request_id, str(error)))

    async def _accept(self, wanted: InferenceRequest) -> None:
        if wanted.request_id in self._active:
            raise InvalidRequest("request_id", f"{wanted.request_id} is in flight")
        limit = self._engine.build.max_batch_size
        if limit is not None and len(self._active) >= limit:
            raise QueueFull(f"{limit} requests are in flight, as many as max_batch_size allows")
        request = read_request(wanted, self._engine)
        if self._engine.overlap:
            sizes = [sum(other.micro_batch == index for other in self._active.values()) for index in (0, 1)]
            request.micro_batch = int(sizes[1] < sizes[0])
        self._active[request.request_id] = request
        # Started one after the other, so that the mailbox has them in the client's order.
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
            request.error = Unavailable(f"the model's actor is gone: {error}")

    async def _iterate(self) -> None:
        widths = {request.message.tag: request.message.beam_width for request in self._active.values()}
        turn = self._turn()
        sit_out = frozenset(one.message.tag for one in self._active.values() if one.micro_batch != turn)
        iteration: Iteration = await self._batcher.call(Iterate(sit_out), timeout=None)
        # The replies of requests that ended came no later than this one; their tasks may be behind this one.
        await trio.lowlevel.checkpoint()
        await self._stop()
        self._respond()
        self._report(iteration, widths, turn)
        if not iteration.context and not iteration.generation:
            await trio.sleep(IDLE_POLL_S)

    def _turn(self) -> int:
        """Which micro-batch this iteration evaluates: the other one, unless that one is empty."""
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
        tags = frozenset(self._active[one].message.tag for one in request_ids if one in self._active)
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
        """Sends what is new of a request; its id is free again before its final response."""
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
        """Whether the callback took it; one that raises concerns its own request only."""
        try:
            self._callbacks.send_response(request_id, tensors, final, error)
        except Exception:
            log.exception("the send callback failed on request %d", request_id)
            return False
        return True
