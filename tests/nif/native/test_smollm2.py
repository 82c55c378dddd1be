"""The default model through the C kernels: token for token what transformers generates in float32."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.library import WEIGHT_I8, WEIGHT_U4
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import RaggedBatch
from genbatch.nif.runners.torch_runner import ATTENTION_NAME

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "def fibonacci(n):\n",
]
NEW_TOKENS = 24
BLOCKS = 4


@pytest.fixture(scope="module")
def generated(smollm2: Model) -> list[tuple[list[int], list[int]]]:
    """Per prompt its tokens and those that transformers' greedy `generate` adds."""
    answers = []
    smollm2.hf.set_attn_implementation("sdpa")
    try:
        for prompt in PROMPTS:
            ids = torch.tensor([smollm2.tokenizer.encode(prompt)])
            out = smollm2.hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
            answers.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    finally:
        smollm2.hf.set_attn_implementation(ATTENTION_NAME)
    return answers


def test_greedy_decoding_in_a_batch_equals_generate(
    smollm2: Model, layout: Callable[..., RaggedBatch], generated: list[tuple[list[int], list[int]]]
) -> None:
    runner = NativeRunner(ModelWeights(smollm2))
    runner.allocate([len(PROMPTS) * BLOCKS], 16)
    past, feed = [0] * len(PROMPTS), [prompt for prompt, _ in generated]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(NEW_TOKENS):
        parts = [(s, feed[s], past[s]) for s in range(len(PROMPTS))]
        logits = runner.forward(layout(1, parts, BLOCKS, 16))
        ends = np.cumsum([len(tokens) for tokens in feed]) - 1
        past = [p + len(tokens) for p, tokens in zip(past, feed, strict=True)]
        feed = [[int(token)] for token in logits[ends].argmax(-1)]
        for tokens, new in zip(got, feed, strict=True):
            tokens += new
    runner.close()
    assert got == [answer for _, answer in generated]


def test_int8_keeps_the_4_bit_weights_as_they_are_and_the_likelihood_close(
    smollm2: Model, layout: Callable[..., RaggedBatch], generated: list[tuple[list[int], list[int]]]
) -> None:
    weights = ModelWeights(smollm2, "int8")
    assert {layer.gate_up.kind for layer in weights.layers} == {WEIGHT_U4}
    assert weights.struct.head.kind == WEIGHT_I8
    losses = []
    for packed in (ModelWeights(smollm2), weights):
        runner = NativeRunner(packed)
        runner.allocate([len(PROMPTS) * BLOCKS], 16)
        texts = [prompt + answer for prompt, answer in generated]
        logits = runner.forward(layout(1, [(s, text, 0) for s, text in enumerate(texts)], BLOCKS, 16))
        runner.close()
        targets = torch.tensor([token for text in texts for token in [*text[1:], -100]])
        losses.append(float(torch.nn.functional.cross_entropy(torch.from_numpy(logits), targets)))
    assert abs(losses[1] - losses[0]) < 0.05
