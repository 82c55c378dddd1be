"""The tokenizer's calls against transformers' own, and the prefix that conversations share."""

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.text.templates import ChatTemplateError
from genbatch.nif.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "You are terse."}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Model]) -> Tokenizer:
    return tiny_model("llama").tokenizer


def with_template(tiny_models: ModuleType, directory: Path, template: str | None) -> Tokenizer:
    tiny_models.build_tokenizer(directory, chat_template=template)
    return Tokenizer(AutoTokenizer.from_pretrained(directory))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_encoding_is_what_transformers_gives_to_generate(text: str, tokenizer: Tokenizer, smollm2: Model) -> None:
    for one in (tokenizer, smollm2.tokenizer):
        assert one.encode(text) == one.hf(text).input_ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_decoding_gives_back_the_text(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_is_cut_and_joined_like_a_short_one_while_other_threads_run(smollm2: Model) -> None:
    tokenizer, text = smollm2.tokenizer, "Half a megabyte, 世界, and 17 cats. " * 14_000
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    beside = threading.Thread(target=tick)
    beside.start()
    try:
        before = ticks
        ids = tokenizer.encode(text)
        between = ticks
        again = tokenizer.decode(ids)
        after = ticks
    finally:
        done.set()
        beside.join()
    assert ids == tokenizer.backend.encode(text).ids
    assert again == text
    # Were the interpreter held, there would be none: another thread gets a turn before a call or after it.
    assert between - before > 5 and after - between > 1


def test_a_text_begins_with_the_start_token_that_the_model_wants_unless_it_is_left_out(
    tiny_models: ModuleType, tmp_path: Path
) -> None:
    tiny_models.build_tokenizer(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    plain = hf("ab").input_ids
    start = hf.convert_ids_to_tokens(1)
    hf.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 1)])
    tokenizer = Tokenizer(hf)
    assert tokenizer.encode("ab") == hf("ab").input_ids == [1, *plain]
    assert tokenizer.encode("ab", add_special_tokens=False) == plain


def test_special_tokens_written_in_a_prompt_count_as_such(smollm2: Model) -> None:
    assert smollm2.tokenizer.encode("<|im_start|>") == [1]
    assert smollm2.tokenizer.decode([1, 2]) == ""
    assert smollm2.tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.hf) == 320
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.eos_token_id == 2


def test_a_conversation_becomes_the_templates_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([SYSTEM, {"role": "user", "content": "Hello"}])
    text = "<|start|>system\nYou are terse.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    assert ids == tokenizer.hf(text, add_special_tokens=False).input_ids


def test_a_model_without_a_template_says_so(tiny_models: ModuleType, tmp_path: Path) -> None:
    plain = with_template(tiny_models, tmp_path, None)
    assert not plain.has_chat_template
    for call in (plain.apply_chat_template, plain.template_prefix):
        with pytest.raises(ChatTemplateError, match="no chat template"):
            call([SYSTEM])


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 + 'a' }}"])
def test_what_the_template_refuses_is_a_typed_error(template: str, tiny_models: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="refuses"):
        with_template(tiny_models, tmp_path, template).apply_chat_template([SYSTEM])


def test_no_messages_are_a_typed_error(tokenizer: Tokenizer) -> None:
    for call in (tokenizer.apply_chat_template, tokenizer.template_prefix):
        with pytest.raises(ChatTemplateError, match="at least one message"):
            call([])


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=20)})
MESSAGES = st.lists(MESSAGE, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rest=MESSAGES, first=st.text(max_size=30), role=st.sampled_from(["system", "user"]))
def test_every_conversation_starts_with_the_prefix_of_its_first_message(
    rest: list[dict[str, str]], first: str, role: str, tokenizer: Tokenizer, smollm2: Model
) -> None:
    message = {"role": role, "content": first}
    for one in (tokenizer, smollm2.tokenizer):
        prefix = one.template_prefix([message])
        assert one.apply_chat_template([message, *rest])[: len(prefix)] == prefix


def test_the_prefix_covers_the_whole_first_message(smollm2: Model) -> None:
    prefix = smollm2.tokenizer.template_prefix([SYSTEM])
    text = smollm2.tokenizer.decode(prefix, skip_special_tokens=False)
    assert text == "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>"


def test_a_merge_across_the_border_shortens_the_prefix(smollm2: Model) -> None:
    hf = copy.deepcopy(smollm2.tokenizer.hf)
    hf.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    glued = Tokenizer(hf)
    assert glued.encode("is a")[:1] == glued.encode("is")
    assert glued.encode("is a") != glued.encode("is ") + glued.encode("a")
    assert glued.template_prefix([{"role": "user", "content": "is "}]) == glued.encode("is")


def test_a_template_that_moves_the_first_message_shares_nothing(tiny_models: ModuleType, tmp_path: Path) -> None:
    reversing = with_template(tiny_models, tmp_path, "{% for m in messages|reverse %}{{ m['content'] }}{% endfor %}")
    assert reversing.template_prefix([SYSTEM]) == []


def test_a_template_that_admits_one_message_only_shares_nothing(tiny_models: ModuleType, tmp_path: Path) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0]['content'] }}"
    assert with_template(tiny_models, tmp_path, template).template_prefix([SYSTEM]) == []
