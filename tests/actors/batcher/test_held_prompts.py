"""What is held, who shares it, and who makes room for whom."""

from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from genbatch import open_batcher
from genbatch.actors.batcher.calls import SessionCalls
from genbatch.actors.batcher.messages import LoadSession, SaveSession
from genbatch.actors.batcher.requests import HeldPrompt
from genbatch.actors.batcher.slots import HeldPrompts
from genbatch.actors.scheduling.request import RequestList
from genbatch.actors.scheduling.scheduler import FIFOScheduler, MicroBatchOutput
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import Message
from tests.actors.batcher.bench import TinyModel, batcher, prompt_of
from tests.waiting import ENGINE_PATIENCE_S


def prompt(tokens: list[int], key: bytes = b"a", **fields: object) -> HeldPrompt:
    return HeldPrompt(
        request_id=len(tokens), arrival=0, num_prompt_tokens=len(tokens), max_new_tokens=1, tokens=tokens, key=key,
        **fields,
    )  # fmt: skip


def test_the_longest_held_prompt_of_the_owner_is_shared_and_leaves_a_token() -> None:
    held = HeldPrompts(range(4), 1)
    longest, shorter, configured = prompt([1, 2, 3]), prompt([1, 2]), prompt([1], b"", pinned=True)
    for one in (shorter, longest, configured):
        assert held.hold(one)
    assert held.find([1, 2, 3, 4], b"a") is longest
    assert held.find([1, 2, 3], b"a") is shorter
    assert held.find([1, 2, 3, 4], b"b") is held.find([1, 2, 3, 4], None) is configured
    assert held.find([1], b"a") is None


def test_only_what_is_whole_and_not_configured_makes_room_the_least_recent_first() -> None:
    held = HeldPrompts(range(4), 1)
    recent, older = prompt([1, 2], last_used=2.0), prompt([3], last_used=1.0)
    unready, configured = prompt([4, 5]), prompt([6], pinned=True)
    for one in (recent, older, unready, configured):
        assert held.hold(one)
    assert not held.hold(prompt([7])), "every slot is taken"
    for one in (recent, older, configured):
        one.num_computed = len(one.tokens)
    unready.num_computed = 1
    assert held.droppable() == [older, recent]
    assert held.least_recent(besides=older) is recent
    assert held.evaluating() == [unready]
    held.drop(older)
    assert held.hold(prompt([7]))


def test_what_shares_a_sessions_prompt_can_share_the_configured_one_that_it_begins_with() -> None:
    held = HeldPrompts(range(2), 1)
    configured, session = prompt([1], b"", pinned=True), prompt([1, 2, 3])
    assert held.hold(configured)
    slot = held.take_slot()
    assert slot is not None
    held.adopt(session, slot)
    sharer = prompt([1, 2, 3, 4], donor=session)
    assert (sharer.held_donor, sharer.pinned_donor, session.num_shared) == (session, configured, 1)
    held.drop(session)
    assert (sharer.held_donor, sharer.pinned_donor) == (configured, configured)


class RefusesHeld(FIFOScheduler):
    """Says of every prompt that is to be held that it never fits."""

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """See MicroBatchScheduler."""
        held = [one for one in fitting_requests if isinstance(one, HeldPrompt)]
        plan = super().schedule([one for one in fitting_requests if one not in held], inflight_request_ids)
        return replace(plan, never_fitting=[*plan.never_fitting, *held])


@pytest.mark.trio
async def test_a_held_prompt_that_never_fits_is_let_go_and_who_wanted_it_is_served(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    turns: Any = [{"role": "system", "content": "Be brief and be kind. " * 4}, {"role": "user", "content": "Well?"}]
    options: Any = {"dtype": "float32", "n_gpu_layers": 0, "n_ctx": 512}
    texts = []
    for scheduler in ("fifo", f"{__name__}:RefusesHeld"):
        with trio.fail_after(ENGINE_PATIENCE_S):
            async with open_batcher(str(tiny_model_dir("llama")), scheduler=scheduler, **options) as batcher:
                texts.append([(await batcher.generate(messages=turns, max_tokens=4)).token_ids for _ in range(3)])
                held = (await batcher.stats())["held_prompts"]
        assert held == (scheduler == "fifo")
    assert texts[0] == texts[1]


def test_a_session_takes_the_slot_of_what_was_used_longest_ago_but_not_of_what_it_needs() -> None:
    removed: list[int] = []
    held = HeldPrompts(range(2), 1)
    texts = SimpleNamespace(intake=None)
    calls = SessionCalls(cast(Any, SimpleNamespace(seq_rm=removed.append)), held, *cast(Any, [texts, None, None, None]))
    needed, other = prompt([1], last_used=1.0), prompt([2], last_used=2.0)
    for one in (needed, other):
        assert held.hold(one)
        one.num_computed = 1
    slot = other.seq_id
    assert calls._slot(needed) == slot and removed == [slot]
    with pytest.raises(Unavailable, match="no sequence is free"):
        calls._slot(needed)
    assert held.find([1, 2], b"a") is needed


@pytest.mark.trio
@pytest.mark.parametrize("shares_blocks", [False, True])
async def test_tokens_of_a_held_prompt_that_were_evaluated_for_the_very_request_are_not_cached_ones(
    tiny_model_dir: Callable[[str], Path], shares_blocks: bool
) -> None:
    """The second request has its first message held; what was evaluated meanwhile is no saving of its own."""
    options: Any = {"dtype": "float32", "n_gpu_layers": 0, "n_ctx": 512, "allow_block_sharing": shares_blocks}
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with open_batcher(str(tiny_model_dir("llama")), **options) as client:
            cached, evaluated = [], [0]
            for word in ("one", "two", "three"):
                turns: Any = [
                    {"role": "system", "content": "Be brief and kind. " * 4},
                    {"role": "user", "content": word},
                ]
                result = await client.generate(messages=turns, max_tokens=2)
                cached.append(result.usage.cached_tokens)
                evaluated.append((await client.stats())["prefilled_tokens"])
                num_evaluated = evaluated[-1] - evaluated[-2]
                assert cached[-1] + num_evaluated == result.usage.prompt_tokens, word
    assert cached[0] == 0 and (cached[1] > 0) == shares_blocks and cached[2] > 60


@pytest.mark.trio
async def test_a_session_finds_no_room_beside_others_for_now_and_in_a_pool_that_is_too_small_for_good(
    tiny_model: TinyModel,
) -> None:
    model = tiny_model("llama")
    turns = [Message(role="user", content="a word " * 12)]
    save = SaveSession(turns)
    async with batcher(model, n_ctx=256) as bench:
        await bench.generate(messages=turns, max_tokens=1)
        state = await bench.ref.call(save, timeout=None)
        num_positions = await bench.ref.call(LoadSession(state), timeout=None)
    size = 4 * -(-num_positions // 4)
    async with batcher(model, n_ctx=size + 16) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(token_ids=[5] * 20, max_tokens=size - 20, ignore_eos=True))
            while not bench.actor.slots.sequences or bench.actor.ctx.kv.length(0) < 20:
                await trio.lowlevel.checkpoint()
            with pytest.raises(Unavailable, match="others hold them") as refused:
                await bench.ref.call(LoadSession(state), timeout=None)
            assert refused.value.retry_after_ms
            nursery.cancel_scope.cancel()
        while len(bench.actor.requests):
            await trio.lowlevel.checkpoint()
    async with batcher(model, n_ctx=size - 4) as bench:
        with pytest.raises(InvalidRequest, match="KV blocks needed") as refused_for_good:
            await bench.ref.call(LoadSession(state), timeout=None)
        assert refused_for_good.value.field == "state"


@pytest.mark.trio
async def test_other_texts_leave_the_prefix_cache_before_a_prompt_that_its_request_asks_to_keep(
    tiny_model: TinyModel,
) -> None:
    found = {}
    for share in (0.5, 0.0):
        async with batcher(tiny_model("llama"), num_blocks=[64], kept_prefix_share=share) as bench:
            prompt = prompt_of(40, 1)
            await bench.generate(token_ids=prompt, max_tokens=2, cache_ttl_s=3600.0)
            assert (bench.actor.ctx.kv.num_kept > 0) == (share > 0)
            for seed in range(2, 12):
                await bench.generate(token_ids=prompt_of(40, seed), max_tokens=2)
            again = await bench.generate(token_ids=prompt, max_tokens=2)
            found[share] = again.usage.cached_tokens
    assert found == {0.5: 39, 0.0: 0}
