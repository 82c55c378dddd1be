"""Drafts in a Batcher: several tokens are verified in a step, and nothing but the time changes."""

import json
import random
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genbatch.actors.batcher import drafting
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.drafting import DraftCosts, RunDrafts
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.context.draft_model import MAX_CATCH_UP, NUM_SLOTS, DraftModel
from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runners.torch_runner import ATTENTION_NAME, TorchRunner
from genbatch.nif.sampling.choice import forbid
from genbatch.nif.sampling.grammar import build_tokenizer as build_llguidance_tokenizer
from genbatch.nif.sampling.grammar import compile_matcher, convert
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, ResponseFormat, Result, Token, Usage
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.simulation.history_runner import LoopingRunner

TinyModel = Callable[[str], Model]
NativeModel = Callable[[str], tuple[Model, Callable[[], Any]]]


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of a draft depends on no machine."""
    monkeypatch.setattr(DraftCosts, "price", lambda self, num_sequences, num_keys, guess_s: 0.08)


@asynccontextmanager
async def serving(
    model: Model,
    open_runner: Callable[[], Any],
    *,
    n_ctx: int = 512,
    open_drafter: Callable[[], DraftModel] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Batcher, Any]]:
    chosen = BatcherOptions(
        **{"n_parallel": 4, "batch_timeout": 1.0, "max_batch_tokens": 32, "prompt_lookup": True, **options}
    )
    async with trio.open_nursery() as nursery:

        def opened() -> Context:
            drafter = open_drafter() if open_drafter is not None else None
            sizes = {"n_ctx": n_ctx, "n_parallel": chosen.n_parallel, "n_held": 4, "block_size": 4}
            return Context(model, open_runner(), **sizes, drafter=drafter)

        actor = Batcher(opened, chosen)
        ref = await start(nursery, actor, name="batcher")
        yield actor, ref
        assert actor.slots.seq_pool == set(range(chosen.n_parallel))
        actor.ctx.kv.check_integrity()
        for held in list(actor.held_prompts):
            actor.slots.drop_held(held)
        assert actor.ctx.kv.counts().used == 0
        await ref.stop()


Answers = tuple[list[Result], list[list[Token]], dict[str, int]]


async def ask(model: Model, open_runner: Callable[[], Any], requests: list[dict[str, Any]], **options: Any) -> Answers:
    """Results, streams and what was counted, of requests that come at once."""
    results: dict[int, Result] = {}
    streams: list[list[Token]] = [[] for _ in requests]
    async with serving(model, open_runner, **options) as (actor, ref):

        async def one(index: int, fields: dict[str, Any]) -> None:
            request = GenerateRequest(**{"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, **fields})
            try:
                results[index] = await ref.call(Generate(request, streams[index].append), timeout=None)
            except InvalidRequest as refused:  # such as a grammar that the allowed tokens cannot write
                results[index] = Result(
                    text=str(refused),
                    token_ids=[],
                    finish_reason="error",
                    usage=Usage(prompt_tokens=0, completion_tokens=0),
                )

        async with trio.open_nursery() as nursery:
            for index, fields in enumerate(requests):
                nursery.start_soon(one, index, fields)
        stats = actor.stats
        counted = {
            "drafted": stats.drafted_tokens,
            "accepted": stats.accepted_draft_tokens,
            "steps": stats.steps,
            "generated": stats.generation_tokens,
            "preemptions": stats.preemptions,
        }
    return [results[index] for index in range(len(requests))], streams, counted


def same(one: Answers, other: Answers) -> None:
    """Everything that a caller sees but what the prefix cache gave, log-probabilities to the last bit."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        for field in ("text", "token_ids", "finish_reason", "logprobs", "prompt_logprobs", "choices", "stop_string"):
            assert getattr(mine, field) == getattr(theirs, field), field
    for mine_streamed, theirs_streamed in zip(one[1], other[1], strict=True):
        for choice in {token.choice for token in mine_streamed}:
            mine_tokens = [token for token in mine_streamed if token.choice == choice]
            assert [token.index for token in mine_tokens] == list(range(len(mine_tokens)))
            assert mine_tokens == [token for token in theirs_streamed if token.choice == choice]


NATIVE = ("llama", "llama_odd", "mistral", "gemma3", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="session")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Model, Callable[[], Any]]]:
    """native_model("llama") is a small model of that family that the C kernels run, and what opens its runner."""

    @cache
    def made(name: str) -> tuple[Model, Callable[[], Any]]:
        directory = build_native_model(name, tmp_path_factory.mktemp(name), build_tokenizer)
        model = load_model(str(directory), dtype="float32", n_gpu_layers=0)
        opened = choose_runner(model, EngineOptions(runner="native", n_threads=1))
        return model, lambda: opened(4)

    return made


def prompt_of(seed: int, repeats: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(rng.randint(1, 9))] * repeats


class Guessing(PromptLookup):
    """Guesses what it was told, but for every fifth token: random models do not copy."""

    __slots__ = ("_own",)
    told: ClassVar[list[list[int]]] = []  # prompts with their answers

    def __init__(self) -> None:
        super().__init__()
        self._own: list[int] = []

    @property
    def chance(self) -> float:
        return 0.9

    def catch_up(self, tokens: ListOf[int]) -> None:
        self._own = list(tokens)

    def push(self, token: int) -> None:
        self._own.append(token)

    def draft(self, most: int) -> list[int]:
        length = len(self._own)
        known = next((one for one in self.told if one[:length] == self._own), [])
        return [token if at % 5 else 9 for at, token in enumerate(known[length : length + most], length)]


@pytest.fixture
def _guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "PromptLookup", Guessing)
    monkeypatch.setattr(Guessing, "told", [])


def tell(requests: list[dict[str, Any]], answers: Answers) -> None:
    Guessing.told = [
        [*asked["token_ids"], *choice.token_ids]
        for asked, answer in zip(requests, answers[0], strict=True)
        for choice in answer.choices
    ]


ASKED = st.lists(
    st.fixed_dictionaries(
        {
            "token_ids": st.builds(prompt_of, st.integers(0, 50), st.integers(1, 4)),
            "max_tokens": st.integers(1, 50),
            "ignore_eos": st.booleans(),
            "temperature": st.sampled_from([0.0, 0.0, 0.2, 0.9]),
            "seed": st.integers(0, 9),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
            "stop": st.sampled_from([[], [], ["a"], ["e", "th"]]),
            "min_tokens": st.sampled_from([0, 0, 7]),
            "logprobs": st.sampled_from([None, None, 0, 3]),
            "prompt_logprobs": st.sampled_from([None, None, 1]),
            "logit_bias": st.sampled_from([None, None, {7: 4.0}]),
            "n": st.sampled_from([1, 1, 2]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
            "presence_penalty": st.sampled_from([0.0, 0.0, -0.5]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "bad_words": st.sampled_from([[], [], ["ab", "e"]]),
            "allowed_token_ids": st.sampled_from([None, None, list(range(3, 200))]),
        },
        optional={
            "regex": st.sampled_from(["(ab|c)*", "the constant text [0-9]+ and another constant( text)+", "a{40}b"]),
            "response_format": st.sampled_from(
                [
                    ResponseFormat(type="json_object"),
                    ResponseFormat(
                        type="json_schema",
                        schema={
                            "type": "object",
                            "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer"}},
                            "required": ["name", "count"],
                            "additionalProperties": False,
                        },
                    ),
                ]
            ),
        },
    )
    .filter(lambda asked: not ("regex" in asked and "response_format" in asked))
    .map(lambda asked: {**asked, "ignore_eos": False} if {"regex", "response_format"} & asked.keys() else asked),
    min_size=1,
    max_size=4,
)


def _fitting(request: dict[str, Any], room: int) -> dict[str, int]:
    """The bounds of an answer that fit into so many tokens."""
    most = min(request["max_tokens"], room)
    return {"max_tokens": most, "min_tokens": min(request["min_tokens"], most)}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    requests=ASKED,
    n_ctx=st.sampled_from([64, 512]),
    family=st.sampled_from(NATIVE),
    policy=st.sampled_from(list(SchedulerPolicy)),
)
def test_lookup_changes_no_answer_no_stream_and_no_bit_of_a_logprob(
    native_model: NativeModel,
    _clock: None,
    _guessing: None,
    requests: list[dict[str, Any]],
    n_ctx: int,
    family: str,
    policy: SchedulerPolicy,
) -> None:
    """The small pool pauses sequences in between; windows move on under drafts."""
    model, opened = native_model(family)
    requests = [{**one, **_fitting(one, n_ctx - len(one["token_ids"]))} for one in requests]
    options: dict[str, Any] = {"n_ctx": n_ctx, "scheduler_policy": policy}
    plain = trio.run(lambda: ask(model, opened, requests, prompt_lookup=False, **options))
    tell(requests, plain)
    same(trio.run(lambda: ask(model, opened, requests, prompt_lookup=True, **options)), plain)


@pytest.mark.parametrize("family", NATIVE)
def test_drafts_right_and_wrong_take_fewer_steps_and_give_the_same_bits(
    native_model: NativeModel, _clock: None, _guessing: None, family: str
) -> None:
    model, opened = native_model(family)
    requests = [{"token_ids": prompt_of(seed, 3), "max_tokens": 150, "logprobs": 2} for seed in (1, 2)]
    plain = trio.run(lambda: ask(model, opened, requests, prompt_lookup=False))
    tell(requests, plain)
    looked_up = trio.run(lambda: ask(model, opened, requests, prompt_lookup=True))
    same(looked_up, plain)
    counted = looked_up[2]
    assert 0.9 * counted["drafted"] > counted["accepted"] > 100
    assert counted["steps"] < 0.7 * plain[2]["steps"]
    assert counted["generated"] == plain[2]["generated"] == 300
    assert plain[2]["drafted"] == plain[2]["accepted"] == 0


def test_the_default_models_copies_are_what_generate_says(smollm2: Model, _clock: None) -> None:
    text = "The keeper wrote every name into a green book: Aurora, Swift, Marigold, Old Thomas, the Lady Grey."
    turns = [{"role": "user", "content": f"Repeat the following text exactly, word by word:\n\n{text}"}]
    prompt = smollm2.tokenizer.apply_chat_template(turns)
    ids = torch.tensor([prompt])
    smollm2.hf.set_attn_implementation("sdpa")
    try:
        out = smollm2.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
    finally:
        smollm2.hf.set_attn_implementation(ATTENTION_NAME)
    opened = choose_runner(smollm2, EngineOptions(runner="native"))
    request = {"token_ids": prompt, "max_tokens": 24}
    [answer], _, counted = trio.run(lambda: ask(smollm2, lambda: opened(4), [request]))
    assert answer.token_ids == out[0, len(prompt) :].tolist()
    assert counted["accepted"] >= 8


def test_every_right_draft_saves_a_step(tiny_model: TinyModel, _clock: None) -> None:
    model = tiny_model("llama")
    request = {"token_ids": list(range(20, 32)), "max_tokens": 200}
    _, _, counted = trio.run(lambda: ask(model, LoopingRunner, [request]))
    assert counted["steps"] + counted["accepted"] == 200
    assert counted["drafted"] > counted["accepted"] > 60


LOOPING: dict[str, Any] = {"token_ids": list(range(20, 32)), "max_tokens": 120}


@pytest.mark.parametrize(
    "options", [{"prompt_lookup": False}, {"async_batching": False}], ids=["option off", "no runs"]
)
def test_what_is_never_drafted(tiny_model: TinyModel, _clock: None, options: dict[str, Any]) -> None:
    _, _, counted = trio.run(lambda: ask(tiny_model("llama"), LoopingRunner, [LOOPING], **options))
    assert counted["drafted"] == 0


EDITS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "frequency penalty": {"frequency_penalty": 0.1},
    "presence penalty": {"presence_penalty": 0.5, "temperature": 0.8, "seed": 3},
    "bias": {"logit_bias": {7: 1.0}},
    "min_tokens": {"min_tokens": 85, "ignore_eos": False},
    "logprobs": {"logprobs": 3, "frequency_penalty": 0.1},
    "temperature and seed": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.1},
    "regex": {"regex": "([a-y] ?){30,}", "ignore_eos": False},
    "json": {"response_format": ResponseFormat(type="json_object"), "ignore_eos": False},
    "bad words": {"bad_words": ["e"]},
    "allowed tokens": {"allowed_token_ids": list(range(3, 300))},
    "choices": {"n": 2, "temperature": 0.7, "seed": 2, "frequency_penalty": 0.3},
}


@pytest.mark.parametrize("edits", EDITS)
def test_what_edits_its_logits_is_drafted_and_gives_the_same_bits(
    native_model: NativeModel, _clock: None, _guessing: None, edits: str
) -> None:
    """Each draft has right tokens and a wrong one: a draw sees exactly the tokens before it."""
    model, opened = native_model("llama")
    request = {"token_ids": prompt_of(4, 3), "max_tokens": 90, **EDITS[edits]}
    plain = trio.run(lambda: ask(model, opened, [request], prompt_lookup=False))
    tell([request], plain)
    drafted = trio.run(lambda: ask(model, opened, [request], prompt_lookup=True))
    same(drafted, plain)
    assert drafted[2]["drafted"] > drafted[2]["accepted"] > 0
    assert drafted[2]["steps"] < plain[2]["steps"]


@pytest.mark.parametrize("edits", EDITS)
def test_a_draft_model_draws_with_the_penalties_and_the_grammar_of_its_sequence(
    native_model: NativeModel, _clock: None, edits: str
) -> None:
    """The model drafts for itself, so with the same sampler no draft is wrong."""
    made = native_model("llama")
    request = {"token_ids": prompt_of(4, 3), "max_tokens": 90, **EDITS[edits]}
    plain = trio.run(lambda: ask(*made, [request], prompt_lookup=False))
    drafted = trio.run(lambda: ask(*made, [request], prompt_lookup=False, open_drafter=drafting_with(made)))
    same(drafted, plain)
    assert drafted[2]["accepted"] == drafted[2]["drafted"] > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "shoe_size": {"type": "integer", "minimum": 30, "maximum": 50},
        "is_registered": {"type": "boolean"},
    },
    "required": ["first_name", "shoe_size", "is_registered"],
    "additionalProperties": False,
}


def test_the_text_that_a_schema_forces_is_drafted_by_default_and_the_answer_is_generates(
    smollm2: Model, _clock: None
) -> None:
    """transformers draws with the same masks, one token a forward."""
    turns = [{"role": "user", "content": "Describe a person as JSON."}]
    prompt = smollm2.tokenizer.apply_chat_template(turns)
    settings = {"tokenizer": smollm2.tokenizer.backend.to_str(), "n_vocab": smollm2.vocab_size, "eos_token": [2]}
    constraint = compile_matcher(build_llguidance_tokenizer(settings), convert("json_schema", json.dumps(SCHEMA)))

    def masked(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(prompt):
            constraint.accept(int(ids[0, -1]))
        row = scores.numpy().copy()
        forbid(row, [constraint])
        return torch.from_numpy(row)

    ids = torch.tensor([prompt])
    smollm2.hf.set_attn_implementation("sdpa")
    try:
        out = smollm2.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=60,
            do_sample=False,
            repetition_penalty=1.1,
            eos_token_id=2,
            logits_processor=[masked],
        )
    finally:
        smollm2.hf.set_attn_implementation(ATTENTION_NAME)
    opened = choose_runner(smollm2, EngineOptions(runner="native"))
    request = {
        "token_ids": prompt,
        "max_tokens": 60,
        "repetition_penalty": 1.1,
        "ignore_eos": False,
        "response_format": ResponseFormat(type="json_schema", schema=SCHEMA),
    }
    [answer], _, counted = trio.run(lambda: ask(smollm2, lambda: opened(4), [request], prompt_lookup=False))
    assert answer.token_ids == out[0, len(prompt) :].tolist()
    assert json.loads(answer.text).keys() == SCHEMA["properties"].keys()
    assert counted["accepted"] >= 6 and counted["steps"] <= len(answer.token_ids) - 6
    # A draft reaches the end of the answer: after the last brace nothing but the end token may come.
    assert answer.token_ids[-1] == 2


def test_a_copy_with_a_repetition_penalty_is_what_generate_says(smollm2: Model, _clock: None) -> None:
    text = "The keeper wrote every name into a green book: Aurora, Swift, Marigold, Old Thomas, the Lady Grey."
    turns = [{"role": "user", "content": f"Repeat the following text exactly, word by word:\n\n{text}"}]
    prompt = smollm2.tokenizer.apply_chat_template(turns)
    ids = torch.tensor([prompt])
    smollm2.hf.set_attn_implementation("sdpa")
    try:
        out = smollm2.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.05,
        )
    finally:
        smollm2.hf.set_attn_implementation(ATTENTION_NAME)
    opened = choose_runner(smollm2, EngineOptions(runner="native"))
    request = {"token_ids": prompt, "max_tokens": 24, "repetition_penalty": 1.05}
    [answer], _, counted = trio.run(lambda: ask(smollm2, lambda: opened(4), [request]))
    assert answer.token_ids == out[0, len(prompt) :].tolist()
    assert counted["accepted"] >= 4


def test_runs_of_more_than_two_are_not_looked_up(native_model: NativeModel, _clock: None, _guessing: None) -> None:
    model, opened = native_model("llama")
    requests = [{"token_ids": prompt_of(seed, 3), "max_tokens": 60} for seed in (1, 2, 3)]
    plain = trio.run(lambda: ask(model, opened, requests, prompt_lookup=False))
    tell(requests, plain)
    drafted = trio.run(lambda: ask(model, opened, requests))
    same(drafted, plain)
    assert drafted[2]["drafted"] == 0
    assert trio.run(lambda: ask(model, opened, requests[:2]))[2]["drafted"] > 0


def test_runs_of_more_than_four_are_not_drafted(
    tiny_model: TinyModel, _clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    begin = RunDrafts.begin

    def noted(drafts: RunDrafts) -> None:
        sizes.append(len(drafts._sequences))
        begin(drafts)

    monkeypatch.setattr(RunDrafts, "begin", noted)
    requests = [
        {**LOOPING, "max_tokens": 60 + 5 * index, "regex": "([a-y] ?){200}", "ignore_eos": False} for index in range(6)
    ]
    trio.run(lambda: ask(tiny_model("llama"), LoopingRunner, requests, n_parallel=6))
    assert sizes
    assert max(sizes) <= 4


def test_a_runner_whose_rows_depend_on_one_another_drafts_nothing(tiny_model: TinyModel, _clock: None) -> None:
    model = tiny_model("llama")
    requests = [{"token_ids": prompt_of(1, 3), "max_tokens": 100}]
    _, _, counted = trio.run(lambda: ask(model, lambda: TorchRunner(model), requests))
    assert counted["drafted"] == 0


def test_drafts_pause_nobody_and_wait_where_the_pool_is_full(tiny_model: TinyModel, _clock: None) -> None:
    """Each of the two takes half of the pool in the end, so that there is never a block too many."""
    model = tiny_model("llama")
    requests = [{"token_ids": list(range(first, first + 12)), "max_tokens": 53} for first in (20, 40)]
    options: dict[str, Any] = {"n_ctx": 128, "n_parallel": 2}
    looked_up = trio.run(lambda: ask(model, LoopingRunner, requests, prompt_lookup=True, **options))
    same(looked_up, trio.run(lambda: ask(model, LoopingRunner, requests, prompt_lookup=False, **options)))
    assert looked_up[2]["preemptions"] == 0 and looked_up[2]["accepted"] > 5


def test_an_end_within_a_draft_ends_the_answer_there(tiny_model: TinyModel, _clock: None) -> None:
    model = tiny_model("llama")
    plain = trio.run(lambda: ask(model, LoopingRunner, [LOOPING], prompt_lookup=False))
    tokens = plain[0][0].token_ids
    for at in range(40, 60):
        stop = tokens[at]
        request = {**LOOPING, "stop_token_ids": [stop]}
        [answer], [stream], _ = trio.run(lambda asked=request: ask(model, LoopingRunner, [asked]))
        assert answer.token_ids == tokens[: tokens.index(stop) + 1] and answer.finish_reason == "stop"
        assert [token.token_id for token in stream] == answer.token_ids


def test_a_caller_that_leaves_during_a_draft_leaves_nothing_behind(tiny_model: TinyModel, _clock: None) -> None:
    async def leave() -> None:
        async with serving(tiny_model("llama"), LoopingRunner) as (actor, ref):
            for leaves_at in range(20, 60, 7):
                with trio.CancelScope() as scope:

                    def seen(token: Token, scope: trio.CancelScope = scope, last: int = leaves_at) -> None:
                        if token.index == last:
                            scope.cancel()

                    await ref.call(Generate(GenerateRequest(**LOOPING, ignore_eos=True), seen), timeout=None)
            while actor.slots.sequences:  # noqa: ASYNC110
                await trio.sleep(0.01)  # nobody tells when the Batcher has let a caller go

    trio.run(leave)


# A draft model


def drafting_with(made: tuple[Model, Callable[[], Any]], *, n_ctx: int = 1024) -> Callable[[], DraftModel]:
    model, opened = made

    def open_drafter() -> DraftModel:
        context = Context(model, opened(), n_ctx=n_ctx, n_parallel=NUM_SLOTS, block_size=4, n_batch=256)
        return DraftModel(context, model.vocab_size)

    return open_drafter


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    requests=ASKED,
    n_ctx=st.sampled_from([64, 512]),
    family=st.sampled_from(NATIVE),
    draft_family=st.sampled_from(NATIVE),
    draft_ctx=st.sampled_from([64, 1024]),
    looks_up=st.booleans(),
)
def test_a_draft_model_changes_no_answer_no_stream_and_no_bit_of_a_logprob(
    native_model: NativeModel,
    _clock: None,
    requests: list[dict[str, Any]],
    n_ctx: int,
    family: str,
    draft_family: str,
    draft_ctx: int,
    looks_up: bool,
) -> None:
    model, opened = native_model(family)
    requests = [{**one, **_fitting(one, n_ctx - len(one["token_ids"]))} for one in requests]
    plain = trio.run(lambda: ask(model, opened, requests, prompt_lookup=False, n_ctx=n_ctx))
    drafter = drafting_with(native_model(draft_family), n_ctx=draft_ctx)
    options: dict[str, Any] = {"open_drafter": drafter, "prompt_lookup": looks_up, "n_ctx": n_ctx}
    same(trio.run(lambda: ask(model, opened, requests, **options)), plain)


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_that_agrees_saves_steps(
    native_model: NativeModel, _clock: None, family: str, temperature: float
) -> None:
    """The model drafts for itself: greedy and by the same seed, it draws what the steps draw; windows move on."""
    made = native_model(family)
    requests = [
        {"token_ids": prompt_of(seed, 3), "max_tokens": 90, "temperature": temperature, "seed": seed} for seed in (1, 2)
    ]
    plain = trio.run(lambda: ask(*made, requests, prompt_lookup=False))
    drafter = drafting_with(made)
    drafted = trio.run(lambda: ask(*made, requests, prompt_lookup=False, open_drafter=drafter))
    same(drafted, plain)
    assert drafted[2]["accepted"] == drafted[2]["drafted"] > 100
    assert drafted[2]["steps"] < 0.4 * plain[2]["steps"]


def test_a_draft_model_that_is_wrong_is_asked_less_and_less(native_model: NativeModel, _clock: None) -> None:
    request = {"token_ids": prompt_of(1, 3), "max_tokens": 300}
    drafter = drafting_with(native_model("mistral"))
    _, _, counted = trio.run(lambda: ask(*native_model("llama"), [request], prompt_lookup=False, open_drafter=drafter))
    assert 0 < counted["drafted"] < 150  # of 300 tokens, eight of which a draft may have


def test_a_long_prompt_is_read_in_parts_by_the_draft_model(native_model: NativeModel, _clock: None) -> None:
    made = native_model("llama")
    prompt = list(range(3, 203))
    _, _, counted = trio.run(
        lambda: ask(
            *made,
            [{"token_ids": prompt, "max_tokens": 60}],
            prompt_lookup=False,
            open_drafter=drafting_with(made),
        )
    )
    parts = len(prompt) // MAX_CATCH_UP
    assert counted["accepted"] == counted["drafted"] > 30
    assert counted["drafted"] <= 60 - parts


def test_more_sequences_than_the_draft_model_follows_take_turns(native_model: NativeModel, _clock: None) -> None:
    made = native_model("llama")
    drafter = drafting_with(made)

    async def one_by_one() -> int:
        async with serving(*made, prompt_lookup=False, open_drafter=drafter) as (actor, ref):
            for seed in range(12):
                wanted = GenerateRequest(token_ids=prompt_of(seed, 2), max_tokens=20, ignore_eos=True, temperature=0.0)
                await ref.call(Generate(wanted), timeout=None)
            return actor.stats.accepted_draft_tokens

    assert trio.run(one_by_one) > 12 * 10


def test_a_draft_model_that_fails_is_not_asked_again_and_no_request_fails(
    native_model: NativeModel, _clock: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = native_model("llama")
    request = {"token_ids": prompt_of(1, 3), "max_tokens": 40}
    plain = trio.run(lambda: ask(*made, [request], prompt_lookup=False))

    def failing() -> DraftModel:
        model = drafting_with(made)()

        def step(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(model._ctx, "step", step)
        return model

    drafted = trio.run(lambda: ask(*made, [request], prompt_lookup=False, open_drafter=failing))
    same(drafted, plain)
    assert drafted[2]["drafted"] == 0
    assert [record.message for record in caplog.records].count(
        "the draft model failed; nothing is drafted from now on"
    ) == 1
