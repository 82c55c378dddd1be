"""Crowds in little memory: found by seed, and those that once stood still or were refused, as they were reported."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.slots import Slots
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.request import LlmRequest, split_by_phase
from genbatch.actors.scheduling.scheduler import RequestList, RequestScheduler, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.messages import GenerateRequest, Message, Result
from tests.simulation.crowd import SYSTEM_MESSAGES, Crowd, Reckless, check_rest, watch
from tests.simulation.history_runner import FIRST_PLAIN, HistoryRunner, expected
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_worker import SimWorker

TinyModel = Callable[[str], Model]
SEEDS = 60
SHARE = 15
# `make test` draws the first of them.
FIRSTS = [pytest.param(first, marks=[pytest.mark.long] if first >= SHARE else []) for first in range(0, SEEDS, SHARE)]
NO_EVICT = SchedulerPolicy.GUARANTEED_NO_EVICT
LONG_MESSAGE = SYSTEM_MESSAGES[1]  # 61 tokens
LONGER_MESSAGE = f"{LONG_MESSAGE} {LONG_MESSAGE[:42]}"  # 98
SHORTER_MESSAGE = LONG_MESSAGE[:32]  # 38


@pytest.fixture
def model(tiny_model: TinyModel) -> Iterator[Model]:
    made = tiny_model("llama")
    gc.freeze()  # of the model nothing will ever be garbage
    yield made
    gc.unfreeze()


@pytest.mark.parametrize("first", FIRSTS)
def test_what_fits_alone_is_answered_the_same_in_every_crowd(model: Model, first: int) -> None:
    for seed in range(first, first + SHARE):
        try:
            Crowd(seed, model).check()
        except BaseException as error:
            error.add_note(f"replay: python -m tests.simulation.differential --family history --first {seed} --seeds 1")
            raise


def test_the_crowds_that_are_tried_meet_everything_in_every_company(model: Model) -> None:
    """Each kind of memory and of request under both policies and in lockstep, among the seeds of the test above."""
    met: set[tuple[str, str]] = set()
    for seed in range(SEEDS):
        crowd = Crowd(seed, model)
        options = crowd.options
        is_lockstep = options.batching_type is BatchingType.V1
        company = "V1" if is_lockstep else options.scheduler_policy.value
        groups = crowd.open_runner().groups if crowd.open_runner is not None else ()
        windows = [group.window for group in groups if not group.recurs]
        kinds = {
            "windows": any(windows),
            "sinks": any(group.sink_tokens for group in groups),
            "mixed groups": any(windows) and None in windows,
            "states": any(group.recurs for group in groups),
            "odd blocks": crowd.memory["block_size"] in (3, 5),
            "configured": bool(options.system_prompts),
            "noticed": any(one.request.messages is not None for one in crowd.asked),
            "choices": any(one.request.n > 1 for one in crowd.asked),
            "beams": any(one.beam_width > 1 for one in crowd.asked),
            "swaps": options.cpu_offload_space > 0,
            "scores": any(one.request.prompt_logprobs is not None for one in crowd.asked),
        }
        met |= {(kind, company) for kind, is_met in kinds.items() if is_met}
    everything = {(kind, company) for kind in kinds for company in ("V1", *(one.value for one in SchedulerPolicy))}
    assert met == everything, everything - met


def prompt(size: int, first: int = 0) -> list[int]:
    return [FIRST_PLAIN + (first + index) % 300 for index in range(size)]


def asks(size: int, max_tokens: int | None, number: int = 0, **fields: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt(size, 31 * number), max_tokens=max_tokens, ignore_eos=True, **fields)


def chat(words: str, max_tokens: int | None, content: str = LONG_MESSAGE, **fields: Any) -> GenerateRequest:
    messages = [Message(role="system", content=content), Message(role="user", content=words)]
    return GenerateRequest(messages=messages, max_tokens=max_tokens, ignore_eos=True, **fields)


def serve(
    model: Model,
    bursts: Sequence[Sequence[GenerateRequest]],
    *,
    windows: Sequence[int | None] = (None,),
    memory: dict[str, Any],
    beam_width: int = 1,
    **options: Any,
) -> list[Any]:
    """The answers to requests that come at once, burst after burst, each after the one before was answered.

    Args:
        beam_width: of the last burst's.
    """
    chosen = BatcherOptions(**{"default_deadline_s": 0.0, "batch_timeout": 0.0, **options})
    answers: list[Any] = []

    async def main() -> None:
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                rng = random.Random(0)
                batcher = Batcher(
                    lambda: Context(
                        model,
                        HistoryRunner(windows=windows),
                        n_parallel=chosen.n_parallel,
                        n_held=chosen.max_held_prompts,
                        n_batch=chosen.max_batch_tokens,
                        **memory,
                    ),
                    chosen,
                    open_worker=lambda _: SimWorker(nursery, rng, 0.05),
                )
                ref = await start(nursery, batcher, name="batcher")
                watch(batcher)
                for burst in bursts:
                    given: list[Any] = [None] * len(burst)

                    width = beam_width if burst is bursts[-1] else 1

                    async def ask(given: list[Any], index: int, wanted: GenerateRequest, width: int) -> None:
                        try:
                            given[index] = await ref.call(Generate(wanted, beam_width=width), timeout=None)
                        except Exception as error:
                            given[index] = error

                    async with trio.open_nursery() as asking:
                        for index, wanted in enumerate(burst):
                            asking.start_soon(ask, given, index, wanted, width)
                    answers.extend(given)
                check_rest(batcher)
                nursery.cancel_scope.cancel()

    run_seeded(main, 0)
    for wanted, answer in zip([one for burst in bursts for one in burst], answers, strict=True):
        assert isinstance(answer, Result), (wanted, answer)
        if wanted.token_ids is not None and beam_width == 1:
            should = expected(wanted.token_ids, len(answer.token_ids))
            assert all(choice.token_ids == should for choice in answer.choices), (wanted, answer)
    return answers


def test_b18_a_prompt_to_hold_that_has_no_room_beside_what_runs_is_given_up_and_nobody_is_paused(model: Model) -> None:
    # Found by `make differential`: it was evaluated at once, in blocks that were promised to the running ones.
    Crowd(687, model).check()


# Stood still


@pytest.mark.parametrize("size", [100, 200])
def test_prompts_longer_than_a_window_are_served_by_default(model: Model, size: int) -> None:
    burst = [asks(size, 40, number) for number in range(8)]
    serve(model, [burst], windows=(8,), memory={"n_ctx": 512})


def test_a_pool_of_no_more_than_max_tokens_serves_a_short_window(model: Model) -> None:
    burst = [asks(64, 20, number) for number in range(12)]
    serve(model, [burst], windows=(8, None), memory={"num_blocks": [10, 64]}, max_batch_tokens=32)


def test_two_requests_in_a_model_of_windows_only_take_turns(model: Model) -> None:
    serve(model, [[asks(40, 8), asks(40, 8, 1)]], windows=(16,), memory={"num_blocks": [4]}, max_batch_tokens=64)


@pytest.mark.parametrize("kind", [BatchingType.INFLIGHT_FUSED_BATCHING, BatchingType.V1])
@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_a_noticed_prompt_gives_way_under_every_policy(
    model: Model, policy: SchedulerPolicy, kind: BatchingType
) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    burst = [asks(20, 180, 1), asks(20, 180, 2)]
    memory = {"num_blocks": [26]}
    serve(model, [*warm, burst], memory=memory, n_parallel=2, scheduler_policy=policy, batching_type=kind)


def test_choices_that_both_copy_their_last_block_are_counted(model: Model) -> None:
    burst = [asks(2, 3, n=2), asks(50, 13, 1), asks(50, 13, 2)]
    serve(model, [burst], memory={"num_blocks": [10]}, scheduler_policy=NO_EVICT)


@pytest.mark.parametrize("kind", [BatchingType.INFLIGHT_FUSED_BATCHING, BatchingType.V1])
@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_a_lone_request_beside_a_noticed_prompt_gets_the_whole_pool(
    model: Model, policy: SchedulerPolicy, kind: BatchingType
) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    memory = {"num_blocks": [8]}
    [*_, answer] = serve(model, [*warm, [asks(40, 88, 1)]], memory=memory, scheduler_policy=policy, batching_type=kind)
    assert len(answer.token_ids) == 88


def test_a_scheduler_that_ignores_memory_serves_everyone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came first of those that run is never paused for it: so there is one that comes to its end."""
    pause, num_pauses = Slots.pause, 0

    def note(slots: Slots, owner: LlmRequest) -> None:
        nonlocal num_pauses
        num_pauses += 1
        assert owner.waiting_key > min(one.waiting_key for one in slots.sequences.values())
        pause(slots, owner)

    monkeypatch.setattr(Slots, "pause", note)
    burst = [asks(40, 60, number) for number in range(6)]
    serve(model, [burst], memory={"num_blocks": [12]}, scheduler=Reckless(), n_parallel=4)
    assert num_pauses > 0


class Broken(RequestScheduler):
    """Never gives a plan."""

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        raise ValueError("the user's own fault")


class Idle(RequestScheduler):
    """Always gives an empty one."""

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        return [], [], []


class Moody(RequestScheduler):
    """Fails at every second plan."""

    def __init__(self) -> None:
        self._num_plans = 0

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        self._num_plans += 1
        if self._num_plans % 2:
            raise ValueError("not now")
        decoding, prefilling, pending = split_by_phase(active_requests, inflight_request_ids)
        return prefilling + pending, decoding, []


@pytest.mark.parametrize("scheduler", [Broken, Idle, Moody])
def test_s04_a_users_scheduler_that_fails_is_told_of_once_and_everyone_is_served(
    model: Model, scheduler: type[RequestScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    serve(model, [[asks(40, 20, number) for number in range(4)]], memory={"num_blocks": [12]}, scheduler=scheduler())
    [line] = [record.getMessage() for record in caplog.records if "the scheduler" in record.getMessage()]
    assert scheduler.__name__ in line and "fifo plans in its place" in line


class Fickle(RequestScheduler):
    """A user's scheduler that pauses all that run every few plans, as if nothing had been computed for them."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_plans = 0

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        self._num_plans += 1
        decoding, prefilling, pending = split_by_phase(active_requests, inflight_request_ids)
        if self._num_plans % self._every == 0 and decoding + prefilling:
            return [], [], decoding + prefilling
        return prefilling + pending, decoding, []


@pytest.mark.parametrize(("every", "beam_width"), [(2, 1), (3, 1), (2, 2)])
def test_a_scheduler_that_pauses_again_and_again_does_not_keep_a_request_computing_for_ever(
    model: Model, caplog: pytest.LogCaptureFixture, every: int, beam_width: int
) -> None:
    """A prompt of five steps never gets to its first token if each second step takes away what the one before gave."""
    burst = [asks(40, 6, number) for number in range(2 // beam_width)]
    answers = serve(
        model,
        [burst],
        memory={"num_blocks": [24], "allow_block_sharing": False},
        max_batch_tokens=8,
        n_parallel=2,
        scheduler=Fickle(every),
        beam_width=beam_width,
    )
    assert [len(answer.token_ids) for answer in answers] == [6] * len(burst)
    assert "is paused again and again without progress" in caplog.text


def test_a_scheduler_may_take_turns_among_more_than_have_room(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Each gets a token in its turn, however often it is paused, so nobody plans in its place."""
    burst = [asks(4, 12, number) for number in range(3)]
    serve(model, [burst], memory={"num_blocks": [24]}, max_batch_tokens=64, scheduler=Fickle(2))
    assert "is paused again and again without progress" not in caplog.text


# Refused though it fits


def test_a_group_with_a_window_does_not_bound_what_the_others_hold(model: Model) -> None:
    memory = {"num_blocks": [4, 16]}
    [answer] = serve(model, [[asks(240, 8)]], windows=(16, None), memory=memory, max_batch_tokens=8)
    assert len(answer.token_ids) == 8


def test_a_prompt_much_longer_than_the_window_of_some_layers_fits_a_context_of_its_length(model: Model) -> None:
    """A window of 512 beside full attention, of 8,192 positions 8,108 are asked for."""
    serve(replace(model, max_position=8192), [[asks(8100, 8)]], windows=(512, None), memory={"n_ctx": 8192})


def test_a_burst_after_an_idle_time_is_served_at_once(model: Model) -> None:
    """Of 64 blocks 25 are held, and a request takes 42: nobody is refused before what is held has gone."""
    content = model.tokenizer.template_prefix([{"role": "system", "content": LONGER_MESSAGE}])
    assert -(-len(content) // 4) == 25
    warm = [[chat("one", 4, LONGER_MESSAGE)], [chat("two", 4, LONGER_MESSAGE)], [chat("three", 4, LONGER_MESSAGE)]]
    burst = [asks(160, 8, number) for number in range(1, 4)]
    serve(model, [*warm, burst, burst], memory={"num_blocks": [64], "block_size": 4}, batch_timeout=20.0)


@pytest.mark.parametrize("policy", SchedulerPolicy)
@pytest.mark.parametrize(("width", "num_blocks"), [(2, 20), (3, 26), (4, 34)])
def test_beams_in_mid_search_get_what_a_noticed_prompt_holds(
    model: Model, policy: SchedulerPolicy, width: int, num_blocks: int
) -> None:
    warm = [[chat("one", 2)], [chat("two", 2)], [chat("three", 2)]]
    search = GenerateRequest(token_ids=prompt(20), max_tokens=24, ignore_eos=True, temperature=0.0)
    memory = {"num_blocks": [num_blocks], "block_size": 4}
    serve(model, [*warm, [search]], memory=memory, n_parallel=4, beam_width=width, scheduler_policy=policy)


def test_beams_without_an_end_stop_where_a_step_may_read_no_more(model: Model) -> None:
    """Of four blocks each of three beams may read one; the token drawn last is read by no step."""
    memory = {"num_blocks": [20], "block_size": 4}
    [answer] = serve(model, [[asks(2, None)]], memory=memory, n_parallel=4, beam_width=3, cache_budget=4)
    assert [2 + len(choice.token_ids) for choice in answer.choices] == [5, 5, 5]


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_odd_pools_refuse_nobody(model: Model, policy: SchedulerPolicy) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    burst = [asks(13, 24, number) for number in range(9)]
    serve(model, [*warm, burst], memory={"n_ctx": 96, "block_size": 5}, scheduler_policy=policy, n_parallel=4)
    chats = [[chat(words, 30, SHORTER_MESSAGE) for words in ("one", "two", "four")]] * 3
    serve(model, chats, memory={"n_ctx": 104, "block_size": 3}, scheduler_policy=policy, n_parallel=4)


def test_what_shares_a_configured_prompt_comes_back_from_a_pause_with_room_for_the_rest_only(model: Model) -> None:
    """Whole, a request takes eleven blocks; beside the prompt there are eight."""
    burst = [chat("one", 95), chat("two", 95)]
    [one, _] = serve(
        model, [burst], memory={"num_blocks": [12]}, system_prompts=(LONG_MESSAGE,), cpu_offload_space=0.001
    )
    assert -(-(one.usage.prompt_tokens + 94) // 16) == 11


def test_an_open_end_stops_where_a_configured_prompt_begins(model: Model) -> None:
    memory = {"num_blocks": [12]}
    [answer, shared] = serve(
        model, [[asks(20, None)], [chat("one", None)]], memory=memory, system_prompts=(LONG_MESSAGE,)
    )
    held = len(model.tokenizer.template_prefix([{"role": "system", "content": LONG_MESSAGE}]))
    assert answer.finish_reason == shared.finish_reason == "length"
    assert answer.usage.prompt_tokens + len(answer.token_ids) == (12 - -(-held // 16)) * 16 + 1
    assert shared.usage.prompt_tokens + len(shared.token_ids) == (12 - -(-held // 16) + held // 16) * 16 + 1


@pytest.mark.parametrize("policy", SchedulerPolicy)
@pytest.mark.parametrize(("window", "num_blocks"), [(64, 15), (16, 13)])
def test_beams_with_a_window_share_the_prompts_blocks_that_are_in_sight(
    model: Model, policy: SchedulerPolicy, window: int, num_blocks: int
) -> None:
    """The five blocks of the prompt, or the three in sight, are common; each of the four beams has two of its own."""
    memory: dict[str, Any] = {"num_blocks": [num_blocks], "block_size": 4}
    [answer] = serve(
        model, [[asks(20, 8)]], windows=[window], memory=memory, n_parallel=4, beam_width=4, scheduler_policy=policy
    )
    assert [len(choice.token_ids) for choice in answer.choices] == [8] * 4
