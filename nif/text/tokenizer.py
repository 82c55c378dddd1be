"""Tokenizer: text and conversations to token ids and back, as the model's own files define it."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from genbatch.nif.errors import NativeError
from genbatch.nif.text.response_template import THINKING, checked_template
from genbatch.nif.text.tools import THINK_CLOSE, THINK_OPEN, ToolFormat, plain_conversation, tool_format

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger("genbatch")

# From these on a text is cut, or ids are joined, as a batch of one: that lets other threads of Python run meanwhile,
# where a single call would hold them up, the event loop too, for half a second a megabyte.
LONG_CHARS = 4096
LONG_TOKENS = 1024

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


# What `apply_chat_template` takes beside a template's variables, and what the template gets from it.
_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages", "self"}


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
        self._is_read = False
        self._template_names: frozenset[str] = frozenset()
        self.response_template = self._response_template()
        marks = json.dumps(self.response_template, ensure_ascii=False).replace("\\", "")
        names = self.backend.get_added_tokens_decoder().items() if self.response_template is not None else ()
        # Special tokens by which the template tells regions apart; others stay out of sight.
        self.response_marks = frozenset(i for i, token in names if token.special and token.content in marks)

    def _response_template(self) -> Mapping[str, Any] | None:
        """How transformers reads what the model writes; None where the tokenizer does not say."""
        try:
            return checked_template(getattr(self.hf, "response_template", None))
        except ValueError as error:
            log.warning("%s; the table of formats is used", error)
            return None

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows are below this; the logits may be wider."""
        return len(self.hf)

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, told by its bytes; 0 where nothing can be told without cutting it up."""
        longest, dropped = self._longest_token
        return len(text.encode(errors="replace").translate(None, dropped)) // longest if longest else 0

    @cached_property
    def _longest_token(self) -> tuple[int, bytes]:
        """Most bytes of text that one token stands for, and the bytes that stand for nothing.

        0 where there is no bound, as where parts of a text are changed or dropped before it is cut.
        """
        said = json.loads(self.backend.to_str())
        cut = json.dumps(said.get("pre_tokenizer"))
        keeps_all = said.get("normalizer") is None and '"ByteLevel"' in cut and '"Removed"' not in cut
        swallows = any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values())
        if said["model"].get("type") != "BPE" or not keeps_all or swallows:
            return 0, b""
        names = self.backend.get_vocab(with_added_tokens=True)
        characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]  # each byte's
        dropped = bytes(byte for byte, character in characters.items() if character not in names)
        return max(len(name.encode()) for name in names), dropped

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

    def set_template(self, template: str) -> None:
        """Takes this chat template in the place of the model's own."""
        self.hf.chat_template = template
        self._is_read = False
        self.response_template = None  # it was the other template's

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `tokenizer(text)` gives before `generate`; special tokens in the text count as such.

        Args:
            add_special_tokens: with the start token, if the model wants one.
        """
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_CHARS:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids; parts of a character become U+FFFD."""
        if len(ids) < LONG_TOKENS:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        text: str = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        goes_on: bool = False,
    ) -> list[int]:
        """The prompt for the model's next message.

        Args:
            messages: {"role": …, "content": …} each, oldest first; calls as transformers' templates take them.
            tools: {"type": "function", "function": {…}} each; where the template knows of no tools they are
                written into the conversation in a format that the model may not have been trained for.
            variables: further ones of the template.
            goes_on: the last message is continued, and no new one begun.

        Raises:
            ChatTemplateError: no messages, no template, or the template refuses these.
        """
        text = self._render(messages, tools, variables or {}, goes_on=goes_on)
        return self._ids(text, False)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template itself renders tools and calls."""
        return "tools" in self._names()

    @property
    def tool_format(self) -> ToolFormat:
        """How the chat template has the model write calls."""
        return tool_format(self._template() if self.knows_tools else "")

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows answers that begin with thinking."""
        if self.response_template is not None:
            return any(name in THINKING for name in self.response_template["fields"])
        return self.has_chat_template and THINK_OPEN in self._template() and THINK_CLOSE in self._template()

    def special_id(self, mark: str) -> int | None:
        """The id of a mark that is one special token."""
        token_id = self.backend.token_to_id(mark)
        return token_id if token_id in self.special_ids else None

    def _template(self) -> str:
        template = self.hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default", ""))
        return template or ""

    def _names(self) -> frozenset[str]:
        """The variables that the template reads."""
        if not self._is_read:
            try:
                names = jinja2.meta.find_undeclared_variables(_parse(self._template()))
            except jinja2.TemplateError:
                names = {"tools"} if "tools" in self._template() else set()
            self._template_names = frozenset(names)
            self._is_read = True
        return self._template_names

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

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        goes_on: bool,
    ) -> str:
        self._check(messages)
        reserved = _RESERVED.intersection(variables)
        if reserved:
            raise ChatTemplateError(f"{min(reserved)!r} is no variable that a request may set")
        conversation = [dict(message) for message in messages]
        if not self.knows_tools:
            conversation = plain_conversation(conversation, tools)
            tools = ()
        try:
            text = self.hf.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as fault:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {fault}") from fault
        assert isinstance(text, str)
        return text

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template; send a prompt instead of messages")
        if not messages:
            raise ChatTemplateError("a conversation needs at least one message")


def check_template(template: str) -> None:
    """Raises ChatTemplateError where it cannot be parsed."""
    try:
        _parse(template)
    except jinja2.TemplateError as fault:
        raise ChatTemplateError(str(fault)) from fault


def _parse(template: str) -> jinja2.nodes.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # A block of transformers' own, which plain jinja does not know.
    return environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))


def _common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The longest list that every row starts with."""
    first, last = min(rows), max(rows)  # in lexical order these two differ earliest
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]
