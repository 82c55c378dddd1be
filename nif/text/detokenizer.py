"""Converts tokens to text piece by piece: it joins characters split between tokens and finds stop strings."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer, decoders

from genbatch.nif.errors import NativeError


class TokenizerError(NativeError):
    """The model's tokenizer failed on a text or on token ids; the model's files are at fault."""


def raised(fault: BaseException) -> BaseException:
    """Convert a panic of the tokenizers package to a TokenizerError; other exceptions are returned unchanged.

    A panic of that package derives from BaseException, so `except Exception` would let it end a whole service.
    """
    if type(fault).__name__ != "PanicException":
        return fault
    return TokenizerError(f"the model's tokenizer failed: {' '.join(str(fault).split())[:300]}")


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    The joined output is the text before the first occurrence of any stop string, for every split into pieces. If two
    occurrences overlap, the one that begins first counts. Each character costs amortised constant time per stop string
    (Knuth, Morris and Pratt).

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E")
        ('the ', False)
        >>> matcher.push("ND of it")
        ('', True)
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        assert all(stop), "a stop string must not be empty"
        self._stop = list(dict.fromkeys(stop))
        self._keep = keep  # whether the found stop string is part of the text
        self._borders = [_borders(word) for word in self._stop]
        self._matched = [0] * len(self._stop)  # per stop string, the length of its longest prefix at the text's end
        self._text = ""  # text that was not returned yet
        self._match: int | None = None  # the start of the earliest match in the held text
        self._word = ""  # the stop string of that match
        self._stopped = False

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Add the next piece; returns the text that is final now, and whether the text has ended.

        A stop string that completes where the text may not end yet is ordinary text.

        A stop string inside the beginning of a longer one ends the text once the longer one cannot match any more.
        After the end every further piece gives ("", True).
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        begin = len(self._text)
        self._text += text
        for end, character in enumerate(text, begin + 1):
            self._advance(character, end)
            if not may_end:
                self._match = None
            if self._match is not None and self._settled(end):
                return self._finish()
        # No stop string can begin before the longest partial match, so that text is final. An unsettled match begins
        # after the longest partial match's beginning.
        keep = len(self._text) - max(self._matched)
        if self._match is not None:
            self._match -= keep
        emit, self._text = self._text[:keep], self._text[keep:]
        return emit, False

    def flush(self) -> str:
        """End the text; returns the held text, cut at a stop string if one was found."""
        if self._stopped:
            return ""
        return self._finish()[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; an unsettled match counts only after `flush`."""
        return self._stopped and self._match is not None

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the text; None if no stop string has."""
        return self._word if self.stopped else None

    def _advance(self, character: str, end: int) -> None:
        """Advance every stop string's automaton by one character; `end` is the held text's length up to it."""
        for i, (word, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and (matched == len(word) or word[matched] != character):
                matched = borders[matched - 1]
            if word[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(word):
                start = end - matched
                if self._match is None or start < self._match:
                    self._match, self._word = start, word

    def _settled(self, end: int) -> bool:
        """Return whether no partial match begins before the found match."""
        assert self._match is not None
        match = self._match
        return all(
            matched == len(word) or end - matched >= match
            for word, matched in zip(self._stop, self._matched, strict=True)
        )

    def _finish(self) -> tuple[str, bool]:
        emit = self._text if self._match is None else self._text[: self._match]
        if self._keep and self._match is not None:
            emit += self._word
        self._text = ""
        self._stopped = True
        return emit, True


def _borders(word: str) -> list[int]:
    """Return, for each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders


_REPLACEMENT = "\ufffd"  # decoders return it for bytes that are no complete code point
_CONTEXT_TOKENS = 8  # enough context for a decoder to know that a token is not a text's first
_INVALID = _REPLACEMENT * 4  # an incomplete code point has at most three bytes, so four replacements are invalid bytes


class Detokenizer(Protocol):
    """Decodes one sequence's output token by token, skipping special tokens and ids without a token.

    The joined pieces with the flush equal the tokenizer's decoding of all ids at once. There is one exception: a
    tokenizer that is not byte-level, and byte tokens that are not UTF-8. Its byte fallback would turn even the valid
    bytes, which were returned already, into U+FFFD. There the returned text stays.
    """

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; "" while a code point is incomplete."""
        ...

    def flush(self) -> str:
        """End the sequence and return the remaining text, with U+FFFD for an incomplete code point."""
        ...


def open_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, shown: frozenset[int] = frozenset()
) -> Detokenizer:
    """Return the detokenizer of a new output.

    Args:
        tokenizer: the fast tokenizer's backend (`backend_tokenizer` of transformers' class).
        prompt_token_ids: the tokens before the output. Some tokenizers drop the space before a text's first word.
            After a prompt they keep the output's first space; without a prompt they drop it.
        shown: special tokens with visible text, such as the marks around a tool call.
    """
    vocabulary = _vocabulary(tokenizer, shown)
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return _ByteDetokenizer(vocabulary)
    return _WindowDetokenizer(vocabulary, prompt_token_ids)


class _Vocabulary:
    """Maps ids to tokens that have a text."""

    __slots__ = ("_special", "bytes", "shown", "texts", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.shown = shown
        self.bytes = _TokenBytes(self)
        self.texts = _TokenTexts(self.bytes)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special} - shown

    def token(self, token_id: int) -> str | None:
        """Return the token's spelling in the vocabulary; None if the token has no text."""
        if token_id in self._special:
            return None
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, shown: frozenset[int]) -> _Vocabulary:
    """Return the tokenizer's cached vocabulary: listing the special tokens takes as long as decoding hundreds."""
    return _Vocabulary(tokenizer, shown)


class _TokenBytes(dict[int, bytes]):
    """Caches the bytes of byte-level tokens at their first use; tokens without a text have no bytes."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id)
        encoded = self[token_id] = b"" if token is None else _token_bytes(token)
        return encoded


class _TokenTexts(dict[int, str | None]):
    """Caches the texts of byte-level tokens at their first use; None for bytes that are no whole code points."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self._bytes[token_id].decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _ByteDetokenizer:
    """Decodes byte-level vocabularies: tokens are bytes, and only code point boundaries matter."""

    __slots__ = ("_bytes", "_is_within", "_texts", "_utf8")

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._bytes = vocabulary.bytes
        self._texts = vocabulary.texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within = False  # whether the decoder may hold the first bytes of a code point

    def push(self, token_id: int) -> str:
        if not self._is_within:
            text = self._texts[token_id]
            if text is not None:
                return text
            self._is_within = True
        text = self._utf8.decode(self._bytes[token_id])
        self._is_within = self._utf8.getstate()[0] != b""
        return text

    def flush(self) -> str:
        self._is_within = False
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes with any other decoder: decode a few tokens with and without the newest, and return the difference."""

    __slots__ = ("_shown", "_vocabulary", "_window")

    def __init__(self, vocabulary: _Vocabulary, prompt_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        tail = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._window = [i for i in tail if vocabulary.token(i) is not None]
        self._shown = len(self._window)  # the window's tokens with returned text

    def push(self, token_id: int) -> str:
        token = self._vocabulary.token(token_id)
        if token is None:
            return ""
        if token_id in self._vocabulary.shown:
            return self.flush() + token
        self._window.append(token_id)
        text = self._unshown()
        if not text or (text.endswith(_REPLACEMENT) and not text.endswith(_INVALID)):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text

    def flush(self) -> str:
        text = self._unshown()
        self._shown = len(self._window)
        return text

    def _unshown(self) -> str:
        shown = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if text.startswith(shown):
            return text[len(shown) :]
        return self._decode(self._window[self._shown :])

    def _decode(self, token_ids: list[int]) -> str:
        try:
            text: str = self._vocabulary.tokenizer.decode(token_ids, skip_special_tokens=True)
        except BaseException as fault:
            raise raised(fault) from None
        return text


def _character_bytes() -> dict[str, int]:
    """Return GPT-2's table: a printable Latin-1 byte maps to itself, and other bytes map to U+0100 and up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _character_bytes()


def _token_bytes(token: str) -> bytes:
    """Return a byte-level token's bytes; an added token with other characters is its own text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
