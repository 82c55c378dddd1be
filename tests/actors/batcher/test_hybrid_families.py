"""In every mix, callers of families with recurrent states get the text of transformers' `generate`.

And what is evaluated for the turns of a chat, and for callers who share a long system prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch.actors.batcher import drafting
from genbatch.actors.batcher.drafting import DraftCosts
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.messages import Message, Token
from tests.actors.batcher.bench import OracleOf, TinyModel, batcher, gather, prompt_of
from tests.actors.batcher.test_beam_search import reference
from tests.actors.batcher.test_drafting import Guessing
from tests.nif.native.models import build_native_model, random_model
from tests.nif.tiny_models import build_tokenizer
from tests.oracle import Oracle

FAMILIES = (
    *("lfm2", "lfm2_moe", "qwen3_5", "qwen3_next", "bamba", "granite_hybrid"),
    *("falcon_h1", "nemotron_h", "mamba2", "olmo_hybrid", "kimi_linear"),
)
TOKENS = 24
BLOCK = 4
# Layers in the order of Gemma 3 and of Qwen3.5, for prompts of some thousand tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 512},
    "qwen3_5": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}


@dataclass(frozen=True)
class Family:
    """A small model, its runner, and what transformers answers in its place."""

    model: Model
    new_runner: Callable[[Model], Any]
    oracle: Any


@pytest.fixture(scope="module")
def family_of(
    tiny_model: TinyModel, oracle: OracleOf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Family]:
    """family_of("mamba2") runs natively; Kimi-Linear runs in torch."""
    made: dict[str, Family] = {"kimi_linear": Family(tiny_model("kimi_linear"), TorchRunner, oracle("kimi_linear"))}

    def find(name: str) -> Family:
        if name not in made:
            directory = build_native_model(name, tmp_path_factory.mktemp(name), build_tokenizer)
            model = load_model(str(directory), dtype="float32", n_gpu_layers=0)
            made[name] = Family(model, partial(native_runner, n_threads=1), Oracle(directory))
        return made[name]

    return find


@pytest.mark.trio
@pytest.mark.parametrize("host_gib", [0.0, 0.1])
@pytest.mark.parametrize("name", FAMILIES)
async def test_a_crowd_in_little_memory_gets_the_texts_of_generate(
    family_of: Callable[[str], Family], name: str, host_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mix pauses or swaps, prompt chunks, several choices, a cancelled caller and refused drafts."""
    monkeypatch.setattr(drafting, "PromptLookup", Guessing)  # random models do not copy, and every fifth is wrong
    monkeypatch.setattr(DraftCosts, "price", lambda self, num_sequences, num_keys, guess_s: 0.08)
    family = family_of(name)
    prompts = [prompt_of(7 + 2 * seed, seed) for seed in range(5)]
    answers = [family.oracle.generate(prompt, TOKENS) for prompt in prompts]
    monkeypatch.setattr(Guessing, "told", [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    asked = [{"token_ids": prompt, "max_tokens": TOKENS, "ignore_eos": True} for prompt in prompts]
    asked[2]["n"] = 2
    options: dict[str, Any] = {"max_batch_tokens": 16, "prompt_lookup": True, "cpu_offload_space": host_gib}
    options |= {"batch_size": 6, "batch_timeout": 300.0}
    async with (
        batcher(family.model, n_ctx=64, new_runner=family.new_runner, **options) as bench,
        trio.open_nursery() as others,
    ):
        others.start_soon(leave_after, bench, 3)
        results = await gather(bench, asked)
        stats = bench.actor.stats
        if name != "mamba2":  # without attention, a sequence never needs more memory than it had at first
            assert stats.preemptions > 0 and (stats.swaps > 0) == (host_gib > 0)
        results.append(await bench.generate(**asked[0]))  # alone, so that its run of steps has room for drafts
        assert name == "kimi_linear" or stats.drafted_tokens > stats.accepted_draft_tokens
    for expected, result in zip([*answers, answers[0]], results, strict=True):
        for choice in result.choices:
            assert choice.token_ids[: len(expected)] == expected
            assert len(choice.token_ids) == TOKENS


async def leave_after(bench: Any, count: int) -> None:
    """Asks for a long answer, and goes after so many tokens."""
    told: list[Token] = []
    with trio.CancelScope() as scope:

        def listen(token: Token) -> None:
            told.append(token)
            if len(told) == count:
                scope.cancel()

        await bench.generate(listen, token_ids=prompt_of(12, 77), max_tokens=40, ignore_eos=True)
    assert scope.cancelled_caught


@pytest.mark.trio
@pytest.mark.parametrize("name", FAMILIES)
async def test_b16_beams_over_states_are_those_of_transformers(family_of: Callable[[str], Family], name: str) -> None:
    family = family_of(name)
    room: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 12, "max_batch_tokens": 64}
    async with batcher(family.model, new_runner=family.new_runner, **room) as bench:
        for length in (1, 22):
            prompt = prompt_of(length, length)
            result = await bench.generate(token_ids=prompt, beam_width=3, max_tokens=12)
            assert [choice.token_ids for choice in result.choices] == reference(family.oracle, prompt, 3, 12)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """long_model("gemma3") is a small model with that family's order of layers, for 4,096 positions."""
    loaded: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in loaded:
            directory: Path = tmp_path_factory.mktemp(name)
            shape = SHAPES[name]
            sizes = {"max_position_embeddings": 4096, "num_hidden_layers": len(shape["layer_types"])}
            random_model(name, **sizes, **shape).save_pretrained(directory)
            build_tokenizer(directory)
            loaded[name] = load_model(str(directory), dtype="float32", n_gpu_layers=0)
        return loaded[name]

    return model


@pytest.mark.trio
@pytest.mark.parametrize("name", SHAPES)
async def test_a_turn_of_a_chat_evaluates_its_new_tokens_and_less_than_a_block(
    long_model: Callable[[str], Model], name: str
) -> None:
    chat: list[int] = []
    native = partial(native_runner, n_threads=1)
    async with batcher(long_model(name), n_ctx=8192, max_batch_tokens=512, new_runner=native) as bench:
        for turn in range(6):
            new = prompt_of(150 + 7 * turn, turn)
            before = bench.actor.stats.prefilled_tokens
            result = await bench.generate(token_ids=chat + new, max_tokens=41, ignore_eos=True)
            # The last token of an answer was never evaluated.
            assert bench.actor.stats.prefilled_tokens - before <= len(new) + BLOCK
            chat += new + result.token_ids
        assert len(chat) > 1200
        cache = bench.actor.ctx.kv.prefix_cache
        assert cache is not None and not any(cache.num_recomputed.values())


@pytest.mark.trio
@pytest.mark.parametrize("name", SHAPES)
async def test_a_system_prompt_of_two_thousand_tokens_is_evaluated_once_for_32_callers(
    long_model: Callable[[str], Model], name: str
) -> None:
    model = long_model(name)
    system = model.tokenizer.decode(prompt_of(2000, 5))
    native = partial(native_runner, n_threads=1)
    async with batcher(
        model, n_ctx=16384, n_parallel=8, max_batch_tokens=512, max_held_prompts=2, new_runner=native
    ) as bench:
        messages = [Message(role="system", content=system), Message(role="user", content="?")]
        first = await bench.generate(messages=messages, max_tokens=4, ignore_eos=True)
        assert first.usage.prompt_tokens > 2000
        before = bench.actor.stats.prefilled_tokens
        asked = [[messages[0], Message(role="user", content=f"{caller} {caller * 7}?")] for caller in range(31)]
        results = await gather(bench, [{"messages": one, "max_tokens": 4, "ignore_eos": True} for one in asked])
        own = sum(result.usage.prompt_tokens for result in results) - 31 * (first.usage.prompt_tokens - 20)
        assert bench.actor.stats.prefilled_tokens - before <= own + 31 * BLOCK
