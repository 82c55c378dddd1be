"""An assistant of Gemma 4 guesses as transformers' does, through chunks, forks, saved sequences and prefix hits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from genbatch.actors.batcher.drafting import DraftCosts
from genbatch.nif.context import Context
from genbatch.nif.context.drafters import DRAFTED_SEQUENCES, Drafted
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from tests.nif.assistant_models import CLUSTERS, FAMILIES, WINDOW, AssistedPair, random_pair, right_pair, written
from tests.nif.drafted_answers import REQUESTS, answers, prompt_of
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer

BLOCK = 16
HEADS: dict[str, dict[str, Any]] = {"every token": {}, "clusters": CLUSTERS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> AssistedPair:
    return random_pair("gemma4", tmp_path_factory.mktemp("pair"), **CLUSTERS)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> AssistedPair:
    return right_pair(tmp_path_factory.mktemp("right"))


def open_context(pair: AssistedPair, **options: Any) -> Context:
    options = {"dtype": "float32", "n_ctx": 1024, **options}
    engine = load_engine(EngineOptions(model_path=str(pair.path), draft=str(pair.draft), **options))
    return engine.open_context(n_parallel=6, n_held=0, n_batch=128)


def proposed(context: Context, texts: dict[int, list[int]], *lengths: int) -> list[list[int]]:
    """What the assistant drafts for sequences of which the context has read all tokens but the last."""
    assert context.drafter is not None
    greedy = SamplerState(SamplingParams(seed=0), ())
    return context.drafter.propose([Drafted(slot, slot, text, greedy) for slot, text in texts.items()], lengths)


def feed(context: Context, tokens: Sequence[int], seq_id: int = 0, chunk: int = 128) -> None:
    for start in range(0, len(tokens), chunk):
        n_past = context.kv.length(seq_id)
        context.eval([Entry(seq_id, tokens[start : start + chunk], n_past, Logits.LAST)])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_guesses_at_each_position_are_transformers(name: str, head: str, tmp_path: Path) -> None:
    """Through the end of the window, and through block after block that falls behind it."""
    pair = random_pair(name, tmp_path, **HEADS[head])
    context, tokens = open_context(pair), prompt_of(3 * WINDOW, 2)
    for end in range(1, len(tokens)):
        feed(context, tokens[end - 1 : end])
        assert proposed(context, {0: tokens[: end + 1]}, 3) == [pair.guesses(tokens[: end + 1], 3)], end
    context.close()


@pytest.mark.parametrize("head", HEADS)
def test_logits_and_rows_are_transformers(head: str, tmp_path: Path) -> None:
    pair = random_pair("gemma4", tmp_path, **HEADS[head])
    context, tokens = open_context(pair), prompt_of(40)
    feed(context, tokens[:-1])
    assert context._follower is not None
    read, found = context._follower._read, []

    def kept(parts: Any, **_: Any) -> Any:
        found.append(read(parts, with_logits=True))
        return found[-1]

    context._follower._read = kept  # type: ignore[method-assign]
    proposed(context, {0: tokens}, 2)
    for (logits, largest, rows), (wanted, state) in zip(found, pair.read(tokens, 2), strict=True):
        np.testing.assert_allclose(logits[0], wanted, atol=2e-5)
        np.testing.assert_allclose(rows[0], state, atol=2e-5)
        assert largest.token_ids[0] == wanted.argmax() and largest.values[0] == logits[0].max()
    context.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_files_have_assistants_under_llama_cpps_names(name: str, tmp_path: Path) -> None:
    pair = random_pair(name, tmp_path)
    written(tmp_path / "assistant.gguf", pair.assistant)
    context, tokens = open_context(replace(pair, draft=tmp_path / "assistant.gguf")), prompt_of(40)
    feed(context, tokens[:-1])
    assert proposed(context, {0: tokens}, 5) == [pair.guesses(tokens, 5)]
    context.close()
    with pytest.raises(ModelError, match="name it with draft"):
        load_engine(EngineOptions(model_path=str(tmp_path / "assistant.gguf"), dtype="float32"))


@pytest.mark.parametrize("chunk", [5, BLOCK, 128])
def test_chunks_of_a_prompt_change_no_guess(pair: AssistedPair, chunk: int) -> None:
    context, tokens = open_context(pair), prompt_of(80, 3)
    feed(context, tokens[:-1], chunk=chunk)
    assert proposed(context, {0: tokens}, 4) == [pair.guesses(tokens, 4)]
    context.close()


def test_sequences_draft_together_with_lengths_of_their_own(pair: AssistedPair) -> None:
    context = open_context(pair)
    texts = {slot: prompt_of(20 + 13 * slot, slot) for slot in range(DRAFTED_SEQUENCES)}
    for slot, text in texts.items():
        feed(context, text[:-1], slot)
    drafts = proposed(context, texts, 4, 0, 1, 2)
    assert drafts == [pair.guesses(text, n) if n else [] for text, n in zip(texts.values(), (4, 0, 1, 2), strict=True)]
    context.close()


def test_wrong_drafts_leave_no_trace(pair: AssistedPair) -> None:
    """Each step verifies three tokens, of which none is right."""
    context, tokens = open_context(pair), prompt_of(BLOCK + 14, 4)
    feed(context, tokens)
    logits = context.eval([Entry(0, [7], len(tokens), Logits.LAST)])[0][0]
    drawn = int(logits.argmax())
    run = context.decode_run(
        [Entry(0, (drawn,), len(tokens) + 1)], [SamplerState(SamplingParams(seed=0), ())], max_steps=6
    )
    text = [*tokens, 7, drawn]
    for _ in range(5):
        text += [draw.token_id for draw in run.verify([[1, 2, 3]])[0]]  # type: ignore[union-attr]
        assert context.kv.length(0) == len(text) - 1
        assert proposed(context, {0: text}, 3) == [pair.guesses(text, 3)]
    run.close()
    context.close()


def test_forks_and_saved_sequences_guess_on(pair: AssistedPair) -> None:
    context, shared = open_context(pair), prompt_of(2 * BLOCK + 5, 5)
    feed(context, shared)
    context.seq_cp(0, 1)
    assert proposed(context, {1: [*shared, 9]}, 3) == [pair.guesses([*shared, 9], 3)]
    ends = {0: [9, 200, 31, 4], 1: [77, 5, 100, 8]}
    for slot, end in ends.items():
        feed(context, end[:-1], slot)
    texts = {slot: shared + end for slot, end in ends.items()}
    assert proposed(context, texts, 3, 3) == [pair.guesses(text, 3) for text in texts.values()]
    other = open_context(pair)
    other.seq_load(3, context.seq_save(1))
    assert proposed(other, {3: texts[1]}, 3) == [[]]  # its newest row was not saved
    feed(other, [ends[1][-1]], 3)
    assert proposed(other, {3: [*texts[1], 6]}, 3) == [pair.guesses([*texts[1], 6], 3)]
    other.close()
    context.close()


def test_a_prefix_hit_guesses_as_without_it(pair: AssistedPair) -> None:
    context, prompt = open_context(pair), prompt_of(4 * BLOCK, 6)
    context.attach_prefix(0, [*prompt, 5])
    feed(context, [*prompt, 5])
    context.seq_rm(0)
    text = [*prompt, 11, 12]
    assert context.attach_prefix(2, text) == len(prompt)
    assert proposed(context, {2: text[:-1]}, 3) == [[]]
    feed(context, text[len(prompt) : -1], 2)
    assert proposed(context, {2: text}, 3) == [pair.guesses(text, 3)]
    context.close()


def test_a_slot_forgets_the_row_of_its_former_sequence(pair: AssistedPair) -> None:
    context, text = open_context(pair), prompt_of(20, 7)
    feed(context, text[:-1])
    context.seq_rm(0)
    assert proposed(context, {0: text}, 3) == [[]]
    context.seq_cp(1, 0)
    assert proposed(context, {0: text}, 3) == [[]]
    context.close()


def test_steps_of_many_sequences_are_not_followed(pair: AssistedPair) -> None:
    context, prompt = open_context(pair), prompt_of(BLOCK, 8)
    many = range(DRAFTED_SEQUENCES + 1)
    context.eval([Entry(slot, prompt, 0, Logits.LAST) for slot in many])
    assert proposed(context, {0: [*prompt, 4]}, 3) == [[]]
    feed(context, [4])
    assert proposed(context, {0: [*prompt, 4, 5]}, 3) == [pair.guesses([*prompt, 4, 5], 3)]
    context.close()


# Answers


@pytest.fixture
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "price", lambda self, num_sequences, num_keys, guess_s: 0.05)  # on any machine


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.usefixtures("_cheap")
def test_answers_are_those_without_drafts(right: AssistedPair, kind: str) -> None:
    requests = [REQUESTS[kind]]
    plain, _ = trio.run(lambda: answers(right.path, "", requests))
    drafted, counted = trio.run(lambda: answers(right.path, str(right.draft), requests))
    assert drafted == plain
    assert counted["accepted_draft_tokens"] > 10


@pytest.mark.usefixtures("_cheap")
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in FAMILIES), ("gemma4", {"quantize": "int8"}), ("gemma4", {"kv_cache_dtype": "int8"})],
    ids=str,
)
def test_answers_of_a_crowd_with_bad_guesses_are_those_without_drafts(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    pair = random_pair(name, tmp_path, **CLUSTERS)
    requests = [*REQUESTS.values(), {"temperature": 0, "max_tokens": 150}]
    plain, _ = trio.run(lambda: answers(pair.path, "", requests, **options))
    drafted, counted = trio.run(lambda: answers(pair.path, str(pair.draft), requests, **options))
    assert drafted == plain
    assert counted["drafted_tokens"] > counted["accepted_draft_tokens"]


@pytest.mark.usefixtures("_cheap")
def test_weights_that_were_kept_guess_the_same(right: AssistedPair, cache: Path) -> None:
    requests = [{"temperature": 0}]
    first = trio.run(lambda: answers(right.path, str(right.draft), requests, quantize="int8"))
    assert len(list((cache / "packed").glob("*.weights"))) == 2
    second = trio.run(lambda: answers(right.path, str(right.draft), requests, quantize="int8"))
    assert first[0] == second[0]
    assert first[1]["accepted_draft_tokens"] == second[1]["accepted_draft_tokens"] > 20


@pytest.mark.usefixtures("_cheap")
@pytest.mark.parametrize("failing", [3, 4])
def test_an_assistant_that_fails_drafts_nothing_and_fails_nobody(
    right: AssistedPair, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Two forwards rehearse. The next ones draft a first token and a further one."""
    plain, _ = trio.run(lambda: answers(right.path, "", [{"temperature": 0}]))
    predict, count = NativeRunner.predict, 0

    def fails(*given: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count >= failing:
            raise MemoryError("no room")
        return predict(*given, **options)

    monkeypatch.setattr(NativeRunner, "predict", fails)
    answer, counted = trio.run(lambda: answers(right.path, str(right.draft), [{"temperature": 0}]))
    assert answer == plain and count == failing
    assert counted["drafted_tokens"] < 10


# Refusals


def refusal(path: Path, draft: Path, **options: Any) -> str:
    fields = {"model_path": str(path), "draft": str(draft), "dtype": "float32", "n_ctx": 256, **options}
    with pytest.raises(OptionError) as caught:
        load_engine(EngineOptions(**fields))
    assert caught.value.option == "draft"
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 96}, "it reads rows with a hidden size of 96, not 64"),
        ({"vocab_size": 352, "vocab_size_per_layer_input": 352}, "its vocabulary size is 352, not 320"),
        ({"sliding_window": 40}, "its window is 40, not 24"),
        (
            {"num_key_value_heads": 4},
            "its layer 0 reads 4 KV heads with keys of 16 and values of 16 elements, not 2 KV heads",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_an_assistant_of_another_model_is_refused(
    pair: AssistedPair, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    other = random_pair("gemma4", tmp_path, sizes=changes, **CLUSTERS)
    assert reason in refusal(pair.path, other.draft)


def test_what_cannot_have_an_assistant_is_refused(pair: AssistedPair, tmp_path: Path) -> None:
    plain = build_native_model("llama", tmp_path / "llama", build_tokenizer)
    hidden = json.loads((plain / "config.json").read_text())["hidden_size"]
    same_size = random_pair("gemma4", tmp_path, sizes={"hidden_size": hidden}, **CLUSTERS)
    assert "the model has no layer of sliding_attention" in refusal(plain, same_size.draft)
    assert "needs the native runner" in refusal(pair.path, pair.draft, runner="torch")
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "gemma4_mtp")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "is an assistant of gemma4_mtp; only gemma4-assistant is supported" in refusal(pair.path, other)
    with pytest.raises(ModelError, match="is an assistant, which guesses tokens for another model: name it with draft"):
        load_engine(EngineOptions(model_path=str(pair.draft), dtype="float32"))
    with pytest.raises(ModelError, match="is an assistant"):
        load_engine(EngineOptions(model_path=str(pair.draft), dtype="float32", runner="torch"))


@pytest.mark.parametrize("change", ["a token twice", "no ordering", "another shape", "NaN", "other rotations"])
def test_damaged_assistants_are_refused(pair: AssistedPair, tmp_path: Path, change: str) -> None:
    damaged = tmp_path / "assistant"
    damaged.mkdir()
    tensors = load_file(pair.draft / "model.safetensors")
    config = json.loads((pair.draft / "config.json").read_text())
    ordering = tensors["masked_embedding.token_ordering"]
    if change == "a token twice":
        ordering[3] = ordering[4]
    elif change == "no ordering":
        del tensors["masked_embedding.token_ordering"]
    elif change == "another shape":
        tensors["pre_projection.weight"] = tensors["pre_projection.weight"][:, :100].contiguous()
    elif change == "NaN":
        tensors["post_projection.weight"][2, 3] = torch.nan
    else:
        config["text_config"]["rope_parameters"]["sliding_attention"]["rope_theta"] = 777.0
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (damaged / "config.json").write_text(json.dumps(config))
    reasons = {
        "a token twice": "does not name each of 320 tokens once",
        "no ordering": "lack masked_embedding.token_ordering",
        "another shape": "pre_projection.weight has the shape",
        "NaN": "post_projection.weight",
        "other rotations": "its layer 0 has other rotary embeddings",
    }
    assert reasons[change] in refusal(pair.path, damaged)
