"""States in C over blocks: text is that of `generate` and bits are the same, however a prompt is cut or taken back."""

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import BambaConfig

from genbatch.nif.context.context import Context
from genbatch.nif.models.architectures import ARCHITECTURES
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.runner import native_runner

NAMES = (
    *("qwen3_5", "qwen3_next", "bamba", "granite_hybrid"),
    *("falcon_h1", "mamba2", "nemotron_h", "olmo_hybrid"),
)
BLOCK = 8
NEW = 12


def prompt_of(length: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def open_context(model: Model, block_size: int = BLOCK) -> Context:
    runner = native_runner(model, n_threads=2)
    return Context(model, runner, n_ctx=512, n_parallel=3, block_size=block_size)


def prefilled(context: Context, seq_id: int, prompt: Sequence[int], chunk: int = 64) -> np.ndarray:
    """The logits of a prompt's last token; what the sequence holds of it is not evaluated again."""
    for start in range(context.kv.length(seq_id), len(prompt), chunk):
        logits = context.prefill(prompt[start : start + chunk], seq_id, start)
    return logits


def continued(context: Context, seq_id: int, logits: np.ndarray) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < NEW and tokens[-1:] != [2]:
        tokens.append(int(logits.argmax()))
        logits = context.prefill(tokens[-1:], seq_id, context.kv.length(seq_id))
    return tokens


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, native_model: Callable[..., Model]) -> Model:
    return native_model(name)


@pytest.fixture
def text_of(name: str, models: ModuleType) -> Callable[[Sequence[int]], list[int]]:
    """What `generate` continues a prompt with; it ends with the token that ends an answer."""
    hf = models.random_model(name)
    hf.set_attn_implementation("eager")

    def text(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            answer = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        new: list[int] = answer[0, len(prompt) :].tolist()
        return new

    return text


@pytest.mark.parametrize("block_size", [1, 3, BLOCK, 40])
def test_bits_do_not_depend_on_chunks_whatever_a_block_holds(
    model: Model, text_of: Callable[[Sequence[int]], list[int]], block_size: int
) -> None:
    context, prompt = open_context(model, block_size), prompt_of(85, 1)
    expected = prefilled(context, 0, prompt, 85)
    assert continued(context, 0, expected) == text_of(prompt)
    for chunk in (1, 5, 33):
        context.seq_rm(0)
        prefilled(context, 0, prompt_of(100, 2))  # other states lie in the blocks
        context.seq_rm(0)
        assert np.array_equal(prefilled(context, 0, prompt, chunk), expected)
    context.close()


def test_sequences_that_share_a_block_do_not_change_its_state(
    model: Model, text_of: Callable[[Sequence[int]], list[int]]
) -> None:
    context, shared = open_context(model), prompt_of(2 * BLOCK + 3, 2)
    prefilled(context, 0, shared)
    ends = [[5], [200], [77, 5]]
    for seq_id in (1, 2):
        context.seq_cp(0, seq_id)
    for seq_id, end in enumerate(ends):
        assert continued(context, seq_id, prefilled(context, seq_id, shared + end)) == text_of(shared + end)
    context.close()


@pytest.mark.parametrize("kept", [24, 25, 28])
def test_drafts_are_taken_back_to_the_bit(model: Model, kept: int) -> None:
    context, prompt = open_context(model), prompt_of(29, 3)
    expected = prefilled(context, 1, prompt)
    prefilled(context, 0, [*prompt[:kept], 9, 9, 9])
    context.seq_rm(0, kept)
    assert np.array_equal(prefilled(context, 0, prompt), expected)
    context.close()


def test_a_saved_state_goes_on_to_the_bit(model: Model, text_of: Callable[[Sequence[int]], list[int]]) -> None:
    context, prompt = open_context(model), prompt_of(29, 4)
    prefilled(context, 0, prompt)
    saved = context.seq_save(0)
    longer = [*prompt, 4, 5]
    expected = prefilled(context, 0, longer)
    other = open_context(model)
    other.seq_load(1, saved)
    logits = prefilled(other, 1, longer)
    assert np.array_equal(logits, expected)
    assert continued(other, 1, logits) == text_of(longer)
    context.close()
    other.close()


def test_what_mamba_2_does_not_compute_is_named() -> None:
    """transformers itself limits steps in a prompt and not in a decode."""
    with pytest.raises(ValueError, match="time_step_limit"):
        ARCHITECTURES["BambaForCausalLM"](BambaConfig(time_step_limit=(0.1, 0.2)))
