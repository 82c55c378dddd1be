"""A model's own multi-token head guesses as transformers' does, through chunks, forks, pauses and the prefix cache."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch.actors.batcher.drafting import DraftCosts
from genbatch.nif.context import Context
from genbatch.nif.context.drafters import DRAFTED_SEQUENCES, Drafted
from genbatch.nif.context.engine import Engine, load_engine
from genbatch.nif.context.multi_token_head import MAX_WAITING, MultiTokenHead
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model import describe_model
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from tests.nif.drafted_answers import REQUESTS, answers, prompt_of
from tests.nif.models.test_gguf_families import written
from tests.nif.mtp_models import FAMILIES, MtpPair, mtp_tensors, random_pair, right_pair
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer

BLOCK = 16


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpPair:
    return random_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> MtpPair:
    return random_pair("qwen3_5", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> MtpPair:
    return right_pair(tmp_path_factory.mktemp("right"))


def open_context(pair: MtpPair, n_parallel: int = 6, **options: Any) -> Context:
    engine = load_engine(EngineOptions(model_path=str(pair.path), draft="self", dtype="float32", n_ctx=1024, **options))
    return engine.open_context(n_parallel=n_parallel, n_held=0, n_batch=128)


def proposed(context: Context, texts: dict[int, list[int]], *lengths: int) -> list[list[int]]:
    """What the head drafts for sequences of which the context has read all tokens but the last."""
    assert context.drafter is not None
    greedy = SamplerState(SamplingParams(seed=0), ())
    return context.drafter.propose([Drafted(slot, slot, text, greedy) for slot, text in texts.items()], lengths)


def feed(context: Context, tokens: Sequence[int], seq_id: int = 0, chunk: int = 128) -> None:
    for start in range(0, len(tokens), chunk):
        n_past = context.kv.length(seq_id)
        context.eval([Entry(seq_id, tokens[start : start + chunk], n_past, Logits.LAST)])


def test_rows_and_logits_are_transformers(family: MtpPair) -> None:
    context, tokens = open_context(family), prompt_of(40)
    feed(context, tokens[:-1])
    assert proposed(context, {0: tokens}, 5) == [family.guesses(tokens, 5)]
    context.close()


@pytest.mark.parametrize("chunk", [1, 5, BLOCK, 128])
def test_guesses_at_each_position_are_transformers(pair: MtpPair, chunk: int) -> None:
    context, tokens = open_context(pair), prompt_of(80, 2)
    feed(context, tokens[:60], chunk=chunk)
    for end in range(61, 80):
        assert proposed(context, {0: tokens[:end]}, 3) == [pair.guesses(tokens[:end], 3)]
        feed(context, tokens[end - 1 : end])
    context.close()


def test_a_prompt_without_a_draft_is_read_in_time(pair: MtpPair) -> None:
    context, tokens = open_context(pair), prompt_of(MAX_WAITING * 2 + 5, 3)
    feed(context, tokens[:-1], chunk=1)
    assert isinstance(context.drafter, MultiTokenHead)
    assert context.drafter._waiting[0].first >= MAX_WAITING  # the rows do not pile up
    assert proposed(context, {0: tokens}, 4) == [pair.guesses(tokens, 4)]
    context.close()


def test_sequences_draft_together_with_lengths_of_their_own(pair: MtpPair) -> None:
    context = open_context(pair)
    texts = {slot: prompt_of(20 + 13 * slot, slot) for slot in range(DRAFTED_SEQUENCES)}
    for slot, text in texts.items():
        feed(context, text[:-1], slot)
    drafts = proposed(context, texts, 4, 0, 1, 2)
    assert drafts == [pair.guesses(text, n) if n else [] for text, n in zip(texts.values(), (4, 0, 1, 2), strict=True)]
    context.close()


def test_wrong_drafts_leave_no_trace(pair: MtpPair) -> None:
    """A step verifies three tokens, of which one is right."""
    context, tokens = open_context(pair), prompt_of(BLOCK + 14, 4)
    feed(context, tokens)
    logits = [context.eval([Entry(0, [7], len(tokens), Logits.LAST)])[0][0]]
    drawn = int(logits[0].argmax())
    run = context.decode_run(
        [Entry(0, (drawn,), len(tokens) + 1)], [SamplerState(SamplingParams(seed=0), ())], max_steps=4
    )
    [first, *_] = run.verify([[1, 2, 3]])[0]
    [draws] = run.verify([[1, 2, 3]])
    text = [*tokens, 7, drawn, first.token_id, *(draw.token_id for draw in draws)]  # type: ignore[union-attr]
    run.close()
    assert context.kv.length(0) == len(text) - 1
    assert proposed(context, {0: text}, 3) == [pair.guesses(text, 3)]
    context.close()


@pytest.mark.parametrize("length", [BLOCK + 5, 2 * BLOCK + 5], ids=["rows wait", "rows were read"])
def test_forks_take_the_keys_along(pair: MtpPair, length: int) -> None:
    context, shared = open_context(pair), prompt_of(length, 5)
    feed(context, shared)
    context.seq_cp(0, 1)
    ends = {0: [9, 200, 31, 4], 1: [77, 5, 100, 8]}
    for slot, end in ends.items():
        feed(context, end[:-1], slot)
    texts = {slot: shared + end for slot, end in ends.items()}
    assert proposed(context, texts, 3, 3) == [pair.guesses(text, 3) for text in texts.values()]
    context.close()


def test_a_slot_forgets_the_rows_of_its_former_sequence(pair: MtpPair) -> None:
    """The former sequence has as many rows that wait as the next one finds in the prefix cache."""
    former, text = prompt_of(2 * BLOCK, 12), prompt_of(2 * BLOCK + 6, 13)
    earlier = [*text[: len(former)], *prompt_of(12, 14)]
    guesses = []
    for slot in (0, 2):
        context = open_context(pair)
        context.attach_prefix(1, earlier)
        feed(context, earlier, 1)
        context.seq_rm(1)
        feed(context, former)
        context.seq_rm(0)
        assert context.attach_prefix(slot, text) == len(former)
        feed(context, text[len(former) : -1], slot)
        guesses += proposed(context, {slot: text}, 4)
        context.close()
    assert guesses[0] == guesses[1] and len(guesses[0]) == 4


def test_the_prefix_cache_has_the_keys(pair: MtpPair) -> None:
    context, prompt = open_context(pair), prompt_of(3 * BLOCK + 6, 6)
    context.attach_prefix(0, prompt)
    feed(context, [*prompt, 5])
    context.seq_rm(0)
    other = [*prompt[: 3 * BLOCK], 11, 12, 13, 14]
    assert context.attach_prefix(2, other) == 3 * BLOCK
    feed(context, other[3 * BLOCK : -1], 2)
    # The last position of the shared blocks was read with the token that followed it then.
    [guesses] = proposed(context, {2: other}, 3)
    assert len(guesses) == 3
    states = pair.states(other[:-1])
    following = [*other[1 : 3 * BLOCK], prompt[3 * BLOCK], *other[3 * BLOCK + 1 :]]
    assert guesses[0] == int(pair.read(following, states)[0][-1].argmax())
    context.close()


def test_a_saved_sequence_keeps_its_keys(pair: MtpPair) -> None:
    context, prompt = open_context(pair), prompt_of(2 * BLOCK, 7)
    feed(context, prompt)
    assert proposed(context, {0: [*prompt, 6]}, 1) == [pair.guesses([*prompt, 6], 1)]
    other = open_context(pair)
    other.seq_load(3, context.seq_save(0))
    text = [*prompt, 6, 8, 9]
    feed(other, text[len(prompt) : -1], 3)
    assert proposed(other, {3: text}, 3) == [pair.guesses(text, 3)]
    other.close()
    context.close()


def test_after_steps_of_many_sequences_the_head_begins_anew(pair: MtpPair) -> None:
    context, prompt = open_context(pair), prompt_of(BLOCK, 8)
    many = range(DRAFTED_SEQUENCES + 1)
    context.eval([Entry(slot, prompt, 0, Logits.LAST) for slot in many])
    text = [*prompt, *prompt_of(2 * BLOCK, 9)]
    feed(context, text[BLOCK:-1])
    assert proposed(context, {0: text}, 3) == [pair.guesses(text, 3, begin=BLOCK)]
    context.eval([Entry(slot, [text[-1]], context.kv.length(slot), Logits.LAST) for slot in many])
    assert proposed(context, {0: [*text, 4]}, 3) == [[]]  # its newest row is missing
    feed(context, [4, 5, 6])
    # Where one position of a block is missing, the others count.
    assert len(proposed(context, {0: [*text, 4, 5, 6, 7]}, 2)[0]) == 2
    context.close()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe"])
def test_gguf_files_have_the_head_under_llama_cpps_names(name: str, tmp_path: Path) -> None:
    pair = random_pair(name, tmp_path / "hf")
    written(tmp_path / "model.gguf", name, pair.hf, mtp_tensors(pair))
    path = MtpPair(pair.hf, pair.mtp, tmp_path / "model.gguf")
    context, tokens = open_context(path), prompt_of(40)
    feed(context, tokens[:-1])
    assert proposed(context, {0: tokens}, 5) == [pair.guesses(tokens, 5)]
    context.close()


# Answers


@pytest.fixture
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "price", lambda self, num_sequences, num_keys, guess_s: 0.05)  # on any machine


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.usefixtures("_cheap")
def test_answers_are_those_without_drafts(right: MtpPair, kind: str) -> None:
    requests = [REQUESTS[kind]]
    plain, _ = trio.run(lambda: answers(right.path, "", requests))
    drafted, counted = trio.run(lambda: answers(right.path, "self", requests))
    assert drafted == plain
    assert counted["accepted_draft_tokens"] > 20


@pytest.mark.usefixtures("_cheap")
def test_answers_of_a_crowd_with_bad_guesses_are_those_without_drafts(pair: MtpPair) -> None:
    requests = [*REQUESTS.values(), {"temperature": 0, "max_tokens": 150}]
    plain, _ = trio.run(lambda: answers(pair.path, "", requests))
    drafted, counted = trio.run(lambda: answers(pair.path, "self", requests))
    assert drafted == plain
    assert counted["drafted_tokens"] > counted["accepted_draft_tokens"]


@pytest.mark.usefixtures("_cheap")
def test_weights_that_were_kept_have_the_head(right: MtpPair, cache: Path) -> None:
    first = trio.run(lambda: answers(right.path, "self", [{"temperature": 0}], quantize="int8"))
    assert list((cache / "packed").glob("*.weights"))
    second = trio.run(lambda: answers(right.path, "self", [{"temperature": 0}], quantize="int8"))
    assert first[0] == second[0] and second[1]["accepted_draft_tokens"] > 20


# Costs and refusals


def test_the_heads_keys_count_as_keys(pair: MtpPair) -> None:
    model = describe_model(str(pair.path), dtype="float32")
    assert model is not None
    plain, with_head = NativeRunner(ModelWeights(model)), NativeRunner(ModelWeights(model, mtp=True))
    group = with_head.mtp_group
    assert group is not None and plain.mtp_group is None
    layers = len(plain.groups[group].layers)
    assert with_head.bytes_per_block(group, BLOCK) * layers == plain.bytes_per_block(group, BLOCK) * (layers + 1)
    assert with_head.step_bytes(64, 4) > plain.step_bytes(64, 4)


@pytest.mark.usefixtures("_cheap")
@pytest.mark.parametrize("failing", [3, 4, 5, 6])
def test_a_head_that_fails_drafts_nothing_and_fails_nobody(
    right: MtpPair, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Two forwards rehearse. The next ones draft a first token and further ones."""
    plain, _ = trio.run(lambda: answers(right.path, "", [{"temperature": 0}]))
    predict, count = NativeRunner.predict, 0

    def fails(*given: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count >= failing:
            raise MemoryError("no room")
        return predict(*given, **options)

    monkeypatch.setattr(NativeRunner, "predict", fails)
    answer, counted = trio.run(lambda: answers(right.path, "self", [{"temperature": 0}]))
    assert answer == plain and count == failing
    assert counted["drafted_tokens"] < 10


def test_what_has_no_head_is_refused(pair: MtpPair, tmp_path: Path) -> None:
    def refusal(path: Path, **options: Any) -> str:
        options = {"model_path": str(path), "draft": "self", "dtype": "float32", "n_ctx": 256, **options}
        with pytest.raises(OptionError) as caught:
            Engine.open_context(load_engine(EngineOptions(**options)), n_parallel=2, n_held=0, n_batch=32)
        assert caught.value.option == "draft"
        return str(caught.value)

    without = build_native_model("qwen3_5", tmp_path / "without", build_tokenizer)
    assert "have no multi-token head (MTP): mtp.fc" in refusal(without)
    assert "are not supported" in refusal(build_native_model("llama", tmp_path / "llama", build_tokenizer))
    assert "cannot verify drafts exactly" in refusal(pair.path, runner="torch")
    assert json.loads((without / "config.json").read_text())["model_type"] == "qwen3_5_text"
