"""Text out of tokens, piece by piece: characters that tokens cut in two, and strings that end an answer."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer, decoders

from genbatch.nif.errors import NativeError


class TokenizerError(NativeError):
    """The model's tokenizer failed on a text or on token ids; the model's files are at fault."""


def raised(fault: BaseException) -> BaseException:
    """The exception to raise for one that the tokenizers package has raised.

    A panic of that package derives from BaseException, so that `except Exception` lets it end a whole service. It
    becomes a TokenizerError; every other exception stays as it is.
    """
    if type(fault).__name__ != "PanicException":
        return fault
    return TokenizerError(f"the model's tokenizer failed: {' '.join(str(fault).split())[:300]}")


class StopMatcher:
    """Watches one text that arrives in pieces.

    However the text is cut into pieces, what comes out joined is the whole text up to the first occurrence
    of any stop string, that one excluded. Where two occurrences overlap, the one that begins first counts.
    Each character costs amortised constant time per stop string (Knuth, Morris and Pratt).

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E")
        ('the ', False)
        >>> matcher.push("ND of it")
        ('', True)
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        assert all(stop), "an empty stop string would end every text at once"
        self._stop = list(dict.fromkeys(stop))
        self._keep = keep  # whether the stop string found is part of the text
        self._borders = [_borders(word) for word in self._stop]
        self._matched = [0] * len(self._stop)  # how much of each stop string the text now ends with
        self._held = ""  # text that is not out yet
        self._found: int | None = None  # where in the held text the earliest match so far begins
        self._word = ""  # the stop string found there
        self._stopped = False

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Takes the next piece and returns what may be shown, and whether the text has ended.

        A stop string that is complete where the text may not end yet is text like any other.

        A stop string that lies inside the beginning of a longer one ends the text once the longer one is out
        of the question. After the end, every further piece gives ("", True).
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        begin = len(self._held)
        self._held += text
        for end, character in enumerate(text, begin + 1):
            self._advance(character, end)
            if not may_end:
                self._found = None
            if self._found is not None and self._settled(end):
                return self._finish()
        # Everything before the longest partial match is out of reach of any stop string. A match that is not
        # settled lies behind the beginning of that one.
        keep = len(self._held) - max(self._matched)
        if self._found is not None:
            self._found -= keep
        emit, self._held = self._held[:keep], self._held[keep:]
        return emit, False

    def flush(self) -> str:
        """Returns what was held back, cut at a stop string if one was found; the text has ended."""
        if self._stopped:
            return ""
        return self._finish()[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; one still in question at the end counts after `flush`."""
        return self._stopped and self._found is not None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None as long as none has."""
        return self._word if self.stopped else None

    def _advance(self, character: str, end: int) -> None:
        """Moves every stop string's automaton by one character; `end` counts the held ones up to it."""
        for i, (word, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and (matched == len(word) or word[matched] != character):
                matched = borders[matched - 1]
            if word[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(word):
                start = end - matched
                if self._found is None or start < self._found:
                    self._found, self._word = start, word

    def _settled(self, end: int) -> bool:
        """Whether no partial match began before the found one."""
        assert self._found is not None
        found = self._found
        return all(
            matched == len(word) or end - matched >= found
            for word, matched in zip(self._stop, self._matched, strict=True)
        )

    def _finish(self) -> tuple[str, bool]:
        emit = self._held if self._found is None else self._held[: self._found]
        if self._keep and self._found is not None:
            emit += self._word
        self._held = ""
        self._stopped = True
        return emit, True


def _borders(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders


_REPLACEMENT = "\ufffd"  # what decoders give for bytes that are not, or not yet, a code point
_CONTEXT_TOKENS = 8  # enough to tell a word's first token from one inside a text
_INVALID = _REPLACEMENT * 4  # an incomplete code point lacks its last byte: at most three are waiting


class Detokenizer:
    """Decodes one sequence's output token by token, skipping special tokens and ids without a token.

    Pieces joined, with the flush, are what the tokenizer decodes from all ids at once. The one exception is a
    run of byte tokens that is not UTF-8, with a tokenizer that is not byte-level: byte fallback would turn
    even its valid part, already shown, into U+FFFD. There the text shown stays.

    Args:
        tokenizer: the fast tokenizer's backend (`backend_tokenizer` of transformers' class).
        prompt_token_ids: what precedes the output. Tokenizers that drop the space before a text's first word
            keep it in an output that follows a prompt; without a prompt they drop it.
        shown: special tokens whose text is shown all the same, such as the marks around a tool call.
    """

    __slots__ = ("_decoding",)

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, shown: frozenset[int] = frozenset()
    ) -> None:
        vocabulary = _vocabulary(tokenizer, shown)
        self._decoding: _Decoding
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._decoding = _ByteDecoding(vocabulary)
        else:
            self._decoding = _WindowDecoding(vocabulary, prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Returns the text that is final now; "" while a code point is incomplete."""
        return self._decoding.push(token_id)

    def flush(self) -> str:
        """Returns the rest, an incomplete code point as U+FFFD; the sequence has ended."""
        return self._decoding.flush()


class _Decoding(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _Vocabulary:
    """The tokens that have a text."""

    __slots__ = ("_special", "bytes", "shown", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.shown = shown
        self.bytes = _TokenBytes(self)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special} - shown

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if it has no text."""
        if token_id in self._special:
            return None
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, shown: frozenset[int]) -> _Vocabulary:
    """The tokenizer's one: to list its special tokens takes as long as to decode hundreds."""
    return _Vocabulary(tokenizer, shown)


class _TokenBytes(dict[int, bytes]):
    """What byte-level tokens stand for, found at the first use of each; nothing for those without a text."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id)
        found = self[token_id] = b"" if token is None else _token_bytes(token)
        return found


class _ByteDecoding:
    """Byte-level vocabularies: tokens are bytes, and only their boundaries matter."""

    __slots__ = ("_bytes", "_utf8")

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._bytes = vocabulary.bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoding:
    """Any other decoder: decodes a few tokens with and without the newest, and shows the difference."""

    __slots__ = ("_shown", "_vocabulary", "_window")

    def __init__(self, vocabulary: _Vocabulary, prompt_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        tail = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._window = [i for i in tail if vocabulary.token(i) is not None]
        self._shown = len(self._window)  # tokens of the window whose text is out

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
    """GPT-2's table: printable Latin-1 characters stand for themselves, other bytes for U+0100 and up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _character_bytes()


def _token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; an added token with other characters is its own text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
