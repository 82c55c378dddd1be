"""An engine that dies at every point of its requests' lives: callers get to the byte what no death gives them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.link import EngineSession
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.actors.runtime.actor import start
from genbatch.nif.context import Context
from genbatch.proto.errors import EngineLost
from genbatch.proto.messages import GenerateRequest, Result, Token
from genbatch.proto.service_messages import ModelsRequest
from tests.simulation.history_runner import HistoryRunner
from tests.simulation.pipe import End, pair
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_request import HARMLESS
from tests.simulation.sim_worker import SimWorker

OPTIONS = BatcherOptions(n_parallel=3, batch_timeout=0.0, max_batch_tokens=16, max_queue=64)
STEP_S, LOADING_S = 0.05, 0.5
# Simulated seconds after which what has not ended never will.
LIVENESS_S = 600.0
SAME: dict[str, Any] = {"ignore_eos": True, "max_tokens": 12}
DRAWS: dict[str, Any] = {**SAME, "temperature": 5.0, "seed": 3, "logit_bias": HARMLESS}


def prompt(first: int) -> list[int]:
    return [first, *range(20, 30)]


@dataclass
class Asked:
    """A request, and what its caller gets."""

    request: GenerateRequest
    streams: bool = True
    beam_width: int = 1
    tokens: list[Token] = field(default_factory=list)
    result: Result | None = None

    def got(self) -> Any:
        """All of it, None where it was lost; each choice's tokens in their order, and not what a cache knew."""
        if self.result is None:
            return None
        tokens = sorted(self.tokens, key=lambda token: (token.choice, token.index))
        usage = msgspec.structs.replace(self.result.usage, cached_tokens=0)
        return tokens, msgspec.structs.replace(self.result, usage=usage)


def asked() -> list[Asked]:
    """One of each kind; the pool is small enough for pauses."""
    return [
        Asked(GenerateRequest(token_ids=prompt(40), **SAME)),
        Asked(GenerateRequest(token_ids=prompt(41), **DRAWS, n=3, logprobs=2)),
        Asked(GenerateRequest(token_ids=prompt(42), **DRAWS, repetition_penalty=1.5, frequency_penalty=1.0)),
        Asked(GenerateRequest(token_ids=prompt(43), **DRAWS, prompt_logprobs=0)),
        Asked(GenerateRequest(token_ids=prompt(44), **DRAWS, min_tokens=6, stop=["e", "a"], echo=True)),
        Asked(GenerateRequest(token_ids=prompt(45), **DRAWS, n=2), streams=False),
        Asked(GenerateRequest(token_ids=prompt(46), **SAME), streams=False, beam_width=2),
    ]


class MortalService:
    """A link in front of engines of which the scripted ones die.

    Args:
        dies_at: seconds after which the engine that is there dies, in order.
    """

    def __init__(self, nursery: trio.Nursery, model: Any, dies_at: Sequence[float]) -> None:
        self._nursery = nursery
        self._model = model
        self._dies_at = dies_at
        self._rng = random.Random(0)
        self._end: End | None = None
        self._life: trio.CancelScope | None = None
        self.link = RemoteBatcher(OPTIONS, lambda reason: pytest.fail(reason))

    async def start(self) -> None:
        await self._nursery.start(self.link.run)
        self._nursery.start_soon(self._run_engines)
        self._nursery.start_soon(self._kill)

    async def ask(self, one: Asked) -> None:
        on_token = one.tokens.append if one.streams else None
        call = Generate(one.request, on_token, "client", beam_width=one.beam_width)
        try:
            one.result = await self.link.call(call, timeout=None)
        except EngineLost as error:
            assert error.tokens_delivered == len(one.tokens)

    async def _kill(self) -> None:
        begun = trio.current_time()
        for moment in self._dies_at:
            await trio.sleep_until(begun + moment)
            if self._life is not None and self._end is not None:
                self._end.cut()
                self._life.cancel()

    async def _run_engines(self) -> None:
        while True:
            ours, theirs = pair(random.Random(self._rng.random()), window=2**20, max_delay_s=0.01)
            async with trio.open_nursery() as life:
                self._life, self._end = life.cancel_scope, theirs
                await self._live(life, ours, theirs)
            theirs.cut()
            await trio.sleep(LOADING_S)

    async def _live(self, life: trio.Nursery, ours: End, theirs: End) -> None:
        batcher = Batcher(
            lambda: Context(
                self._model, HistoryRunner(), num_blocks=[24], n_parallel=3, n_held=1, n_batch=16, block_size=4
            ),
            OPTIONS,
            open_worker=lambda _: SimWorker(life, random.Random(self._rng.random()), STEP_S),
        )
        ref = await start(life, batcher, name="batcher", shutdown_s=0.0)
        models = await ref.call(ModelsRequest(), timeout=None)
        self.link.join(ours, models)  # type: ignore[arg-type]  # a pipe in the place of a socket
        await EngineSession(ref, theirs).run()
        life.cancel_scope.cancel()


def run(model: Any, dies_at: Sequence[float] = ()) -> tuple[list[Any], float, dict[str, int]]:
    """What all callers get, when the last of it came, and what the ledger has counted."""
    wanted = asked()
    ended_at = 0.0
    counts: dict[str, int] = {}

    async def main() -> None:
        nonlocal ended_at
        with trio.fail_after(LIVENESS_S):
            async with trio.open_nursery() as nursery:
                service = MortalService(nursery, model, dies_at)
                await service.start()
                begun = trio.current_time()
                async with trio.open_nursery() as asking:
                    for one in wanted:
                        asking.start_soon(service.ask, one)
                ended_at = trio.current_time() - begun
                service.link.accepted.check_integrity()
                counts.update(service.link.accepted.counts)
                nursery.cancel_scope.cancel()

    run_seeded(main, 0)
    return [one.got() for one in wanted], ended_at, counts


@pytest.fixture
def model(tiny_model: Callable[[str], Any]) -> Any:
    return tiny_model("llama")


def test_an_engines_death_at_any_moment_changes_nothing_of_any_answer(model: Any) -> None:
    expected, took_s, counts = run(model)
    assert counts["replayed"] == 0
    num_replayed = 0
    for moment in range(1, 25):
        got, _, counts = run(model, [took_s * moment / 24])
        assert got == expected, moment
        assert counts["lost"] == 0
        num_replayed += counts["replayed"]
    assert num_replayed > 24, "no death met a request"


def test_a_second_death_ends_at_most_the_one_request_that_was_tried_alone(model: Any) -> None:
    expected, took_s, _ = run(model)
    for part in range(1, 9):
        first = took_s / 3
        got, _, counts = run(model, [first, first + LOADING_S + took_s * part / 8])
        lost = [index for index, one in enumerate(got) if one is None]
        assert len(lost) == counts["lost"] <= 1
        assert [one for one in got if one is not None] == [one for i, one in enumerate(expected) if i not in lost]
