"""Crowds in little memory: found by seed, and those that once stood still or were refused, as they were reported."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import RequestList, RequestScheduler, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.models.model import Model
from genbatch.proto.messages import GenerateRequest, Message, Result
from tests.simulation.crowd import SYSTEM_MESSAGES, Crowd, Reckless, check_rest, watch
from tests.simulation.history_runner import FIRST_PLAIN, HistoryRunner, expected
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_worker import SimWorker

TinyModel = Callable[[str], Model]
SEEDS = 60
SHARE = 15
NO_EVICT = SchedulerPolicy.GUARANTEED_NO_EVICT
LONG_MESSAGE = SYSTEM_MESSAGES[1]


@pytest.fixture
def model(tiny_model: TinyModel) -> Iterator[Model]:
    torch.set_num_threads(1)
    made = tiny_model("llama")
    gc.freeze()  # of the model nothing will ever be garbage
    yield made
    gc.unfreeze()


@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_what_fits_alone_is_answered_the_same_in_every_crowd(model: Model, first: int) -> None:
    for seed in range(first, first + SHARE):
        try:
            Crowd(seed, model).check()
        except BaseException as error:
            error.add_note(f"replay: python -m tests.simulation.differential --family history --first {seed} --seeds 1")
            raise


def prompt(size: int, first: int = 0) -> list[int]:
    return [FIRST_PLAIN + (first + index) % 300 for index in range(size)]


def asks(size: int, max_tokens: int | None, number: int = 0, **fields: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt(size, 31 * number), max_tokens=max_tokens, ignore_eos=True, **fields)


def chat(words: str, max_tokens: int | None, **fields: Any) -> GenerateRequest:
    messages = [Message(role="system", content=LONG_MESSAGE), Message(role="user", content=words)]
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
    """The answers to requests that come at once, burst after burst, each after the one before was answered."""
    chosen = BatcherOptions(default_deadline_s=0.0, batch_timeout=0.0, **options)
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

                    async def ask(given: list[Any], index: int, wanted: GenerateRequest) -> None:
                        try:
                            given[index] = await ref.call(Generate(wanted, beam_width=beam_width), timeout=None)
                        except Exception as error:
                            given[index] = error

                    async with trio.open_nursery() as asking:
                        for index, wanted in enumerate(burst):
                            asking.start_soon(ask, given, index, wanted)
                    answers.extend(given)
                check_rest(batcher)
                nursery.cancel_scope.cancel()

    run_seeded(main, 0)
    for wanted, answer in zip([one for burst in bursts for one in burst], answers, strict=True):
        assert isinstance(answer, Result), (wanted, answer)
        if wanted.token_ids is not None and beam_width == 1:
            should = expected(wanted.token_ids, len(answer.token_ids))
            assert all(choice.token_ids == should for choice in answer.choices or (answer,)), (wanted, answer)
    return answers


# Stood still


@pytest.mark.parametrize("size", [100, 200])
def test_prompts_longer_than_a_window_are_served_by_default(model: Model, size: int) -> None:
    burst = [asks(size, 40, number) for number in range(8)]
    serve(model, [burst], windows=(8,), memory={"n_ctx": 512})


def test_a_pool_of_no_more_than_max_tokens_serves_a_short_window(model: Model) -> None:
    burst = [asks(64, 20, number) for number in range(12)]
    serve(model, [burst], windows=(8, None), memory={"num_blocks": [10, 64]}, max_batch_tokens=32)


def test_two_requests_in_a_model_of_windows_only_take_turns(model: Model) -> None:
    serve(model, [[asks(40, 8), asks(40, 8, 1)]], windows=(8,), memory={"num_blocks": [4]}, max_batch_tokens=64)


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


def test_a_lone_request_beside_a_noticed_prompt_gets_the_whole_pool(model: Model) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    [*_, answer] = serve(model, [*warm, [asks(40, 110, 1)]], memory={"num_blocks": [10]})
    assert len(answer.token_ids) == 110


def test_a_scheduler_that_ignores_memory_serves_everyone(model: Model) -> None:
    burst = [asks(40, 60, number) for number in range(6)]
    serve(model, [burst], memory={"num_blocks": [12]}, scheduler=Reckless(), n_parallel=4)


class Broken(RequestScheduler):
    """Never gives a plan."""

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        raise ValueError("the user's own fault")


class Idle(RequestScheduler):
    """Always gives an empty one."""

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> Any:
        return [], [], []


@pytest.mark.parametrize("scheduler", [Broken, Idle])
def test_s04_a_users_scheduler_that_fails_is_told_of_once_and_everyone_is_served(
    model: Model, scheduler: type[RequestScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    serve(model, [[asks(40, 20, number) for number in range(4)]], memory={"num_blocks": [12]}, scheduler=scheduler())
    [line] = [record.getMessage() for record in caplog.records if "the scheduler" in record.getMessage()]
    assert scheduler.__name__ in line and "fifo plans in its place" in line


# Refused though it fits


def test_a_group_with_a_window_does_not_bound_what_the_others_hold(model: Model) -> None:
    memory = {"num_blocks": [4, 16]}
    [answer] = serve(model, [[asks(240, 8)]], windows=(16, None), memory=memory, max_batch_tokens=8)
    assert len(answer.token_ids) == 8


def test_a_burst_after_an_idle_time_is_served_at_once(model: Model) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    burst = [asks(60, 8, number) for number in range(1, 4)]
    serve(model, [*warm, burst, burst], memory={"num_blocks": [15]})


@pytest.mark.parametrize("width", [2, 3, 4])
def test_beams_in_mid_search_get_what_a_noticed_prompt_holds(model: Model, width: int) -> None:
    warm = [[chat("one", 4)], [chat("two", 4)], [chat("three", 4)]]
    burst = [GenerateRequest(token_ids=prompt(20), max_tokens=24, ignore_eos=True, temperature=0.0)]
    serve(model, [*warm], memory={"num_blocks": [12]}, n_parallel=4)
    serve(model, [burst], memory={"num_blocks": [3 * width]}, n_parallel=4, beam_width=width)


def test_odd_pools_refuse_nobody(model: Model) -> None:
    burst = [asks(13, 24, number) for number in range(9)]
    for policy in SchedulerPolicy:
        serve(model, [burst], memory={"n_ctx": 96, "block_size": 5}, scheduler_policy=policy, n_parallel=4)
        chats = [[chat("one", 30), chat("two", 30), chat("four", 30)]] * 2
        serve(model, chats, memory={"n_ctx": 132, "block_size": 3}, scheduler_policy=policy, n_parallel=4)


def test_an_open_end_stops_where_a_configured_prompt_begins(model: Model) -> None:
    memory = {"num_blocks": [12]}
    [answer, shared] = serve(
        model, [[asks(20, None)], [chat("one", None)]], memory=memory, system_prompts=(LONG_MESSAGE,)
    )
    held = len(model.tokenizer.template_prefix([{"role": "system", "content": LONG_MESSAGE}]))
    assert answer.finish_reason == shared.finish_reason == "length"
    assert answer.usage.prompt_tokens + len(answer.token_ids) == (12 - -(-held // 16)) * 16 + 1
    assert shared.usage.prompt_tokens + len(shared.token_ids) == (12 - -(-held // 16) + held // 16) * 16 + 1
