"""Streamed decoding against decoding everything at once."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.text.detokenizer import _BYTES, open_detokenizer

TEXT = st.text(st.sampled_from("ab zé漢字語😀👩‍👧🏽🇫🇷́  .\n"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's; it has no tokens for some bytes, so not every text survives encoding."""
    path = resolve_model("smollm2").path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@cache
def byte_level() -> Tokenizer:
    """All single bytes, a few merged ones, a special and a plain added token."""
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {spelling: i for i, spelling in enumerate([*spellings, "ðŁ", "ĺĢ", "Ġa"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<ツール>", special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Llama 2's way: words with a leading space, bytes as <0xXX>, the text's first space dropped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "漢", "�"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = open_detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


@settings(deadline=None)
@given(st.lists(st.integers(0, 49_200), max_size=40) | st.lists(st.integers(0, 400), max_size=40))
def test_smollm2_pieces_join_to_the_decoded_ids(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> None:
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer.backend_tokenizer, token_ids)) == expected


@settings(deadline=None)
@given(TEXT)
@example("👩‍👩‍👧‍👦 漢字かな e\u0301 🇫🇷")
def test_smollm2_never_shows_half_a_code_point(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer(text).input_ids
    pieces = stream(tokenizer.backend_tokenizer, token_ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 265), max_size=30))
def test_byte_level_pieces_join_to_the_decoded_ids_even_for_invalid_bytes(token_ids: list[int]) -> None:
    expected = byte_level().decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(byte_level(), token_ids)) == expected


def test_a_code_point_comes_with_its_last_byte() -> None:
    token_ids = ids_of(byte_level(), "ðŁ", "ĺ", "Ģ", "Ġa")
    assert stream(byte_level(), token_ids) == ["", "", "😀", " a", ""]


def test_bytes_that_cannot_become_a_code_point_are_shown_at_once_or_at_the_end() -> None:
    lone, lead = ids_of(byte_level(), "ÿ", "ð")
    assert stream(byte_level(), [lone, lead]) == ["\ufffd", "", "\ufffd"]


def test_special_tokens_are_skipped_and_added_ones_shown() -> None:
    assert "".join(stream(byte_level(), ids_of(byte_level(), "<end>", "<ツール>", "<end>"))) == "<ツール>"


WORDS = ["<s>", "▁", "▁Hello", "▁world", "lo", "漢", "<0x41>"]
SPELLED = [[word] for word in WORDS] + [[f"<0x{byte:02X}>" for byte in "😀".encode()]]


@settings(deadline=None)
@given(st.lists(st.sampled_from(SPELLED), max_size=12))
@example([["▁"], SPELLED[-1], SPELLED[-1]])
def test_byte_fallback_pieces_join_to_the_decoded_ids(spelled: list[list[str]]) -> None:
    token_ids = ids_of(byte_fallback(), *(token for tokens in spelled for token in tokens))
    pieces = stream(byte_fallback(), token_ids)
    assert "".join(pieces) == byte_fallback().decode(token_ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(0, 262), max_size=60))
def test_any_byte_fallback_output_streams_without_an_error_and_without_long_waits(
    token_ids: list[int],
) -> None:
    silent = 0
    detokenizer = open_detokenizer(byte_fallback())
    for token_id in token_ids:
        has_text = byte_fallback().decode([token_id]) != ""
        silent = 0 if detokenizer.push(token_id) else silent + has_text
        assert silent < 4
    detokenizer.flush()


@pytest.mark.parametrize(("prompt", "expected"), [([], "Hello world"), (["▁Hello"], " Hello world")])
def test_the_first_words_space_is_kept_after_a_prompt(prompt: list[str], expected: str) -> None:
    output = ids_of(byte_fallback(), "▁Hello", "▁world")
    assert "".join(stream(byte_fallback(), output, ids_of(byte_fallback(), *prompt))) == expected


def test_every_character_of_a_byte_level_vocabulary_stands_for_the_byte_that_tokenizers_reads() -> None:
    decode = decoders.ByteLevel().decode
    assert sorted(_BYTES.values()) == list(range(256))
    for character, byte in _BYTES.items():
        if byte < 128:  # others are parts of a character
            assert decode([character]) == chr(byte)
    reads = {character: byte for character, byte in _BYTES.items() if byte >= 128}
    for text in ("¡ÿĀ", "é世界", "\u00ad\u0080"):
        (piece,) = [
            word for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        ]
        assert bytes(reads[character] for character in piece) == text.encode()
