"""What is largest in a row of logits, found in C while they are computed, against torch."""

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.runner import NativeRunner, native_runner
from genbatch.nif.runner import RaggedBatch
from genbatch.nif.sampling.choice import greedy
from genbatch.nif.sampling.sampler import SampleFault

MODES = ("float32", "bfloat16", "int8")
LENGTH = 40

Layout = Callable[..., RaggedBatch]
Models = Callable[..., Model]
Change = Callable[[torch.Tensor], torch.Tensor]


def opened(model: Model, mode: str, n_threads: int = 2) -> NativeRunner:
    runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=n_threads)
    runner.allocate([16] * len(runner.groups), 16)
    return runner


def with_head(model: Model, change: Change) -> Model:
    """A copy of the model with a head of its own, changed, and as many tokens as that has rows."""
    hf = copy.deepcopy(model.hf)
    weight = change(hf.lm_head.weight.detach().clone())
    hf.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return replace(model, hf=hf, vocab_size=len(weight))


def tokens_of(model: Model, seed: int = 3) -> list[int]:
    drawn: list[int] = torch.randint(
        model.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return drawn


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "llama_odd", "qwen2"])
@settings(max_examples=6, deadline=None)
@given(size=st.integers(1, LENGTH), n_threads=st.integers(1, 3))
def test_the_largest_logit_is_that_of_the_logits_with_and_without_them(
    native_model: Models, layout: Layout, name: str, mode: str, size: int, n_threads: int
) -> None:
    model = native_model(name, "bfloat16" if mode == "bfloat16" else "float32")
    with closing(opened(model, mode, n_threads)) as runner:
        batch = layout(len(runner.groups), [(0, tokens_of(model)[:size], 0)], 8, 16)
        want = runner.forward(batch)
        logits, both = runner.forward_largest(batch, with_logits=True)
        none, alone = runner.forward_largest(batch, with_logits=False)
    assert none is None
    assert logits is not None and np.array_equal(logits, want)
    for largest in (both, alone):
        assert np.array_equal(largest.values, want.max(axis=1))
        assert np.array_equal(largest.token_ids, want.argmax(axis=1))


def halves_alike(weight: torch.Tensor) -> torch.Tensor:
    return weight[: len(weight) // 2].repeat(2, 1)


def all_alike(weight: torch.Tensor) -> torch.Tensor:
    """An odd number of rows, so that the last block of the head is padded."""
    return weight[:1].repeat(len(weight) - 13, 1)


@pytest.mark.parametrize("change", [halves_alike, all_alike])
def test_of_equal_logits_the_lowest_id_is_taken(native_model: Models, layout: Layout, change: Change) -> None:
    """With all alike a row's logits are all below zero or all above: the padding, which is zero, must not win."""
    model = with_head(native_model("llama_odd"), change)
    with closing(opened(model, "float32", n_threads=3)) as runner:
        tokens = [token % model.vocab_size for token in tokens_of(model)]
        logits, largest = runner.forward_largest(layout(1, [(0, tokens, 0)], 8, 16), with_logits=True)
    assert logits is not None
    assert (largest.token_ids < model.vocab_size // 2).all()
    assert np.array_equal(largest.token_ids, logits.argmax(axis=1))
    assert np.array_equal(largest.values, logits.max(axis=1))
    if change is all_alike:
        assert (largest.values < 0).any(), "nothing could have lost against the padding"


# Weights are finite, or the model is refused; what a row makes of them is infinite with the head, NaN with the norm.
@pytest.mark.parametrize("name", ["lm_head", "model.norm"])
def test_a_row_that_is_not_finite_is_a_fault_and_no_token(native_model: Models, layout: Layout, name: str) -> None:
    model = with_head(native_model("llama"), lambda weight: weight)
    model.hf.get_submodule(name).weight[7] = 3e38
    model.hf.get_submodule("model.norm").weight[3] = 10.0  # a product with the head of more than float32 holds
    with closing(opened(model, "float32")) as runner:
        _, largest = runner.forward_largest(layout(1, [(0, tokens_of(model), 0)], 8, 16), with_logits=False)
    drawn = greedy(largest)
    assert (np.isnan if name == "model.norm" else np.isinf)(largest.values).any()
    assert [isinstance(draw, SampleFault) for draw in drawn] == (~np.isfinite(largest.values)).tolist()
