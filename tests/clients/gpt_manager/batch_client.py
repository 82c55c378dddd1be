"""A client of the batch manager: hands over requests, keeps every response, and lets a test wait for the final ones."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.clients.gpt_manager.manager import GptManager
from genbatch.clients.gpt_manager.requests import (
    BuildConfig,
    InferenceRequest,
    KvCacheConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

# Only a hanging manager reaches it.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Response:
    """One call of the send callback."""

    tensors: Any
    final: bool
    error: str


def inference_request(request_id: int, prompt: Sequence[int], length: int, **tensors: Any) -> InferenceRequest:
    """A request with the two tensors that all have, and others given as plain numbers."""
    named = {name: np.array([[value]]) for name, value in tensors.items()}
    ids = np.array([prompt], np.int32)
    return InferenceRequest(request_id, {"input_ids": ids, "request_output_len": np.array([[length]]), **named})


class BatchClient:
    """Its methods `get`, `send`, `poll` and `report` are the four callbacks."""

    def __init__(self, *requests: InferenceRequest) -> None:
        self.waiting = list(requests)
        self.responses: dict[int, list[Response]] = {}
        self.asked: list[int] = []
        self.stats: list[dict[str, Any]] = []
        self.threads: set[str] = set()
        self.to_stop: set[int] = set()
        self.on_send: Callable[[int, Response], None] = lambda request_id, response: None
        self._changed = threading.Condition()

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        self.threads.add(threading.current_thread().name)
        with self._changed:
            self.asked.append(max_num_requests)
            self._changed.notify_all()
            count = len(self.waiting) if max_num_requests < 0 else max_num_requests
            taken, self.waiting = self.waiting[:count], self.waiting[count:]
            return taken

    def send(self, request_id: int, tensors: Any, final: bool, error: str) -> None:
        response = Response(tensors, final, error)
        with self._changed:
            self.responses.setdefault(request_id, []).append(response)
            self._changed.notify_all()
        self.on_send(request_id, response)

    def poll(self) -> set[int]:
        return self.to_stop

    def report(self, text: str) -> None:
        self.stats.append(json.loads(text))

    def add(self, request: InferenceRequest) -> None:
        with self._changed:
            self.waiting.append(request)

    def wait(self, *request_ids: int, finals: int = 1) -> None:
        """Until each of them has had so many final responses."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(len(self.finals(one)) >= finals for one in request_ids), timeout=PATIENCE_S
            )
        assert done, {one: len(self.finals(one)) for one in request_ids}

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until a response, or being asked for requests, makes the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=PATIENCE_S)

    def finals(self, request_id: int) -> list[Response]:
        return [response for response in self.responses.get(request_id, []) if response.final]

    def output(self, request_id: int, prompt: Sequence[int], beam: int = 0) -> list[int]:
        """The output ids of a request that was not streamed."""
        [response] = self.responses[request_id]
        assert response.error == "", response.error
        tensors = response.tensors
        end = int(tensors.sequence_length[0, 0])
        row = tensors.output_ids[0, beam].tolist()
        assert row[: len(prompt)] == list(prompt)
        return row[len(prompt) : end]


@contextmanager
def manager(
    model: Any,
    client: BatchClient,
    *,
    model_type: TrtGptModelType = TrtGptModelType.INFLIGHT_FUSED_BATCHING,
    max_beam_width: int = 1,
    policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION,
    cache: dict[str, Any] | None = None,
    overlap: bool = False,
    chunked: bool = False,
    **build: Any,
) -> Iterator[GptManager]:
    """A running manager over small blocks; closed, and so drained, at the end of the block."""
    params = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig.named(**(cache or {})),
        enable_trt_overlap=overlap,
        enable_chunked_context=chunked,
    )
    chosen = BuildConfig(**{"tokens_per_block": 4, "max_num_tokens": 64, **build})
    callbacks = (client.get, client.send, client.poll, client.report)
    with GptManager(model, model_type, max_beam_width, policy, *callbacks, params, build_config=chosen) as running:
        yield running
