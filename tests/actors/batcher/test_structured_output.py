"""Structured output through the Batcher: every answer matches, and what cannot match fails alone."""

import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import jsonschema
import outcome
import pytest
import trio
import trio.testing

from genbatch.actors.batcher.arrivals import MAX_REST_S, Grammars
from genbatch.actors.batcher.journal import Decoded
from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.grammar import GrammarConstraint
from genbatch.proto.errors import InvalidRequest, QueueFull
from genbatch.proto.messages import ResponseFormat, Result, Token
from tests.actors.batcher.bench import Bench
from tests.actors.batcher.bench import batcher as open_batcher

TinyModel = Callable[[str], Model]

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 4},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
    "nested": {
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date"},
            "where": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 5}, "label": {"const": "é世"}},
                "required": ["x", "label"],
                "additionalProperties": False,
            },
        },
        "required": ["when", "where"],
        "additionalProperties": False,
    },
    "referring": {
        "$ref": "#/$defs/pair",
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "null"}, {"type": "boolean"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
}


@asynccontextmanager
async def batcher(model: Model, *, num_blocks: int = 256, **changed: Any) -> AsyncIterator[Bench]:
    options = EngineOptions(model_path=model.name, n_gpu_layers=0)
    async with open_batcher(
        model,
        num_blocks=[num_blocks],
        new_runner=lambda model: choose_runner(model, options)(4, 512),
        usual={"prompt": "The capital of France", "max_tokens": 200},
        **{"batch_timeout": 0.0, "max_batch_tokens": 64, **changed},
    ) as bench:
        yield bench


@pytest.mark.trio
async def test_a_grammar_does_not_take_runs_without_plans_from_the_batch(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        stepper, num_grammars = bench.actor.stepper, []
        decoded = stepper.decoded

        def note(step: Decoded) -> bool:
            num_grammars.append(sum(planned.owner.constraint is not None for planned in step.run.batch))
            return decoded(step)

        stepper.decoded = note  # type: ignore[method-assign]
        wanted = {"type": "string", "minLength": 30, "maxLength": 30}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(bench.generate, max_tokens=30, ignore_eos=True))
            result = await bench.generate(response_format=schema_format(wanted), temperature=1.0, seed=1)
    assert len(json.loads(result.text)) == 30
    assert 1 in num_grammars, "no run had the sequence with a grammar"


def schema_format(schema: object) -> ResponseFormat:
    return ResponseFormat(type="json_schema", schema=schema)  # type: ignore[arg-type]


@pytest.mark.trio
async def test_what_a_random_model_writes_validates_against_its_schema(tiny_model: TinyModel) -> None:
    results: dict[tuple[str, int], Result] = {}
    async with batcher(tiny_model("llama")) as bench:

        async def ask(name: str, seed: int) -> None:
            results[name, seed] = await bench.generate(
                response_format=schema_format(SCHEMAS[name]), temperature=1.5 if seed else 0.0, seed=seed
            )

        async with trio.open_nursery() as nursery:  # all beside one another
            for name in SCHEMAS:
                for seed in range(4):
                    nursery.start_soon(ask, name, seed)
    assert len(results) == 20
    for (name, _), result in results.items():
        assert result.finish_reason == "stop", (name, result.text)
        validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        validator.validate(json.loads(result.text))


@pytest.mark.trio
async def test_the_default_model_writes_what_its_schema_asks_for(smollm2: Model) -> None:
    async with batcher(smollm2, num_blocks=1024) as bench:
        asked = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
        shaped = await bench.generate(prompt=asked, response_format=schema_format(json.dumps(SCHEMAS["flat"])))
        jsonschema.validate(json.loads(shaped.text), SCHEMAS["flat"])
        free = await bench.generate(prompt=asked, response_format=ResponseFormat(type="json_object"))
        assert isinstance(json.loads(free.text), dict)


@pytest.mark.trio
async def test_every_choice_matches_and_streams_what_it_is(tiny_model: TinyModel) -> None:
    streamed = ["", "", ""]

    def on_token(token: Token) -> None:
        streamed[token.choice] += token.text

    async with batcher(tiny_model("llama")) as bench:
        result = await bench.generate(on_token, regex="(cat|dog|[0-9]{1,3})!", n=3, temperature=2.0, seed=1)
        one = await bench.generate(grammar='root ::= "yes" | "no"')
        lark = await bench.generate(grammar='start: "[" NUMBER "]"\nNUMBER: /[0-9]{2}/')
    assert [choice.text for choice in result.choices] == streamed
    assert all(re.fullmatch("(cat|dog|[0-9]{1,3})!", text) for text in streamed)
    assert len(set(streamed)) > 1
    assert one.text in ("yes", "no") and one.finish_reason == "stop"
    assert re.fullmatch(r"\[[0-9]{2}\]", lark.text)


@pytest.mark.trio
async def test_a_paused_sequence_goes_on_within_its_grammar(tiny_model: TinyModel) -> None:
    params: dict[str, Any] = {"regex": "([0-9]{4}-){12}x", "temperature": 1.0, "max_tokens": 90}
    async with batcher(tiny_model("llama")) as bench:
        alone = [(await bench.generate(seed=seed, **params)).text for seed in range(4)]
    texts = ["", "", "", ""]
    # Room for about two of them, and nobody is through before all are there.
    async with batcher(tiny_model("llama"), num_blocks=36, batch_size=4, batch_timeout=1e6) as bench:

        async def ask(seed: int) -> None:
            texts[seed] = (await bench.generate(seed=seed, **params)).text

        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(ask, seed)
        assert bench.actor.stats.preemptions > 0
    assert texts == alone
    assert all(re.fullmatch("([0-9]{4}-){12}x", text) for text in texts)


@pytest.mark.trio
async def test_the_most_tokens_end_it_in_the_middle_with_length(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        result = await bench.generate(regex="[0-9]{50}", max_tokens=5)
    assert result.finish_reason == "length"
    assert re.fullmatch("[0-9]+", result.text)


@pytest.mark.trio
async def test_what_cannot_be_compiled_fails_alone_and_names_its_field(tiny_model: TinyModel) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("regex", {"regex": "("}),
        ("grammar", {"grammar": "start: nowhere"}),
        ("response_format.schema", {"response_format": schema_format({"type": "nonsense"})}),
        ("regex", {"regex": "(ab|c)*" * 9000}),
    ]
    async with batcher(tiny_model("llama")) as bench:
        good = await bench.generate(max_tokens=16)
        beside: list[Result] = []

        async def ask_well() -> None:
            beside.append(await bench.generate(max_tokens=16))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_well)
            for field, params in bad:
                with pytest.raises(InvalidRequest) as caught:
                    await bench.generate(**params)
                assert caught.value.field == field
        with pytest.raises(InvalidRequest) as caught:
            await bench.generate(regex="a", beam_width=2)
        assert caught.value.field == "regex"
    assert beside[0].token_ids == good.token_ids


@pytest.mark.trio
async def test_a_constraint_that_cannot_go_on_ends_its_request_only(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = GrammarConstraint.prepare

    def failing(self: GrammarConstraint) -> None:
        prepare(self)
        if self._num_tokens == 3:
            self._fault = "takes too long to follow"

    async with batcher(tiny_model("llama")) as bench:
        good = await bench.generate(max_tokens=24)
        # A row next to it in every step.
        monkeypatch.setattr(GrammarConstraint, "prepare", failing)
        beside: list[Result] = []

        async def ask_well() -> None:
            beside.append(await bench.generate(max_tokens=24))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_well)
            with pytest.raises(InvalidRequest, match="too long") as caught:
                await bench.generate(regex="[0-9]{20}")
            assert caught.value.field == "regex"
    assert beside[0].token_ids == good.token_ids


@pytest.mark.trio
async def test_a_slow_mask_sits_out_while_others_decode(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is held until the other caller has all its tokens: had a step waited for it, this would never end."""
    import threading

    others_done, prepare = threading.Event(), GrammarConstraint.prepare
    held: list[str] = []

    def slow(self: GrammarConstraint) -> None:
        if self._num_tokens == 2 and not self._is_prepared:
            held.append(threading.current_thread().name)
            assert others_done.wait(60)
        prepare(self)
        self._last_s = 1.0  # took a second, so the next one is slow

    monkeypatch.setattr(GrammarConstraint, "prepare", slow)
    async with batcher(tiny_model("llama")) as bench:
        done: list[Result] = []

        async def ask() -> None:
            done.append(await bench.generate(regex="[0-9]{6}"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not held:
                await bench.generate(max_tokens=2)
            other = await bench.generate(max_tokens=40)
            assert len(other.token_ids) == 40 or other.finish_reason == "stop"
            assert not done
            others_done.set()
    assert held == ["genbatch-masks"]
    assert re.fullmatch("[0-9]{6}", done[0].text)


@pytest.mark.trio
async def test_a_hostile_grammar_leaves_another_caller_s_tokens_as_they_are(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        alone = await bench.generate(max_tokens=100, ignore_eos=True)
        ended: list[str] = []
        beside: list[Result] = []

        async def attack(params: dict[str, Any]) -> None:
            try:
                ended.append((await bench.generate(client="mallory", max_tokens=60, **params)).finish_reason)
            except InvalidRequest as error:
                ended.append(error.field or "")

        async def ask_well() -> None:
            beside.append(await bench.generate(client="alice", max_tokens=100, ignore_eos=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, {"grammar": 'start: a\na: a a | "x" |\n'})
            nursery.start_soon(attack, {"regex": ".*a.{20}b.*c.{30}d"})
            nursery.start_soon(ask_well)
    assert beside[0].token_ids == alone.token_ids
    assert len(ended) == 2


def held_compiler(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """Which grammars were compiled, in their order, and what the compiler waits for."""
    from genbatch.nif.sampling import grammar_compiler

    order: list[str] = []
    queued, compile_ = threading.Event(), grammar_compiler.GrammarCompiler.compile

    def noted(self: Any, kind: str, text: str, *rest: Any) -> Any:
        order.append(text)
        assert queued.wait(60)
        return compile_(self, kind, text, *rest)

    monkeypatch.setattr(grammar_compiler.GrammarCompiler, "compile", noted)
    return order, queued


@pytest.mark.trio
async def test_one_client_s_grammars_do_not_hold_up_another_s(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, queued = held_compiler(monkeypatch)
    async with batcher(tiny_model("llama"), max_client_open=100.0) as bench:

        async def ask(client: str, text: str) -> None:
            await bench.generate(client=client, regex=text)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, "mallory", f"m{number}")
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "alice", "a")
            await trio.testing.wait_all_tasks_blocked()
            queued.set()
    assert order == ["m0", "m1", "a", "m2"]


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.004, 0.004), (2.0, MAX_REST_S)])
def test_between_two_grammars_their_thread_rests(took_s: float, rests_s: float) -> None:
    """Else a client that sends one after another has all slots filled in every step."""
    now, jobs, sent = [0.0], list[Any](), list[Any]()
    worker: Any = SimpleNamespace(now=lambda: now[0], submit=lambda job, *args, on_done: jobs.append((args, on_done)))
    grammars = Grammars(None, 1.0, sent.append, lambda _: worker)  # type: ignore[arg-type]
    first, second = (SimpleNamespace(account="a", replied=False) for _ in range(2))
    grammars.compile(first)  # type: ignore[arg-type]
    grammars.compile(second)  # type: ignore[arg-type]
    [(args, on_done)] = jobs
    assert args == (first,)
    now[0] += took_s
    on_done(outcome.Value([]))
    assert [message.request for message in sent] == [first]  # it does not wait for that
    (args, on_done) = jobs[-1]
    assert args == (pytest.approx(rests_s),) and len(jobs) == 2
    on_done(outcome.Value(None))
    assert jobs[-1][0] == (second,)


@pytest.mark.trio
async def test_grammars_that_wait_are_bounded_and_those_of_callers_that_left_are_not_compiled(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, queued = held_compiler(monkeypatch)
    async with batcher(tiny_model("llama"), max_client_open=100.0, max_queue=4) as bench:

        async def ask(client: str, text: str) -> None:
            await bench.generate(client=client, regex=text)

        refused: list[str] = []

        async def stay(text: str) -> None:
            try:
                await ask("mallory", text)
            except QueueFull:
                refused.append(text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "bob", "b")
            await trio.testing.wait_all_tasks_blocked()
            for turn in range(3):  # what left before holds nobody up
                refused.clear()
                async with trio.open_nursery() as leaving:
                    for number in range(20):
                        leaving.start_soon(stay, f"m{turn}.{number}")
                        await trio.testing.wait_all_tasks_blocked()
                    assert 0 < len(refused) < 20  # what waits for a grammar is in the queue, like any other
                    leaving.cancel_scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "alice", "a")
            await trio.testing.wait_all_tasks_blocked()
            queued.set()
    assert [text for text in order if text.startswith("m")] == []
    assert order == ["b", "a"]
