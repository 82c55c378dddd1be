"""Answers of a service with a drafter, to compare with those of the same service without one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio

from genbatch import open_batcher

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "log-probs": {"temperature": 0, "logprobs": 3},
    "three choices": {"temperature": 1.0, "seed": 11, "n": 3},
    "a grammar": {"temperature": 0.7, "seed": 2, "regex": "([a-z] ?){60}", "ignore_eos": False},
}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


async def answers(path: Path, draft: str, requests: Sequence[dict[str, Any]], **options: Any) -> tuple[list[Any], Any]:
    """Return each request's tokens and log-probabilities by choice, and the service's counters."""
    found: dict[int, Any] = {}
    fixed = {"dtype": "float32", "n_ctx": 1024, "batch_timeout": 0, "prompt_lookup": False}
    async with open_batcher(str(path), draft=draft, n_parallel=8, **fixed, **options) as batcher:

        async def ask(index: int, request: dict[str, Any]) -> None:
            fields = {"token_ids": prompt_of(20 + index, index), "max_tokens": 60, "ignore_eos": True, **request}
            answer = await batcher.generate(**fields)
            found[index] = [(choice.token_ids, choice.logprobs) for choice in answer.choices]

        async with trio.open_nursery() as nursery:
            for index, request in enumerate(requests):
                nursery.start_soon(ask, index, request)
        return [found[index] for index in range(len(requests))], await batcher.stats()
