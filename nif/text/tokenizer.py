"""Tokenizer: text and conversations to token ids and back, as the model's own files define it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
from transformers import PreTrainedTokenizerBase

from genbatch.nif.errors import NativeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# How a conversation may go on after its first message. They start with different kinds of character, since a
# tokenizer may merge the end of the prefix with what follows.
_CONTINUATIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "a"),),
    (("user", "\n1"),),
    (("user", " Zé"),),
    (("user", "世"), ("assistant", "b"), ("user", "c")),
    (("assistant", "a"),),
    (("assistant", "\n1"), ("user", "b")),
    (("assistant", "世"), ("user", " c")),
)


class ChatTemplateError(NativeError):
    """A conversation cannot become a prompt: the model has no template, or its template refuses it."""


class Tokenizer:
    """A Hugging Face fast tokenizer with the calls that serving needs.

    Args:
        hf: the tokenizer that transformers loaded; must be a fast one.
    """

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self.hf = hf
        self.backend: Backend = hf.backend_tokenizer
        # Limits are the context's business; a limit kept here would only warn.
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows are below this; the logits may be wider."""
        return len(self.hf)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for no text, such as the end of a message."""
        marked = (i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)
        return frozenset(self.hf.all_special_ids) | frozenset(marked)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if the tokenizer names one."""
        token_id: int | None = self.hf.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `tokenizer(text)` gives before `generate`; special tokens in the text count as such.

        Args:
            add_special_tokens: with the start token, if the model wants one.
        """
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids; parts of a character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the model's next message.

        Args:
            messages: {"role": …, "content": …} each, oldest first.

        Raises:
            ChatTemplateError: no messages, no template, or the template refuses these.
        """
        return list(self.backend.encode(self._render(messages), add_special_tokens=False).ids)

    def template_prefix(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens with which every conversation that begins with `messages[0]` begins.

        Found by rendering conversations that go on differently and keeping what they have in common; empty
        when the template admits fewer than two of them. A template may still do something new with a
        conversation unlike all those, so whoever shares the prefix compares it with the prompt first.

        Raises:
            ChatTemplateError: no messages, or no template.
        """
        self._check(messages)
        rendered = []
        for continuation in _CONTINUATIONS:
            following = [{"role": role, "content": content} for role, content in continuation]
            try:
                rendered.append(self.apply_chat_template([messages[0], *following]))
            except ChatTemplateError:
                continue  # a template that wants other roles at this place
        return _common_prefix(rendered) if len(rendered) > 1 else []

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        self._check(messages)
        conversation = [dict(message) for message in messages]
        try:
            text = self.hf.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as fault:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {fault}") from fault
        assert isinstance(text, str)
        return text

    def _check(self, messages: Sequence[Mapping[str, str]]) -> None:
        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template; send a prompt instead of messages")
        if not messages:
            raise ChatTemplateError("a conversation needs at least one message")


def _common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The longest list that every row starts with."""
    first, last = min(rows), max(rows)  # in lexical order these two differ earliest
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]
