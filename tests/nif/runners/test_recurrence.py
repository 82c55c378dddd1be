"""Recurrent layers over blocks: text is that of `generate`, however a prompt is cut, shared, taken back or saved."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from genbatch.nif.context.context import Context
from genbatch.nif.errors import BatchError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import LayerGroup, Rows
from genbatch.nif.runners.torch_runner import TorchRunner

FAMILIES = (
    *("qwen3_5", "qwen3_next", "bamba", "granite_hybrid"),
    *("falcon_h1", "mamba2", "nemotron_h", "olmo_hybrid", "kimi_linear"),
)
BLOCK = 8
NEW = 12
END = 2


def prompt_of(length: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def open_context(model: Model) -> Context:
    return Context(model, TorchRunner(model), n_ctx=512, n_parallel=3, block_size=BLOCK)


def prefilled(context: Context, seq_id: int, prompt: Sequence[int], chunk: int = 64) -> Rows:
    """The logits of a prompt's last token; what the sequence holds of it is not evaluated again."""
    for start in range(context.kv.length(seq_id), len(prompt), chunk):
        logits = context.prefill(prompt[start : start + chunk], seq_id, start)
    return logits


def continued(context: Context, seq_id: int, logits: Rows) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < NEW and tokens[-1:] != [END]:
        tokens.append(int(logits.argmax()))
        logits = context.prefill(tokens[-1:], seq_id, context.kv.length(seq_id))
    return tokens


@pytest.fixture
def text_of(oracle: Callable[[str], Any]) -> Callable[[str, Sequence[int]], list[int]]:
    """What `generate` continues a prompt with; it ends with the token that ends an answer."""
    return lambda family, prompt: oracle(family).generate(prompt, NEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_generates_in_every_chunking_and_from_the_cache(
    family: str, tiny_model: Callable[[str], Model], text_of: Callable[[str, Sequence[int]], list[int]]
) -> None:
    context, prompt = open_context(tiny_model(family)), prompt_of(37, 1)
    for chunk in (1, 5, BLOCK, 37):
        done = context.attach_prefix(0, prompt)
        assert done == (0 if chunk == 1 else 36)  # all but the last token
        assert continued(context, 0, prefilled(context, 0, prompt, chunk)) == text_of(family, prompt)
        context.seq_rm(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_share_a_block_do_not_change_its_state(
    family: str, tiny_model: Callable[[str], Model], text_of: Callable[[str, Sequence[int]], list[int]]
) -> None:
    context, shared = open_context(tiny_model(family)), prompt_of(2 * BLOCK, 2)
    prefilled(context, 0, shared)
    ends = [[5], [200], [77, 5]]
    for seq_id in (1, 2):
        context.seq_cp(0, seq_id)
    for seq_id, end in enumerate(ends):  # one token at a block's beginning goes another way than several
        assert continued(context, seq_id, prefilled(context, seq_id, shared + end)) == text_of(family, shared + end)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_taken_back_and_what_is_saved_goes_on_as_generate_does(
    family: str, tiny_model: Callable[[str], Model], text_of: Callable[[str, Sequence[int]], list[int]]
) -> None:
    context, prompt = open_context(tiny_model(family)), prompt_of(29, 3)
    prefilled(context, 0, [*prompt, 9, 9])
    context.seq_rm(0, 28)
    logits = prefilled(context, 0, prompt)
    saved = context.seq_save(0)
    assert continued(context, 0, logits) == text_of(family, prompt)
    context.seq_load(1, saved)
    longer = [*prompt, 4, 5]
    assert continued(context, 1, prefilled(context, 1, longer)) == text_of(family, longer)


def test_a_sequence_can_end_where_the_state_of_a_block_is_there(
    tiny_model: Callable[[str], Model],
) -> None:
    context, prompt = open_context(tiny_model("qwen3_5")), prompt_of(4 * BLOCK, 4)
    prefilled(context, 0, prompt)
    with pytest.raises(BatchError, match=f"{4 * BLOCK} is the least"):
        context.seq_rm(0, 4 * BLOCK - 1)
    prefilled(context, 0, [*prompt, 7, 8, 9])
    context.seq_rm(0, 4 * BLOCK)


def test_a_recurrent_group_keeps_the_block_before_the_one_under_way() -> None:
    context_group = LayerGroup((0,), recurs=True).sized(16)
    assert context_group.window == 17
    assert LayerGroup((0,), window=5).sized(16).window == 5
