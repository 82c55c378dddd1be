"""Prompt lookup by itself, and how long a draft is: lengths follow what guesses and rows cost."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.batcher import drafting
from genbatch.actors.batcher.drafting import DraftCosts, RunDrafts
from genbatch.actors.batcher.generation import Generation
from genbatch.actors.scheduling.plan import StepTimeModel, StepWork
from genbatch.nif.sampling import prompt_lookup
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Sampled, SampleFault

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
