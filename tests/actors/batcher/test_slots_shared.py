"""Streams of one client that give way to others': their texts, draws and log-probs stay what they are alone."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.messages import GenerateRequest, Result
from tests.actors.batcher.bench import Bench, batcher, prompt_of

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]
SLOTS, LONG, SHORT = 4, 60, 6
# What a client's streams may be like.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
    "log-probs": {"logprobs": 2, "prompt_logprobs": 1},
    "held to a grammar": {"ignore_eos": False, "regex": "[a-z ]{200}"},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 5},
}


async def ask(bench: Bench, client: str, request: GenerateRequest) -> Result:
    result = await bench.ref.call(Generate(request, client=client), timeout=None)
    assert isinstance(result, Result)
    return result


@pytest.mark.trio
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("space", [0.0, 0.01], ids=["evaluated anew", "swapped"])
@pytest.mark.parametrize("kind", KINDS)
async def test_streams_that_give_way_answer_as_they_do_alone(
    tiny_model: TinyModel, family: str, space: float, kind: str
) -> None:
    fields: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True, **KINDS[kind]}
    num_streams = SLOTS // fields.get("n", 1)
    asked = [GenerateRequest(token_ids=prompt_of(9, seed), **fields) for seed in range(num_streams)]
    model = tiny_model(family)
    async with batcher(model, n_parallel=SLOTS) as bench:
        alone = [await ask(bench, "alone", request) for request in asked]
    results: dict[int, Result] = {}
    async with batcher(model, n_parallel=SLOTS, cpu_offload_space=space) as bench, trio.open_nursery() as nursery:

        async def stream(number: int) -> None:
            results[number] = await ask(bench, "greedy", asked[number])

        for number in range(num_streams):
            nursery.start_soon(stream, number)
        while len(bench.actor.slots.sequences) < SLOTS:
            await trio.lowlevel.checkpoint()
        for number in range(4):
            short = GenerateRequest(token_ids=prompt_of(5, 90 + number), max_tokens=SHORT, ignore_eos=True)
            await ask(bench, "polite", short)
            assert len(results) < num_streams, "it waited for the end of a stream"
            while len(bench.actor.slots.sequences) < SLOTS:  # the stream that gave way goes on
                await trio.lowlevel.checkpoint()
        pauses, swaps = bench.actor.stats.preemptions, bench.actor.stats.swaps
    assert pauses >= 2 and (swaps > 0) == (space > 0)
    for number, expected in enumerate(alone):
        found = results[number]
        assert (found.token_ids, found.text, found.several) == (expected.token_ids, expected.text, expected.several)
        for mine, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
            assert [one and one.token_id for one in mine or ()] == [one and one.token_id for one in theirs or ()]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("client", "fields"),
    [("one", {}), ("one", {"n": 2}), ("one", {"tenant": "other"}), ("other", {"tenant": "one"}), ("", {"tenant": "x"})],
    ids=["plain", "n", "names a tenant", "another client", "the program's tenant"],
)
async def test_the_account_that_is_charged_gives_way_and_not_the_connection(
    tiny_model: TinyModel, oracle: OracleOf, client: str, fields: dict[str, Any]
) -> None:
    """A tenant that a client names is no account of its own; a tenant of the program's own request is one."""
    ended: list[str] = []
    async with batcher(tiny_model("llama"), n_parallel=2) as bench, trio.open_nursery() as nursery:

        async def stream(number: int) -> None:
            request = GenerateRequest(token_ids=prompt_of(9, number), max_tokens=LONG, ignore_eos=True, tenant="one")
            result = await ask(bench, "one", request)
            expected = oracle("llama").generate(prompt_of(9, number), LONG)
            assert result.token_ids[: len(expected)] == expected
            ended.append("stream")

        for number in range(2):
            nursery.start_soon(stream, number)
        while len(bench.actor.slots.sequences) < 2:
            await trio.lowlevel.checkpoint()
        short: dict[str, Any] = {"token_ids": prompt_of(5, 7), "max_tokens": SHORT, "ignore_eos": True}
        await ask(bench, client, GenerateRequest(**short, **({"tenant": "one"} | fields)))
        ended.append("short")
    assert ended.index("short") == (2 if client == "one" else 0)


@pytest.mark.trio
async def test_without_fair_share_nobody_gives_way(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), n_parallel=2, fair_share=False) as bench, trio.open_nursery() as nursery:
        for number in range(2):
            long = GenerateRequest(token_ids=prompt_of(9, number), max_tokens=LONG, ignore_eos=True)
            nursery.start_soon(ask, bench, "greedy", long)
        while len(bench.actor.slots.sequences) < 2:
            await trio.lowlevel.checkpoint()
        await ask(bench, "polite", GenerateRequest(token_ids=[5, 6], max_tokens=SHORT, ignore_eos=True))
        assert bench.actor.stats.preemptions == 0
