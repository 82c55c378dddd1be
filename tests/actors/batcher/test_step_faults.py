"""Who is to blame for a step that fails: one request, or the engine."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from tokenizers import decoders, pre_tokenizers

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.stepper import MAX_LONE_FAULTS, EngineFault, StepFaults
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.text.tokenizer import Tokenizer
from genbatch.proto.errors import EngineError, GenbatchError, Unavailable
from genbatch.proto.messages import GenerateRequest, Result
from tests.waiting import a_moment


class Faulty(TorchRunner):
    """Raises what the test says when it says so."""

    def __init__(self, model: Model, fault: Callable[[Any], BaseException | None]) -> None:
        super().__init__(model)
        self._fault = fault

    def forward(self, batch: Any) -> Rows:
        is_rehearsal = not batch.input_ids.any()
        error = None if is_rehearsal else self._fault(batch)
        if error is not None:
            raise error
        return super().forward(batch)


async def supervised(
    nursery: trio.Nursery, model: Model, together: int, fault: Callable[[Any], BaseException | None]
) -> tuple[ActorRef, list[Any]]:
    """A Batcher under a supervisor, and the reasons for which it was restarted.

    Args:
        together: an idle Batcher waits until there are so many sequences, which then share their first step: who is to
            blame depends on who is in a step.
    """
    options = BatcherOptions(n_parallel=4, batch_size=together, batch_timeout=1e6)

    def new_batcher() -> Batcher:
        return Batcher(lambda: Context(model, Faulty(model, fault), n_ctx=256, n_parallel=4, n_held=4), options)

    supervisor = Supervisor([ChildSpec("batcher", new_batcher)])
    reasons: list[Any] = []

    def note(event: str, measurements: Any, metadata: Any) -> None:
        if event == "supervisor.child_exit":
            reasons.append(metadata["reason"])

    supervisor.telemetry.attach(note)
    await nursery.start(supervisor.run)
    return supervisor.registry.ref("batcher"), reasons


async def ask_all(batcher: ActorRef, prompts: list[list[int]]) -> list[Result | Exception]:
    ends: dict[int, Any] = {}

    async def ask(index: int) -> None:
        request = GenerateRequest(token_ids=prompts[index], max_tokens=4, ignore_eos=True)
        try:
            ends[index] = await batcher.call(Generate(request), timeout=None)
        except GenbatchError as error:
            ends[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(ask, index)
    return [ends[index] for index in range(len(prompts))]


@pytest.mark.trio
async def test_when_nobodys_step_succeeds_the_engine_is_started_anew(tiny_model: Callable[[str], Model]) -> None:
    broken = True

    def fault(batch: Any) -> BaseException | None:
        return RuntimeError("device-side assert") if broken else None

    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 3, fault)
        ends = await ask_all(batcher, [[5, 6], [7, 8], [9, 10]])
        assert all(isinstance(end, Unavailable) for end in ends), "an innocent request was blamed"
        while not reasons or not batcher.alive:
            await a_moment()
        assert isinstance(reasons[0], EngineFault) and "device-side assert" in str(reasons[0])
        broken = False
        ends = await ask_all(batcher, [[5, 6], [7, 8], [9, 10]])
        assert all(isinstance(end, Result) for end in ends)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_requests_that_fail_one_after_another_are_blamed_so_often_only(
    tiny_model: Callable[[str], Model],
) -> None:
    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 1, lambda batch: RuntimeError("again"))
        ends = [(await ask_all(batcher, [[5, number]]))[0] for number in range(3, 3 + MAX_LONE_FAULTS)]
        assert [type(end) for end in ends] == [EngineError] * (MAX_LONE_FAULTS - 1) + [Unavailable]
        while not reasons:
            await a_moment()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_several_answers_of_one_request_are_one_to_blame(tiny_model: Callable[[str], Model]) -> None:
    def fault(batch: Any) -> BaseException | None:
        return RuntimeError("poison") if 13 in batch.input_ids.tolist() else None

    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 1, fault)
        request = GenerateRequest(token_ids=[13, 5], n=3, max_tokens=4, seed=1, temperature=1.0)
        with pytest.raises(EngineError, match="poison"):
            await batcher.call(Generate(request), timeout=None)
        assert isinstance((await ask_all(batcher, [[5, 6]]))[0], Result)
        assert not reasons
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_out_of_memory_is_tried_once_more_in_halves(tiny_model: Callable[[str], Model]) -> None:
    sizes: list[int] = []

    def fault(batch: Any) -> BaseException | None:
        sizes.append(len(batch.kv_lens))
        return torch.OutOfMemoryError("CUDA out of memory") if sizes[-1] > 2 else None

    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 4, fault)
        ends = await ask_all(batcher, [[5, 6], [7, 8], [9, 10], [11, 12]])
        assert all(isinstance(end, Result) for end in ends) and not reasons
        assert sizes[:3] == [4, 2, 2]
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_out_of_memory_at_half_the_batch_starts_the_engine_anew(tiny_model: Callable[[str], Model]) -> None:
    calls = 0

    def fault(batch: Any) -> BaseException | None:
        nonlocal calls
        calls += 1
        return torch.OutOfMemoryError("CUDA out of memory")

    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 4, fault)
        ends = await ask_all(batcher, [[5, 6], [7, 8], [9, 10], [11, 12]])
        assert all(isinstance(end, Unavailable) for end in ends)
        assert calls == 2
        while not reasons:
            await a_moment()
        assert isinstance(reasons[0], EngineFault)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("others", [0, 2])
async def test_a_sampler_that_raises_fails_its_own_request(
    others: int, tiny_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried alone; the others lose nothing."""
    from genbatch.nif.sampling import choice

    whole = choice.sample

    def sample(logits: Any, states: Any, *rest: Any) -> Any:
        if any(state.params.top_k == 7 for state in states):
            raise ZeroDivisionError("a bad state")
        return whole(logits, states, *rest)

    monkeypatch.setattr(choice, "sample", sample)
    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 1 + others, lambda batch: None)
        ends: list[Any] = []

        async def bad() -> None:
            request = GenerateRequest(token_ids=[5, 5], max_tokens=4, temperature=1.0, top_k=7)
            with pytest.raises(EngineError, match="a bad state"):
                await batcher.call(Generate(request), timeout=None)

        async with trio.open_nursery() as callers:
            callers.start_soon(bad)
            ends = await ask_all(batcher, [[5, 6 + number] for number in range(others)])
        assert all(isinstance(end, Result) for end in ends) and not reasons
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_a_tokenizer_that_panics_fails_its_request_and_the_batcher_goes_on(
    max_tokens: int, tiny_model: Callable[[str], Model]
) -> None:
    """A panic of the tokenizers package is no Exception: it went through every handler and ended the Batcher."""
    model = tiny_model("llama")
    model = replace(model, tokenizer=Tokenizer(copy.deepcopy(model.tokenizer.hf)))
    backend = model.tokenizer.backend
    backend.pre_tokenizer = pre_tokenizers.FixedLength(0)
    backend.decoder = decoders.Strip("a", 5, 5)  # reads beyond a text of fewer "a"
    letter = backend.token_to_id("a")
    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, model, 1, lambda batch: None)
        drawn = {"token_ids": [letter], "logit_bias": {letter: 100.0}}
        for prompt in ({"prompt": "a b"}, {"prompt": "a b " * 3000}, drawn):
            with pytest.raises(EngineError, match="the model's tokenizer failed"):
                await batcher.call(Generate(GenerateRequest(**prompt, max_tokens=max_tokens)), timeout=None)
        assert not reasons and batcher.alive
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_what_requests_ask_for_is_never_the_engines_fault(tiny_model: Callable[[str], Model]) -> None:
    """Numbers at the edge of what a float32 holds, for all rows of a step at once."""
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e-46},
        {"temperature": 1e39, "min_tokens": 2},
        {"temperature": 1e-46, "top_k": 3, "n": 2},
        {"temperature": 1e-310, "repetition_penalty": 1e-9, "min_p": 1.0},
    ]
    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 5, lambda batch: None)
        ends: list[Result] = []

        async def ask(params: dict[str, Any]) -> None:
            request = GenerateRequest(token_ids=[5, 6], max_tokens=4, **params)
            ends.append(await batcher.call(Generate(request), timeout=None))

        async with trio.open_nursery() as callers:
            for params in extremes:
                callers.start_soon(ask, params)
        assert len(ends) == len(extremes) and not reasons
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("where", ["choosing", "scoring the prompt"])
async def test_what_fails_after_the_forward_leaves_no_trace_and_is_tried_again(
    where: str, tiny_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves evaluate the same positions anew: nothing of the step counts before all of it is done."""
    from genbatch.actors.batcher import generation
    from genbatch.nif.context import context

    module, name = (context, "choose") if where == "choosing" else (generation, "token_logprobs")
    whole, failures = getattr(module, name), 2

    def failing(*arguments: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("for a moment")
        return whole(*arguments)

    requests = [
        GenerateRequest(token_ids=[5, 6 + number, 7], max_tokens=4, ignore_eos=True, prompt_logprobs=0)
        for number in range(4)
    ]
    async with trio.open_nursery() as nursery:
        batcher, reasons = await supervised(nursery, tiny_model("llama"), 4, lambda batch: None)
        ends: dict[int, Result] = {}

        async def ask(number: int) -> None:
            ends[number] = await batcher.call(Generate(requests[number]), timeout=None)

        for patched in (True, False):
            if patched:
                monkeypatch.setattr(module, name, failing)
            async with trio.open_nursery() as callers:
                for number in range(4):
                    callers.start_soon(ask, number)
            if patched:
                tried, ends = ends, {}
        assert failures < 0 and not reasons
        assert [tried[number].token_ids for number in range(4)] == [ends[number].token_ids for number in range(4)]
        nursery.cancel_scope.cancel()


def failed_alone(faults: StepFaults, count: int) -> list[Any]:
    alone: list[Any] = [SimpleNamespace(owner=SimpleNamespace(accountable=object())) for _ in range(count)]
    for one in alone:
        assert faults.parts([one], RuntimeError("again")) == []
    return alone


def test_who_fails_beside_steps_that_go_through_is_to_blame_however_many_and_however_often() -> None:
    faults = StepFaults()
    for _ in range(MAX_LONE_FAULTS + 1):
        alone = failed_alone(faults, 2)
        faults.succeeded()
        assert [planned for planned, _ in faults.verdict()] == alone


def test_ticks_without_a_fault_say_nothing_about_the_engine() -> None:
    faults = StepFaults()
    for _ in range(MAX_LONE_FAULTS + 1):
        assert faults.verdict() == []
    assert [planned for planned, _ in faults.verdict()] == []
    alone = failed_alone(faults, 1)
    assert [planned for planned, _ in faults.verdict()] == alone


@pytest.mark.parametrize("count", [1, 2])
def test_faults_without_a_step_that_goes_through_are_the_engines_at_two_owners_or_often(count: int) -> None:
    faults = StepFaults()
    with pytest.raises(EngineFault, match="no request's step succeeds: again"):
        for _ in range(MAX_LONE_FAULTS if count == 1 else 1):
            failed_alone(faults, count)
            faults.verdict()
