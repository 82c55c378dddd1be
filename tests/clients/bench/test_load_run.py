"""Sending a load: when, how many at once, and what becomes of failures; over a mocked clock."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from genbatch.actors.runtime.supervisor import background
from genbatch.clients.bench.load import Load, LoadRequest
from genbatch.clients.bench.load_run import INCOMPLETE, run_load
from genbatch.clients.token_stream import TokenStream
from genbatch.proto.errors import QueueFull
from genbatch.proto.messages import Result, Token, Usage

pytestmark = pytest.mark.trio

STEP_S = 1.0


class SteadyService:
    """Answers each request with a token a second; prompts that start with 0 are refused, with 1 cut short."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.begun: dict[tuple[int, ...], float] = {}

    @asynccontextmanager
    async def stream(self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[TokenStream]:
        assert ignore_eos
        self.begun[tuple(prompt)] = trio.current_time()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = TokenStream()
        if prompt[0] == 0:
            stream.fail(QueueFull("full"))
        async with background() as nursery:
            nursery.start_soon(self._answer, stream, len(prompt), max_tokens - (prompt[0] == 1))
            try:
                yield stream
            finally:
                self.running -= 1

    async def _answer(self, stream: TokenStream, prompt_tokens: int, count: int) -> None:
        for index in range(count):
            await trio.sleep(STEP_S)
            stream.push(Token(text="", token_id=9, index=index))
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=count, cached_tokens=2)
        stream.finish(Result(text="", token_ids=[9] * count, finish_reason="length", usage=usage))


def load_of(*requests: tuple[int, int], after: int = 0) -> Load:
    """(first token, answer length) of each; the last one waits for `after` tokens of the others."""
    made = [LoadRequest((first, 7, 7), length) for first, length in requests]
    made[-1] = LoadRequest(made[-1].prompt, made[-1].max_tokens, after_tokens=after)
    return Load("by hand", tuple(made))


async def test_tokens_are_timed_as_they_come(autojump_clock: trio.testing.MockClock) -> None:
    run = await run_load(SteadyService(), load_of((5, 3), (6, 1)))
    first, second = run.times
    assert [at - first.sent_at for at in first.token_at] == pytest.approx([1, 2, 3])
    assert first.ttft == pytest.approx(1)
    assert second.e2el == pytest.approx(1)
    assert run.duration_s == pytest.approx(3)
    assert first.cached_tokens == 2
    assert first.error is second.error is None


async def test_requests_are_sent_at_their_times(autojump_clock: trio.testing.MockClock) -> None:
    service = SteadyService()
    started_at = trio.current_time()
    run = await run_load(service, load_of((5, 1), (6, 1), (7, 1)), arrivals=[0.0, 2.5, 2.5])
    assert [at - started_at for at in service.begun.values()] == pytest.approx([0, 2.5, 2.5])
    assert run.duration_s == pytest.approx(3.5)


async def test_no_more_than_max_concurrency_are_under_way_and_waiting_counts_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = SteadyService()
    run = await run_load(service, load_of((5, 2), (6, 2), (7, 2)), max_concurrency=2)
    assert service.most_running == 2
    assert run.duration_s == pytest.approx(4)
    assert [one.ttft for one in run.times] == pytest.approx([1, 1, 1])


async def test_a_refusal_and_a_short_answer_are_told_from_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ended = []
    run = await run_load(SteadyService(), load_of((0, 2), (1, 3), (5, 2)), on_end=lambda: ended.append(1))
    assert [one.error for one in run.times] == ["queue_full", INCOMPLETE, None]
    assert len(ended) == 3


async def test_a_request_waits_for_tokens_of_all_the_others(autojump_clock: trio.testing.MockClock) -> None:
    service = SteadyService()
    started_at = trio.current_time()
    await run_load(service, load_of((5, 9), (6, 9), (7, 1), after=4))
    assert service.begun[7, 7, 7] - started_at == pytest.approx(4)


async def test_a_request_that_failed_holds_nobody_up(autojump_clock: trio.testing.MockClock) -> None:
    run = await run_load(SteadyService(), load_of((0, 9), (6, 9), (7, 1), after=4))
    assert run.times[-1].error is None
    assert run.times[-1].sent_at - run.times[1].sent_at == pytest.approx(4)
