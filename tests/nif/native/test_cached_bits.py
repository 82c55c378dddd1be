"""An answer that rests on the prefix cache is, to the bit, the answer without it, for every kind of layer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.context.context import Context
from genbatch.nif.models.model import Model
from genbatch.nif.native.runner import native_runner

BLOCK = 8
CHUNKS = (1, 3, 13, 40)
TENANTS = (b"one", b"other")
MODELS = (
    *("llama", "mistral", "gemma3", "gpt_oss", "lfm2", "qwen3_5", "granite_hybrid"),
    *("falcon_h1", "mamba2", "nemotron_h"),
)
"""Full attention, windows, both, short convolutions, and states, also beside attention, alone and between MLPs."""

_turns = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.integers(0, 2),  # the stem that a prompt begins with
        st.integers(1, 90),  # how much of it
        st.integers(1, 30),  # tokens of its own
        st.sampled_from(CHUNKS),
    ),
    min_size=2,
    max_size=7,
)


def _stem(number: int) -> list[int]:
    drawn: list[int] = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(number)).tolist()
    return drawn


@pytest.fixture(scope="module")
def uncached(native_model: Callable[..., Model]) -> Callable[[str, str, Sequence[int]], torch.Tensor]:
    """The last token's logits of a prompt that is evaluated in one step, in a context that has seen nothing else."""
    known: dict[tuple[str, str, tuple[int, ...]], torch.Tensor] = {}
    contexts: dict[tuple[str, str], Context] = {}

    def logits(name: str, quantize: str, tokens: Sequence[int]) -> torch.Tensor:
        if (name, quantize) not in contexts:
            runner = native_runner(native_model(name), quantize=quantize, n_threads=1)
            contexts[name, quantize] = Context(
                native_model(name), runner, n_ctx=256, n_parallel=1, block_size=BLOCK, allow_block_sharing=False
            )
        context, key = contexts[name, quantize], (name, quantize, tuple(tokens))
        if key not in known:
            known[key] = context.prefill(tokens, 0, 0)
            context.seq_rm(0)
        return known[key]

    return logits


@pytest.mark.parametrize(("name", "quantize"), [*((name, "none") for name in MODELS), ("gemma3", "int8")])
# A share of what the profile allows, so that a longer one (--hypothesis-profile) lengthens these as well.
@settings(max_examples=max(1, settings.default.max_examples // 5), deadline=None)
@given(turns=_turns, num_blocks=st.integers(16, 40))
def test_h11_an_answer_from_the_cache_is_to_the_bit_the_answer_without(
    name: str,
    quantize: str,
    turns: list[Any],
    num_blocks: int,
    native_model: Callable[..., Model],
    uncached: Callable[..., torch.Tensor],
) -> None:
    model = native_model(name)
    runner = native_runner(model, quantize=quantize, n_threads=1)
    pools = [num_blocks] * len(runner.groups)
    context = Context(model, runner, num_blocks=pools, n_ctx=num_blocks * BLOCK, n_parallel=1, block_size=BLOCK)
    plain = partial(uncached, name, quantize)
    try:
        for number, (tenant, stem, length, own, chunk) in enumerate(turns):
            prompt = _stem(stem)[:length] + [3 + (number * 7 + i) % 317 for i in range(own)]
            done = context.attach_prefix(0, prompt, tenant)
            for start in range(done, len(prompt), chunk):
                logits = context.prefill(prompt[start : start + chunk], 0, start)
            assert torch.equal(logits, plain(prompt))
            token = int(logits.argmax())
            assert torch.equal(context.prefill([token], 0, len(prompt)), plain([*prompt, token]))
            context.seq_rm(0)
            done = context.attach_prefix(0, prompt, tenant)  # the same prompt again, of which its tail may be found
            assert torch.equal(context.prefill(prompt[done:], 0, done), plain(prompt))
            context.seq_rm(0)
            context.kv.check_integrity()
    finally:
        context.close()


@pytest.mark.parametrize("name", MODELS)
def test_h11_a_turn_of_a_chat_evaluates_only_what_is_new(name: str, native_model: Callable[..., Model]) -> None:
    model = native_model(name)
    context = Context(model, native_runner(model, n_threads=1), n_ctx=1024, n_parallel=2, block_size=BLOCK)
    chat: list[int] = []
    for turn in range(5):
        prompt = [*chat, *_stem(turn)[:40]]
        done = context.attach_prefix(0, prompt)
        assert done == len(chat) // BLOCK * BLOCK
        context.prefill(prompt[done:], 0, done)
        chat = prompt
        for token in _stem(turn)[40:49]:
            context.decode_batch([(0, token, len(chat))])
            chat = [*chat, token]
        context.seq_rm(0)
    context.close()
