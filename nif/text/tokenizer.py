"""Tokenizer: text and conversations to token ids and back, as the model's own files define it."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from genbatch.nif.text.detokenizer import TokenizerError, raised
from genbatch.nif.text.response_template import HARMONY, THINKING, checked_template, known_template
from genbatch.nif.text.templates import ChatTemplateError, Rendering, TemplateRenderer
from genbatch.nif.text.tokenizer_process import Encoding, TokenizerProcess, decoder_expressions, unchecked
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


# The names that transformers gives to one of several templates; a single one has the first.
_DEFAULT, _TOOL_USE = "default", "tool_use"

# What transformers' `apply_chat_template` takes beside a template's variables, and what the template gets from it.
# Written out, since transformers takes half a second to import; a test compares them.
RESERVED = frozenset(
    (
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "kwargs"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation on its way to be a prompt.

    Args:
        rendering: of the conversation and, behind it, of others that begin with the same message.
        num_others: how many others.
    """

    rendering: Rendering
    num_others: int = 0

    @property
    def text(self) -> str:
        """The prompt, once the rendering is done; raises ChatTemplateError as it does."""
        return self.rendering.prompt(0)

    @property
    def num_characters(self) -> int:
        """How long the prompts are that were rendered."""
        return self.rendering.num_characters

    @property
    def others(self) -> list[str]:
        """The prompts of those others that the template admits."""
        prompts = []
        for index in range(self.num_others):
            try:
                prompts.append(self.rendering.prompt(1 + index))
            except ChatTemplateError:
                continue  # a template that wants other roles at this place
        return prompts


class Tokenizer:
    """A Hugging Face fast tokenizer with the calls that serving needs.

    Args:
        hf: the tokenizer that transformers loaded, which must be a fast one, or the same as `warm_model` keeps it.

    Raises:
        TokenizerError: it makes a text much longer before it cuts it up, or its decoder has expressions of its own.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.backend: Backend = hf.backend_tokenizer
        _check_growth(self.backend)
        # Limits are the context's business; a limit kept here would only warn.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._process = _own_process(self.backend)
        self._renderer: TemplateRenderer | None = None
        self._set_response_template(self._response_template())

    def _set_response_template(self, template: Mapping[str, Any] | None) -> None:
        self.response_template = template
        marks = json.dumps(template, ensure_ascii=False).replace("\\", "")
        names = self.backend.get_added_tokens_decoder().items() if template is not None else ()
        # Special tokens by which the template tells regions apart; others stay out of sight.
        self.response_marks = frozenset(
            i for i, token in names if token.special and (token.content in marks or template is HARMONY)
        )

    def _response_template(self) -> Mapping[str, Any] | None:
        """How transformers reads what the model writes; None where the tokenizer does not say."""
        try:
            own = checked_template(getattr(self.hf, "response_template", None))
            return known_template(self._template()) if own is None else own
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
        dropped = bytes(byte for byte, character in byte_characters().items() if character not in names)
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
        self._renderer = None
        self._set_response_template(known_template(template))  # the model's own was the other template's

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `tokenizer(text)` gives before `generate`; special tokens in the text count as such.

        Args:
            add_special_tokens: with the start token, if the model wants one.

        Raises:
            TokenizerError: the tokenizer fails on this text.
        """
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.encoding(text, add_special_tokens=add_special_tokens).ids)

    def encoding(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoding:
        """The tokens of a text, or of two, with their places in it; raises as `encode`."""
        if self._process is not None:
            return self._process.encode(text, pair, add_special_tokens=add_special_tokens)
        try:
            if len(text) < LONG_CHARS and pair is None:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            texts = [text if pair is None else (text, pair)]
            return self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)[0]
        except BaseException as fault:
            raise raised(fault) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids; parts of a character become U+FFFD."""
        try:
            if len(ids) < LONG_TOKENS:
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            text: str = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as fault:
            raise raised(fault) from None
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
        prompt = self.start_prompt(messages, tools, variables, goes_on=goes_on)
        prompt.rendering.wait()
        return self.encode_prompt(prompt.text)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt that a chat template wrote, which has its own start token."""
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

    @property
    def renderer(self) -> TemplateRenderer:
        """Runs the chat templates; its processes start when it is first used."""
        if self._renderer is None:
            template = self.hf.chat_template or ""
            sources = template if isinstance(template, dict) else {_DEFAULT: template}
            self._renderer = TemplateRenderer({str(name): str(source) for name, source in sources.items()})
        return self._renderer

    def _template_name(self, *, has_tools: bool) -> str:
        """Which of several templates transformers takes."""
        names = self.hf.chat_template if isinstance(self.hf.chat_template, dict) else (_DEFAULT,)
        if has_tools and _TOOL_USE in names:
            return _TOOL_USE
        if _DEFAULT not in names:
            raise ChatTemplateError(f"the model has no chat template for such a request; it has {', '.join(names)}")
        return _DEFAULT

    def _names(self) -> frozenset[str]:
        """The variables that the template reads."""
        if not self.has_chat_template:
            return frozenset()
        names = self.hf.chat_template if isinstance(self.hf.chat_template, dict) else (_DEFAULT,)
        name = next((name for name in (_TOOL_USE, _DEFAULT) if name in names), None)
        if name is None or self.renderer.fault(name):
            return frozenset({"tools"} if "tools" in self._template() else ())
        return self.renderer.variables(name)

    def template_prefix(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens with which every conversation that begins with `messages[0]` begins.

        Found by rendering conversations that go on differently and keeping what they have in common; empty
        when the template admits fewer than two of them. A template may still do something new with a
        conversation unlike all those, so whoever shares the prefix compares it with the prompt first.

        Raises:
            ChatTemplateError: no messages, or no template.
        """
        prompt = self.start_prompt(messages[:1], with_others=True)
        prompt.rendering.wait()
        return self.common_prefix(prompt.others)

    def common_prefix(self, prompts: Sequence[str]) -> list[int]:
        """The tokens that prompts have in common; none of fewer than two."""
        rows = [self.encode_prompt(prompt) for prompt in prompts]
        return _common_prefix(rows) if len(rows) > 1 else []

    def start_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        goes_on: bool = False,
        with_others: bool = False,
    ) -> ChatPrompt:
        """Begins to render a conversation; the arguments and errors are those of `apply_chat_template`.

        Args:
            with_others: also conversations that go on otherwise after the first message.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template; send a prompt instead of messages")
        if not messages:
            raise ChatTemplateError("a conversation needs at least one message")
        reserved = RESERVED.intersection(variables or ())
        if reserved:
            raise ChatTemplateError(f"{min(reserved)!r} is no variable that a request may set")
        conversations: list[Sequence[Mapping[str, Any]]] = [messages]
        if with_others:
            others = ([{"role": role, "content": text} for role, text in following] for following in _CONTINUATIONS)
            conversations += [[messages[0], *following] for following in others]
        if not self.knows_tools:
            conversations = [
                plain_conversation(conversation, () if index else tools)
                for index, conversation in enumerate(conversations)
            ]
            tools = ()
        rendering = self.renderer.start(
            self._template_name(has_tools=bool(tools)),
            conversations,
            {"documents": None, **self.hf.special_tokens_map, "tools": list(tools) or None, **(variables or {})},
            goes_on=goes_on,
        )
        return ChatPrompt(rendering, len(conversations) - 1)

    def rehearse(self) -> None:
        """Renders and tokenizes a conversation for nobody, so that the first request finds all of it built.

        These are the processes of the chat template, and the bound of `least_tokens`. A template may refuse the
        conversation; a request that meets the same is answered with it.
        """
        self.least_tokens("Hello")
        if self.has_chat_template:
            with suppress(ChatTemplateError):
                prompt = self.start_prompt([{"role": "user", "content": "Hello"}])
                prompt.rendering.wait()
                self.encode_prompt(prompt.rendering.prompt(0))


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them.

    A printable byte of Latin-1 stands for itself, the others for the characters from 256 on, in ascending order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}


def _own_process(backend: "Backend") -> TokenizerProcess | None:
    """A process for a tokenizer that may take any time; None for a tokenizer that cannot."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    settings = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    settings["model"] = {"max_input_chars_per_word": getattr(backend.model, "max_input_chars_per_word", None)}
    # guard: a decoder with expressions of its own
    for expression in decoder_expressions(settings):
        raise TokenizerError(f"its decoder has the expression {expression[:60]!r}, which may take any time")
    found = unchecked(settings)
    # guard: a process for a tokenizer with expressions of its own
    if found:
        log.info("the tokenizer runs in a process of its own, for it has parts that are not known: %.200r", found)
        return TokenizerProcess(backend.to_str())
    return None


_MAX_GROWTH = 1024  # real ones put three bytes or one word in the place of a character


def _check_growth(backend: "Backend") -> None:
    """Refuses a normalizer or a decoder whose replacements would make a short text take all memory."""
    for part in ("normalizer", "decoder"):
        found = getattr(backend, part)
        growth = 1 if found is None else _growth(json.loads(found.__getstate__()))
        if growth > _MAX_GROWTH:
            raise TokenizerError(f"its {part} replaces texts by others that are up to {growth} times as long")


def _growth(step: Any) -> int:
    """How many times as long a text may become, by the lengths of what a normalizer or a decoder puts in."""
    if isinstance(step, list):
        return prod(_growth(part) for part in step)
    if not isinstance(step, dict):
        return 1
    texts = [step[name] for name in ("content", "prepend", "replacement", "suffix", "prefix") if name in step]
    lengths = [len(text.encode(errors="replace")) for text in texts if isinstance(text, str)]
    return prod(max(1, length) for length in lengths) * prod(_growth(part) for part in step.values())


def check_template(template: str) -> None:
    """Raises ChatTemplateError where it cannot be compiled."""
    fault = TemplateRenderer({_DEFAULT: template}).fault(_DEFAULT)
    if fault:
        raise ChatTemplateError(fault)


def _common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The longest list that every row starts with."""
    first, last = min(rows), max(rows)  # in lexical order these two differ earliest
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]
