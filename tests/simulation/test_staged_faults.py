"""Faults that one story stages on purpose, where the drawn worlds only meet them among others."""

from collections.abc import Callable
from functools import partial

import pytest
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.rpc_gateway import SWEEP_S
from genbatch.actors.gateways.session import STALLED_S
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import Cancelled
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.rpc import StreamOptions
from genbatch.proto.service_messages import HealthRequest
from tests.simulation.history_runner import HistoryRunner, expected
from tests.simulation.sim_service import DELAY_S, STEP_S, SimCall, SimCaller, SimService, run_simulated

TinyModel = Callable[[str], Model]
OPTIONS = BatcherOptions(n_parallel=4, batch_timeout=0.0)
LEASE_S = 2.0


@pytest.fixture
def model(tiny_model: TinyModel) -> Model:
    return tiny_model("llama")


def asked(first: int, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(token_ids=[first, 11, 12], max_tokens=max_tokens, ignore_eos=True)


async def until_tokens(call: SimCall, count: int) -> None:
    while len(call.token_times) < count:  # noqa: ASYNC110 - simulated
        await trio.sleep(0.01)


async def until_alone(service: SimService, others: int) -> None:
    while len(service.batcher.slots.sequences) > others:  # noqa: ASYNC110 - simulated
        await trio.sleep(0.001)


def test_a_client_that_vanishes_in_mid_stream_is_gone_within_two_steps(model: Model) -> None:
    async def story(service: SimService) -> None:
        stays, goes = service.connect("stays"), service.connect("goes")
        kept = await stays.ask(asked(20, 60))
        lost = await goes.ask(asked(30, 60))
        await until_tokens(lost, 5)
        await until_tokens(kept, 5)
        steps = service.batcher.stats.steps
        goes.end.cut()
        await until_alone(service, 1)
        assert service.batcher.stats.steps - steps <= 2
        await kept.ended.wait()
        assert kept.end["token_ids"] == expected([20, 11, 12], 60)
        assert not lost.finals

    run_simulated(story, model, OPTIONS)


def test_behind_a_partition_that_nobody_sees_a_lease_ends_what_runs(model: Model) -> None:
    async def story(service: SimService) -> None:
        caller = service.connect("a")
        await caller.send(caller.protocol.heartbeat(LEASE_S))
        call = await caller.ask(asked(20, 200))
        await until_tokens(call, 3)
        caller.end.part()
        parted_at = trio.current_time()
        await until_alone(service, 0)
        assert trio.current_time() - parted_at <= LEASE_S + SWEEP_S + 2 * STEP_S
        assert not call.finals

    run_simulated(story, model, OPTIONS)


async def tokens_in(caller: SimCaller, seconds: float) -> int:
    """What one who asks again and again gets."""
    calls: list[SimCall] = []
    with trio.move_on_after(seconds):
        while True:
            calls.append(await caller.ask(asked(40, 20)))
            await calls[-1].ended.wait()
    await caller.end.aclose()
    return sum(len(call.token_times) for call in calls)


def test_a_reader_without_credit_is_cancelled_after_its_time_and_others_keep_their_pace(model: Model) -> None:
    had: dict[bool, int] = {}

    async def story(service: SimService, *, is_slow: bool) -> None:
        slow, other = service.connect("slow"), service.connect("other")
        call = None
        if is_slow:
            call = await slow.ask(asked(20, 200), StreamOptions(credit=4))
        had[is_slow] = await tokens_in(other, 4 * STALLED_S)
        if call is not None:
            assert call.finals and isinstance(call.end, Cancelled)
            assert len(call.token_times) == 4
            waited = call.ended_at - call.token_times[-1]
            assert STALLED_S <= waited <= STALLED_S + SWEEP_S + STEP_S + 2 * DELAY_S

    for is_slow in (False, True):
        run_simulated(partial(story, is_slow=is_slow), model, OPTIONS)
    assert had[True] >= 0.95 * had[False]


def test_a_choice_that_was_swapped_out_comes_back_when_there_is_room_for_all_of_it(model: Model) -> None:
    """It once shared its prompt with the request's first choice; what is kept on the host is whole."""

    async def story(service: SimService) -> None:
        caller = service.connect("a")
        short, long = list(range(60, 69)), list(range(10, 36))
        other = await caller.ask(GenerateRequest(token_ids=short, max_tokens=23, ignore_eos=True))
        call = await caller.ask(GenerateRequest(token_ids=long, max_tokens=33, n=2, ignore_eos=True, deadline_s=120.0))
        # The pool is full when each choice has 44 positions. When `other` has ended it has 11 blocks left, one too few.
        await call.ended.wait()
        assert other.end["token_ids"] == expected(short, 23)
        assert [choice["token_ids"] for choice in call.end["choices"]] == [expected(long, 33)] * 2
        stats = service.batcher.stats
        assert stats.preemptions == stats.swaps == 1

    options = BatcherOptions(n_parallel=3, batch_timeout=5000.0, cpu_offload_space=0.001, margin=0.0)
    run_simulated(story, model, options, num_blocks=24)


def test_a_service_whose_steps_only_fail_says_that_it_is_stuck(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that finds no room is planned anew: were that to go on for ever, somebody must notice."""
    options = BatcherOptions(n_parallel=2, batch_timeout=5000.0, stall_s=5.0)

    def find_no_room(self: HistoryRunner, batch: object) -> None:
        raise OutOfBlocks(1, 0)

    async def story(service: SimService) -> None:
        caller = service.connect("a")
        with monkeypatch.context() as patch:
            patch.setattr(HistoryRunner, "forward", find_no_room)
            calls = [await caller.ask(asked(first, 8)) for first in (20, 30)]
            await trio.sleep(1.0)
            assert (await service.ref.call(HealthRequest())).status == "ready"
            await trio.sleep(options.stall_s)
            assert (await service.ref.call(HealthRequest())).status == "stuck"
        for call in calls:
            await call.ended.wait()
        assert (await service.ref.call(HealthRequest())).status == "ready"

    run_simulated(story, model, options)
