"""Two peers with a scheduler of their own as engines of `model_files`: OpenVINO GenAI and vLLM's build for CPUs.

Each runs in its own environment. Their lowest door is a pipeline that takes requests of token ids and makes steps of
all of them, so planning and sampling are in their figures, as they are in this engine's through its Batcher
(`throughput.py`). Answers never end early, nothing is cached between requests, and tokens are counted as they come.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks.model_files import CONTEXT, FIRST, POSITIONS, PREFILL, enough

_IN_FLIGHT = 2  # steps that a pipeline may be ahead of the tokens it tells of
_KV_BLOCK = 32  # OpenVINO's, on a CPU
_VLLM_KV_GB = "2"


class Pipeline:
    """What the two have in common; a subclass adds requests, makes steps and drops requests."""

    first_token_s: float

    def __init__(self, threads: int | None) -> None:
        # With one thread a second is one of CPU time, as for the other engines; its own threads do the work.
        self._clock: Callable[[], float] = time.process_time if threads == 1 else time.perf_counter
        self._requests = 0
        self._since_drop: list[int] = []

    def decode(self, count: int) -> float:
        """Decode tokens a second of `count` sequences."""
        for _ in range(count):
            self._ask(CONTEXT, POSITIONS - CONTEXT)
        started, before = set(), 1
        while len(started) < count:
            started |= self._step().keys()
            before += 1
        self._step()
        most = POSITIONS - CONTEXT - before - _IN_FLIGHT
        began, steps, tokens = self._clock(), 0, 0
        while steps < most and not enough(steps, self._clock() - began):
            tokens += sum(self._step().values())
            steps += 1
        rate = tokens / (self._clock() - began)
        self._end_all()
        return rate

    def prefill(self) -> float:
        """Prompt tokens a second."""
        self._prompt(PREFILL)
        began, prompts = self._clock(), 0
        while not enough(prompts, self._clock() - began):
            self._prompt(PREFILL)
            prompts += 1
        return PREFILL * prompts / (self._clock() - began)

    def _prompt(self, length: int) -> None:
        """A whole request of one token."""
        self._ask(length, 1)
        while not self._step():
            pass
        self._end_all()

    def _ask(self, length: int, max_tokens: int) -> None:
        self._requests += 1
        self._since_drop.append(self._requests)
        self._add(self._requests, length, max_tokens)

    def _end_all(self) -> None:
        self._drop(self._since_drop)
        self._since_drop = []

    def _add(self, request_id: int, length: int, max_tokens: int) -> None:
        raise NotImplementedError

    def _step(self) -> dict[int, int]:
        """New tokens by request, of those that have any."""
        raise NotImplementedError

    def _drop(self, request_ids: Sequence[int]) -> None:
        """Ends these, whether they are finished or not."""
        raise NotImplementedError


def _tokens(request_id: int, length: int) -> list[int]:
    """A prompt that no other begins like."""
    return [10 + (request_id * 7919 + index * 31) % 1000 for index in range(length)]


class OpenVino(Pipeline):
    """ContinuousBatchingPipeline over a directory that optimum-intel wrote."""

    def __init__(self, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        del mode  # the directory has one
        super().__init__(threads)
        self._tensor: Callable[[list[int]], Any] = lambda ids: openvino.Tensor(np.array([ids], dtype=np.int64))
        self._settings: Any = openvino_genai.GenerationConfig
        began = time.perf_counter()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = max(batches) * -(-POSITIONS // _KV_BLOCK)
        scheduler.max_num_batched_tokens = POSITIONS
        scheduler.max_num_seqs = max(batches)
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads or len(os.sched_getaffinity(0))}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._prompt(FIRST)
        self.first_token_s = time.perf_counter() - began

    def _add(self, request_id: int, length: int, max_tokens: int) -> None:
        settings = self._settings(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        tensor = self._tensor(_tokens(request_id, length))
        self._handles[request_id] = self._pipeline.add_request(request_id, tensor, settings)

    def _step(self) -> dict[int, int]:
        self._pipeline.step()
        came = {}
        for request_id, handle in self._handles.items():
            while handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                came[request_id] = came.get(request_id, 0) + tokens
        return came

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._handles.pop(request_id).cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class Vllm(Pipeline):
    """vLLM's engine in this process, over a checkpoint in bfloat16, compiled."""

    def __init__(self, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": _VLLM_KV_GB,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the steps are made from here
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        del mode  # it has one
        super().__init__(threads)
        self._settings: Callable[[int], Any] = lambda max_tokens: SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        began = time.perf_counter()
        options = {"max_model_len": POSITIONS, "max_num_seqs": max(batches), "enable_prefix_caching": False}
        self._engine = LLM(path, dtype="bfloat16", skip_tokenizer_init=True, **options).llm_engine
        self._prompt(FIRST)
        self.first_token_s = time.perf_counter() - began

    def _add(self, request_id: int, length: int, max_tokens: int) -> None:
        prompt = {"prompt_token_ids": _tokens(request_id, length)}
        self._engine.add_request(str(request_id), prompt, self._settings(max_tokens))

    def _step(self) -> dict[int, int]:
        came = {int(one.request_id): len(one.outputs[0].token_ids) for one in self._engine.step() if one.outputs}
        return {request_id: tokens for request_id, tokens in came.items() if tokens}

    def _drop(self, request_ids: Sequence[int]) -> None:
        self._engine.abort_request([str(request_id) for request_id in request_ids])
        while self._engine.has_unfinished_requests():
            self._engine.step()
