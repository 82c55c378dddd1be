"""Prompt lookup: tokens that were said before are checked several at a time, and nothing but the time changes."""

import json
import random
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genbatch.actors.batcher import drafting, generation
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.drafting import DraftCosts, RunDrafts
from genbatch.actors.batcher.generation import Generation
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
from genbatch.nif.runners.attention import ATTENTION_NAME
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling import prompt_lookup
from genbatch.nif.sampling.grammar import build_tokenizer as build_llguidance_tokenizer
from genbatch.nif.sampling.grammar import compile_matcher, convert
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Sampled, SampleFault, forbid
from genbatch.nif.step_costs import StepWork
from genbatch.nif.step_time import StepTimeModel
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, ResponseFormat, Result, Token, Usage
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.simulation.history_runner import LoopingRunner

TinyModel = Callable[[str], Model]
NativeModel = Callable[[str], tuple[Model, Callable[[], Any]]]


# The lookup


def fed(tokens: list[int], prompt: int = 1) -> PromptLookup:
    lookup = PromptLookup()
    lookup.catch_up(tokens[:prompt])
    for token in tokens[prompt:]:
        lookup.push(token)
    return lookup


def test_a_draft_is_what_followed_the_last_two_tokens_before() -> None:
    lookup = PromptLookup()
    lookup.catch_up([5, 6, 7, 8, 9, 1, 5, 6])
    assert lookup.draft(3) == [7, 8, 9]
    lookup.push(7)
    assert lookup.draft(2) == [8, 9]
    lookup.push(4)  # another one than it guessed, after which nothing is known
    assert lookup.draft(2) == [] and lookup.chance == 0.0


def test_of_several_places_the_last_one_counts() -> None:
    lookup = PromptLookup()
    lookup.catch_up([5, 6, 1, 5, 6, 2, 5, 6])
    assert lookup.draft(1) == [2]


def test_a_text_that_goes_round_is_drafted_beyond_its_end() -> None:
    assert fed([1, 2, 3, 1, 2, 3, 1, 2], prompt=8).draft(7) == [3, 1, 2, 3, 1, 2, 3]
    assert fed([4, 4, 4], prompt=3).draft(3) == [4, 4, 4]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_too_few_tokens_give_no_draft(tokens: list[int]) -> None:
    lookup = PromptLookup()
    lookup.catch_up(tokens)
    assert lookup.draft(4) == []


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 60), st.integers(1, 10))
def test_a_lookup_that_was_fed_token_by_token_is_one_that_was_fed_at_once(
    tokens: list[int], prompt: int, most: int
) -> None:
    one, other = fed(tokens, prompt), PromptLookup()
    other.catch_up(tokens[:prompt])
    other.catch_up(tokens)
    assert one.draft(most) == other.draft(most) and one.chance == other.chance
    # What a search through all of it finds, unless an earlier guess is being followed.
    places = [at for at in range(2, len(tokens)) if tokens[at - 2 : at] == tokens[-2:]]
    if places:
        assert any(tokens[at] == one.draft(1)[0] for at in places)
    else:
        assert one.draft(1) == []


def test_the_chance_is_the_share_of_right_guesses_and_none_is_drafted_before_one_was_right() -> None:
    rng = random.Random(1)
    copied = [rng.randrange(1000) for _ in range(40)]
    good, bad = fed(copied + copied, prompt=40), fed([3, 4] + [t for n in range(40) for t in (3, 4, 10 + n)], prompt=4)
    assert good.chance > 0.9
    bad.push(3)
    bad.push(4)
    assert bad.draft(1) and bad.chance < 0.1


def test_of_a_long_prompt_the_end_is_looked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "MAX_PROMPT", 10)
    lookup = PromptLookup()
    tokens = [1, 2, 3, *range(100, 110), 1, 2]
    lookup.catch_up(tokens)
    assert lookup.draft(1) == []
    lookup.catch_up([*tokens, 107, 108])
    assert lookup.draft(1) == [109]


# When a draft pays


class Sequences:
    """Sequences that copy or do not, and a clock on which a step and a row take what they are told."""

    def __init__(self, texts: list[list[int]], prompt: int, *, step_s: float, row_s: float, left: int = 10**6) -> None:
        self.now, self.step_s, self.row_s = 0.0, step_s, row_s
        self.texts, self.at = texts, [prompt] * len(texts)
        self.drafted = self.steps = 0
        self.sequences = [
            SimpleNamespace(
                lookup=PromptLookup(),
                max_new_tokens=left,
                num_generated=0,
                tokens=text[:prompt],
                sampler=self.sampler(),
                forced_chance=0.9,
            )
            for text in texts
        ]
        self.times = StepTimeModel()
        self.drafts = RunDrafts(
            cast("list[Generation]", self.sequences), DraftCosts(self.times), max_rows=64, vocab_size=10**6
        )
        self.drafts.begin()

    @staticmethod
    def sampler() -> Any:
        return SimpleNamespace(forced=lambda: ())

    def step(self) -> list[int]:
        """Lengths of the drafts."""
        proposed = self.drafts.next() or [[] for _ in self.texts]
        draws: list[list[Sampled | SampleFault]] = []
        for index, draft in enumerate(proposed):
            right = 0
            text = self.texts[index][self.at[index] :]
            while right < len(draft) and draft[right] == text[right]:
                right += 1
            draws.append([Sampled(token) for token in text[: right + 1]])
            self.at[index] += right + 1
        lengths = [len(draft) for draft in proposed]
        seconds = self.step_s + self.row_s * sum(lengths)
        self.now += seconds
        self.times.took(StepWork(decodes=len(lengths), drafted=sum(lengths)), seconds)
        self.going = self.drafts.took(draws, sum(lengths))
        self.drafted += sum(lengths)
        self.steps += 1
        return lengths


def copying(rng: random.Random, times: int = 40) -> list[int]:
    return [rng.randrange(10**6) for _ in range(50)] * times


def chatting(rng: random.Random, size: int = 4000) -> list[int]:
    """Pairs come again and again, and what follows them is chance."""
    return [rng.randrange(12) for _ in range(size)]


def test_what_copies_is_drafted_in_full_where_rows_are_cheap() -> None:
    world = Sequences([copying(random.Random(2))], 60, step_s=1.0, row_s=0.02)
    lengths = [world.step()[0] for _ in range(40)]
    assert lengths[0] == 0  # a step to compare with
    assert lengths[-20:] == [drafting.MAX_DRAFT] * 20


def test_the_dearer_a_row_the_shorter_the_draft_and_where_it_never_pays_there_is_none() -> None:
    totals = []
    for row_s in (0.02, 0.1, 0.3, 1.0):
        world = Sequences([copying(random.Random(3))], 60, step_s=1.0, row_s=row_s)
        for _ in range(150):
            world.step()
        totals.append(world.drafted)
        tokens = world.at[0] - 60
        assert world.now < tokens * 1.02, "slower than without"
    assert totals == sorted(totals, reverse=True) and totals[-1] < 60


@pytest.mark.parametrize("row_s", [0.02, 0.1, 0.3, 1.0])
def test_what_does_not_copy_loses_next_to_nothing(row_s: float) -> None:
    world = Sequences([chatting(random.Random(4))], 100, step_s=1.0, row_s=row_s)
    for _ in range(1000):
        world.step()
    assert world.now < (world.at[0] - 100) * 1.02


def test_one_that_begins_to_copy_late_is_drafted_then() -> None:
    rng = random.Random(5)
    once = [rng.randrange(10**6) for _ in range(300)]
    world = Sequences([chatting(rng, 300) + once + once[100:]], 100, step_s=1.0, row_s=0.1)
    for _ in range(500):
        world.step()
    before = world.drafted
    while world.at[0] < 780:
        world.step()
    assert world.drafted - before > 100


def test_a_price_that_was_measured_too_high_is_tried_again() -> None:
    world = Sequences([copying(random.Random(6), 300)], 60, step_s=1.0, row_s=5.0)
    for _ in range(100):
        world.step()
    world.row_s = 0.05
    assert max(world.step()[0] for _ in range(1500)) == drafting.MAX_DRAFT


def test_beside_one_without_a_draft_a_step_is_made_a_tenth_longer_at_most() -> None:
    rng = random.Random(7)
    texts = [copying(rng), [rng.randrange(10**9) for _ in range(3000)]]
    world = Sequences(texts, 60, step_s=1.0, row_s=0.03)
    lengths = [world.step() for _ in range(200)]
    assert max(first for first, _ in lengths) == 3 and not any(second for _, second in lengths)


def test_nobody_is_drafted_beyond_its_last_token() -> None:
    world = Sequences([copying(random.Random(8))], 60, step_s=1.0, row_s=0.02, left=41)
    while True:
        world.step()
        if not world.going:
            break
    assert world.at[0] - 60 == 41


def test_forced_tokens_are_drafted_before_any_guess_and_no_longer_where_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = copying(random.Random(9))
    at = [60]
    monkeypatch.setattr(
        Sequences, "sampler", staticmethod(lambda: SimpleNamespace(forced=lambda: text[at[0] : at[0] + 3]))
    )
    world = Sequences([text], 60, step_s=1.0, row_s=0.02)
    lengths = []
    for _ in range(30):
        lengths.append(world.step()[0])
        at[0] = world.at[0]
    assert lengths[1:] == [3] * 29
    assert world.sequences[0].forced_chance > 0.98
    text = [7] * len(text)  # what is forced is another text now than what is drawn
    lengths = [world.step()[0] for _ in range(60)]
    assert lengths[0] == 3 and lengths[-1] == 0
    assert world.sequences[0].forced_chance < 0.1


def test_no_token_beyond_the_models_vocabulary_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have more tokens than the model has rows of embeddings."""
    text = copying(random.Random(10))
    monkeypatch.setattr(
        Sequences, "sampler", staticmethod(lambda: SimpleNamespace(forced=lambda: [*text[60:62], 10**6, text[63]]))
    )
    world = Sequences([text], 60, step_s=1.0, row_s=0.02)
    world.step()
    world.times.took(StepWork(decodes=1), 1.0)
    assert world.drafts.next() == [text[60:62]]


def test_a_grammar_that_raises_fails_no_step_and_its_sequence_is_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> list[int]:
        raise ValueError("planted")

    monkeypatch.setattr(Sequences, "sampler", staticmethod(lambda: SimpleNamespace(forced=failing)))
    world = Sequences([copying(random.Random(11))], 60, step_s=1.0, row_s=0.02)
    assert [world.step() for _ in range(30)] == [[0]] * 30


# The Batcher


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
        for held in list(actor.held):
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
    monkeypatch.setattr(generation, "PromptLookup", Guessing)
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
