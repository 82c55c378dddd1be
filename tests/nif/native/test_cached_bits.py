"""An answer that rests on the prefix cache is, to the bit, the answer without it, for every kind of layer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from genbatch.nif.context.context import Context
from genbatch.nif.models.model import Model
from genbatch.nif.native.runner import native_runner
from tests.nif.native.cuts import FAMILIES, Family, judge

BLOCK = 8
WORLDS = 2  # a family; `make cuts` draws 600


@pytest.mark.parametrize("name", FAMILIES)
def test_h11_an_answer_from_the_cache_is_to_the_bit_the_answer_without(name: str, tmp_path: Path) -> None:
    family = Family(name, tmp_path)
    worlds = [judge(seed, family) for seed in range(WORLDS)]
    family.close()
    assert any(world.num_reused for world in worlds)


@pytest.mark.parametrize("name", FAMILIES)
def test_h11_a_turn_of_a_chat_evaluates_only_what_is_new(name: str, native_model: Callable[..., Model]) -> None:
    model = native_model(name)
    context = Context(model, native_runner(model, n_threads=1), n_ctx=1024, n_parallel=2, block_size=BLOCK)
    texts: list[list[int]] = torch.randint(3, 320, (6, 41), generator=torch.Generator().manual_seed(1)).tolist()
    chat: list[int] = []
    for turn in range(6):
        prompt = [*chat, *texts[turn][:34]]
        done = context.attach_prefix(0, prompt)
        assert done == len(chat) // BLOCK * BLOCK
        context.prefill(prompt[done:], 0, done)
        chat = prompt
        for token in texts[turn][34:41]:
            context.decode_batch([(0, token, len(chat))])
            chat = [*chat, token]
        context.seq_rm(0)
    context.close()
