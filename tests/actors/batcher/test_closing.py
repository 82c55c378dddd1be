"""Every moment of closing: with prompts, grammars, sessions and texts on their way, each caller hears how it ended."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from genbatch.actors.batcher.arrivals import INLINE_PROMPT_CHARS
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate, LoadSession, SaveSession
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.errors import ActorDown
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling.grammar_compiler import GrammarCompiler
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import GenerateRequest, Message, TokenizeRequest
from tests.simulation.sim_worker import SimWorker

# Seconds, of which the callers below take about one. Each moment is a run of its own.
MOMENTS = 24
STEP_S = 0.023
LONG = "word " * (INLINE_PROMPT_CHARS // 4)
CHAT = [Message(role="system", content="Be kind."), Message(role="user", content="Hi")]


def calls() -> list[Any]:
    """What is asked, a hundredth of a second after another, over and over until the end."""
    return [
        *(Generate(GenerateRequest(prompt="a", regex=f"[a-z]{{{n}}}", max_tokens=8), client="c") for n in (1, 2, 3, 4)),
        Generate(GenerateRequest(prompt=LONG, max_tokens=1), client="c"),
        Generate(GenerateRequest(messages=CHAT, max_tokens=30, ignore_eos=True), client="d"),
        SaveSession(CHAT),
        LoadSession(b"no session"),
        TokenizeRequest(prompt=LONG),
    ]


class Closing:
    """A Batcher in simulated time, with the real model, that is stopped at a moment."""

    def __init__(self, model: Model, moment: int) -> None:
        self.model = model
        self.moment = moment
        self.ends: list[object] = []
        self.num_asked = 0

    def run(self) -> None:
        trio.run(self._run, clock=MockClock(autojump_threshold=0))

    async def _run(self) -> None:
        rng = random.Random(self.moment)
        async with trio.open_nursery() as threads, trio.open_nursery() as nursery:
            actor = Batcher(
                self._open_context,
                BatcherOptions(n_parallel=2, max_batch_tokens=16, max_held_prompts=1, max_client_queue_share=1.0),
                open_worker=lambda _: SimWorker(threads, rng, 0.05),  # type: ignore[arg-type,return-value]
            )
            self.ref = await start(nursery, actor, name="batcher")
            async with trio.open_nursery() as callers:
                callers.start_soon(self._stop)
                for call in calls():
                    callers.start_soon(self._ask, call)
                    await trio.sleep(0.01)
            await trio.sleep(5.0)  # what its threads had to do is done, and told to nobody
            threads.cancel_scope.cancel()

    async def _stop(self) -> None:
        await trio.sleep(self.moment * STEP_S)
        await self.ref.stop()

    async def _ask(self, call: object) -> None:
        self.num_asked += 1
        try:
            self.ends.append(await self.ref.call(call, timeout=None))
        except (GenbatchError, ActorDown) as error:
            self.ends.append(error)

    def _open_context(self) -> Context:
        return Context(self.model, TorchRunner(self.model), n_ctx=128, n_parallel=2, n_held=1, block_size=4, n_batch=16)


def test_at_every_moment_of_closing_each_caller_is_answered(
    tiny_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in what a thread tells would come out of `run` as the end of the whole program."""
    # The process that tries grammars is tested elsewhere, and takes a second to start.
    monkeypatch.setattr(GrammarCompiler, "_check", lambda _self, _kind, text: (_regex(text), ""))
    kinds: set[str] = set()
    for moment in range(MOMENTS):
        closing = Closing(tiny_model("llama"), moment)
        closing.run()
        assert len(closing.ends) == closing.num_asked == len(calls())
        kinds |= {type(end).__name__ for end in closing.ends}
    assert kinds >= {"Result", "bytes", "TokenIds", "InvalidRequest", "PromptTooLong", "Unavailable"}, kinds


def _regex(text: str) -> str:
    from genbatch.nif.sampling.grammar import convert

    return convert("regex", text)
