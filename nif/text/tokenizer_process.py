"""Runs tokenizers with unknown expressions in a process with a time limit (ADR 51).

    unchecked(settings)             # expressions of a tokenizer.json that are not in KNOWN
    process = TokenizerProcess(json)
    process.encode(text).ids        # TokenizerError once it takes too long; the next text has a new process

A pre-tokenizer and a normalizer are lists of steps. Some steps search the text with a regular expression of the file.
One search may take years, and the tokenizers package cannot be interrupted. KNOWN holds the expressions of popular
models. Their time is proportional to the text, so these expressions run in the caller's thread.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from genbatch.nif.limited_process import LimitedProcess
from genbatch.nif.text.detokenizer import TokenizerError

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_DIGITS = (r"\p{N}", r"\p{N}{1,3}")
KNOWN = frozenset(
    (
        # GPT-2 and those after it, CLIP, BLOOM.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
        *(*_DIGITS, r"\d", r"\d{1,3}", "[0-9]", "[0-9][0-9][0-9]", r"\n", r"[\r\n]"),
        # Llama 3, Qwen2 to Qwen3.5, and those that took their expression.
        *(
            rf"{_ENGLISH}|{_MARK}{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
            for letters, marks in ((r"\p{L}", ""), (r"[\p{L}\p{M}]", r"\p{M}"))
            for digits in _DIGITS
        ),
        # Mistral's Tekken, o200k and gpt-oss.
        *(
            rf"{_MARK}{_UPPER}*{_LOWER}+{end}|{_MARK}{_UPPER}+{_LOWER}*{end}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
            for end in ("", f"{_ENGLISH}?")
            for digits in _DIGITS
        ),
        # DeepSeek 3
        "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        # Normalizers of the SentencePiece families
        *(" {2,}", r"\s+", r"\s{2,}|[\n\r\t]", r"[\n\r\t]"),
    )
)
# Limits of processor time. A tokenizer of 256,000 tokens loads in two seconds, and tokenizing a megabyte takes one.
LOAD_S = 20.0
ENCODE_S = 2.0
ENCODE_S_PER_BYTE = 10e-6
# A WordPiece model tries all ends of a piece at each place of a word, so a word's length counts squared.
MAX_WORD = 1000
_MAX_DEPTH = 8  # the deepest nesting of a configuration


class Encoding(Protocol):
    """A text as tokens."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def type_ids(self) -> Sequence[int]: ...
    @property
    def offsets(self) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An Encoding from the process."""

    ids: list[int]
    type_ids: list[int]
    offsets: list[list[int]]


def unchecked(settings: Mapping[str, Any]) -> list[str]:
    """Return the parts of a tokenizer that may take more than linear time.

    Args:
        settings: the content of a tokenizer.json.
    """
    expressions = [each for part in ("normalizer", "pre_tokenizer") for each in _expressions(settings.get(part))]
    model = settings.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    long_words = [f"max_input_chars_per_word {word}"] if isinstance(word, int) and word > MAX_WORD else []
    return [each for each in expressions if each not in KNOWN] + long_words


def decoder_expressions(settings: Mapping[str, Any]) -> list[str]:
    """Return the expressions of a tokenizer's decoder, which runs in this process."""
    return [each for each in _expressions(settings.get("decoder")) if each not in KNOWN]


def _expressions(step: Any) -> Iterator[str]:
    """Yield all regular expressions within a step of a tokenizer."""
    if isinstance(step, list):
        for each in step:
            yield from _expressions(each)
    if isinstance(step, dict):
        for name, value in step.items():
            if name == "Regex" and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)


class TokenizerProcess:
    """A tokenizer in a process of its own. Threads may share it and wait for one another.

    Args:
        tokenizer: the content of a tokenizer.json.
        added: texts of another file's added tokens.
    """

    def __init__(self, tokenizer: str, added: Sequence[str] = ()) -> None:
        self._settings = {"tokenizer": tokenizer, "added": list(added)}
        self._lock = threading.Lock()
        self._child = LimitedProcess("genbatch.nif.text.tokenizer_child")

    def load(self) -> None:
        """Start the process if it is not running.

        Raises:
            TokenizerError: the tokenizer cannot be loaded, or loading takes too long.
        """
        with self._lock:
            self._load()

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text, or of two texts.

        Raises:
            TokenizerError: the tokenizer fails on this text, or takes too long.
        """
        size = len(json.dumps([text, pair]))
        with self._lock:
            self._load()
            limit_s = ENCODE_S + ENCODE_S_PER_BYTE * size
            answer = self._child.ask([text, pair, add_special_tokens], limit_s=limit_s)
        return _Encoded(*_value(answer, limit_s, "for this text"))

    def _load(self) -> None:
        if not self._child.is_running:
            _value(self._child.start(self._settings, limit_s=LOAD_S), LOAD_S, "to be read")


def _value(answer: tuple[Any, str] | None, limit_s: float, purpose: str) -> Any:
    """Return the value in the process's answer.

    Raises:
        TokenizerError: the answer has a fault, or the process has exceeded its limit.
    """
    if answer is None:
        raise TokenizerError(f"the model's tokenizer takes more than {limit_s:.2g} s {purpose}")
    value, fault = answer
    if fault:
        raise TokenizerError(f"the model's tokenizer failed: {fault}")
    return value


def check_loading(directory: Path) -> None:
    """Check a directory's tokenizer before it is loaded, and load it in a process first if its expressions are unknown.

    Loading a tokenizer runs its normalizer over added tokens, which may take for ever.

    Raises:
        TokenizerError: the tokenizer cannot be loaded, or loading takes too long.
    """
    try:
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        settings = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return  # transformers will report the error
    if not isinstance(settings, dict):
        return
    _check_ids(settings)
    if not unchecked(settings):
        return
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = {}
    # guard: time to load a tokenizer with expressions of its own
    TokenizerProcess(text, list(_texts(config))).load()


# `tokenizers` walks over all ids up to the largest one. Real vocabularies are below 2**20.
_MAX_ID = 2**24


def _check_ids(settings: Mapping[str, Any]) -> None:
    """Refuse a token with an id that is far beyond every vocabulary."""
    model, added = settings.get("model"), settings.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    tokens = list(vocab.items()) if isinstance(vocab, dict) else []
    tokens += [(entry.get("content"), entry.get("id")) for entry in added or () if isinstance(entry, dict)]
    # guard: ids of tokens
    for token, number in tokens:
        if isinstance(number, int) and number > _MAX_ID:
            raise TokenizerError(f"its token {token!r:.40} has the id {number}; an id is at most {_MAX_ID}")


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Return all texts of a tokenizer's configuration that may become tokens."""
    if isinstance(value, str):
        yield value
    if isinstance(value, dict | list) and depth < _MAX_DEPTH:
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inner:
            if name != "chat_template":
                yield from _texts(each, depth + 1)
