"""Tokenizer: converts text and conversations to token ids and back, as the model's own files define it.

A chat template without a place for tools or calls gets a conversation that has them in its texts.
"""

import json
import logging
import re
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
from genbatch.nif.text.tools import LFM2, Shape, ToolFormat, thinking_tags, tool_format

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger("genbatch")

# Longer texts and lists of ids are processed as a batch of one, because a batch call lets other Python threads run.
# A single call would block other threads and the event loop for half a second per megabyte.
LONG_CHARS = 4096
LONG_TOKENS = 1024

# Continuations of a conversation after its first message. They start with different kinds of characters, because a
# tokenizer may merge the end of the prefix with the next character.
_CONTINUATIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "a"),),
    (("user", "\n1"),),
    (("user", " Zé"),),
    (("user", "世"), ("assistant", "b"), ("user", "c")),
    (("assistant", "a"),),
    (("assistant", "\n1"), ("user", "b")),
    (("assistant", "世"), ("user", " c")),
)


# transformers' names for one of several templates; a single template has the first name.
_DEFAULT, _TOOL_USE = "default", "tool_use"

# The parameters of transformers' `apply_chat_template` that are no variables of a template, and the variables that it
# adds. They are listed here because importing transformers takes half a second; a test compares them.
RESERVED = frozenset(
    (
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "kwargs"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation while it is rendered to a prompt.

    Args:
        rendering: the rendering of the conversation, and of others that begin with the same message.
        num_others: number of the other conversations.
    """

    rendering: Rendering
    num_others: int = 0

    @property
    def text(self) -> str:
        """Return the prompt after the rendering is done; raises the rendering's ChatTemplateError."""
        return self.rendering.prompt(0)

    @property
    def num_characters(self) -> int:
        """Return the length of the rendered prompts in characters."""
        return self.rendering.num_characters

    @property
    def others(self) -> list[str]:
        """Return the prompts of the other conversations that the template accepts."""
        prompts = []
        for index in range(self.num_others):
            try:
                prompts.append(self.rendering.prompt(1 + index))
            except ChatTemplateError:
                continue  # the template requires another role here
        return prompts


class Tokenizer:
    """A Hugging Face fast tokenizer with the calls that serving needs.

    Args:
        hf: a fast tokenizer that transformers loaded, or the copy that `warm_model` keeps.

    Raises:
        TokenizerError: its normalizer makes a text much longer, or its decoder has expressions of its own.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.backend: Backend = hf.backend_tokenizer
        _check_growth(self.backend)
        # Remove the length limit, because the context checks the length and this limit would only warn.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._process = _own_process(self.backend)
        self._renderer: TemplateRenderer | None = None
        self._set_response_template(self._response_template())

    def _set_response_template(self, template: Mapping[str, Any] | None) -> None:
        self.response_template = template
        marks = json.dumps(template, ensure_ascii=False).replace("\\", "")
        names = self.backend.get_added_tokens_decoder().items() if template is not None else ()
        # Show the special tokens that separate a template's regions, and no others.
        self.response_marks = frozenset(
            i for i, token in names if token.special and (token.content in marks or template is HARMONY)
        )
        # The tags around thinking; None if there is none, and for gpt-oss, which thinks in a channel.
        written = self._template() if template is None else marks
        self.thinking_tags = None if template is HARMONY else thinking_tags(written)

    def _response_template(self) -> Mapping[str, Any] | None:
        """Return transformers' template for parsing the model's output; None if the tokenizer has none."""
        try:
            own = checked_template(getattr(self.hf, "response_template", None))
            return known_template(self._template()) if own is None else own
        except ValueError as error:
            log.warning("%s; the table of formats is used", error)
            return None

    @property
    def vocab_size(self) -> int:
        """Return the bound of the tokenizer's ids; the logits may be wider."""
        return len(self.hf)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens from its bytes; 0 if only tokenizing can tell."""
        longest, dropped = self._longest_token
        return len(text.encode(errors="replace").translate(None, dropped)) // longest if longest else 0

    @cached_property
    def _longest_token(self) -> tuple[int, bytes]:
        """Return the most bytes of text in one token, and the bytes that belong to no token.

        0 means no bound, for example if parts of a text are changed or dropped before tokenizing.
        """
        settings = json.loads(self.backend.to_str())
        cut = json.dumps(settings.get("pre_tokenizer"))
        keeps_all = settings.get("normalizer") is None and '"ByteLevel"' in cut and '"Removed"' not in cut
        swallows = any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values())
        if settings["model"].get("type") != "BPE" or not keeps_all or swallows:
            return 0, b""
        names = self.backend.get_vocab(with_added_tokens=True)
        dropped = bytes(byte for byte, character in byte_characters().items() if character not in names)
        return max(len(name.encode()) for name in names), dropped

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens without text, such as the end of a message."""
        marked = (i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)
        return frozenset(self.hf.all_special_ids) | frozenset(marked)

    @property
    def eos_token_id(self) -> int | None:
        """Return the end-of-sequence token; None if the tokenizer names none."""
        token_id: int | None = self.hf.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self.hf.chat_template)

    def set_template(self, template: str) -> None:
        """Replace the model's own chat template."""
        self.hf.chat_template = template
        self._renderer = None
        self._set_response_template(known_template(template))  # the model's own one no longer fits

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the same ids as transformers' `tokenizer(text)`; special tokens in the text are recognized.

        Args:
            add_special_tokens: whether to add the start token, if the model uses one.

        Raises:
            TokenizerError: the tokenizer fails on this text.
        """
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.encoding(text, add_special_tokens=add_special_tokens).ids)

    def encoding(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text, or of two, with their places in it; raises as `encode`."""
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
        """Return the text of a whole sequence of ids; parts of a character become U+FFFD."""
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
        """Return the prompt for the model's next message.

        Args:
            messages: {"role": …, "content": …} each, oldest first; calls as transformers' templates take them.
            tools: {"type": "function", "function": {…}} each. If the template does not support tools, they are
                written into the conversation in a format that the model may not have been trained for.
            variables: further variables of the template.
            goes_on: whether to continue the last message, and begin no new message.

        Raises:
            ChatTemplateError: there are no messages or no template, or the template refuses the messages.
        """
        prompt = self.start_prompt(messages, tools, variables, goes_on=goes_on)
        prompt.rendering.wait()
        return self.encode_prompt(prompt.text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a chat template's prompt, which already has its start token."""
        return self._ids(text, False)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template itself renders tools and calls."""
        return "tools" in self._names()

    @property
    def tool_format(self) -> ToolFormat:
        """Return the format of calls in the chat template."""
        if not self.knows_tools:
            return tool_format("")
        return tool_format(self._template(), lambda mark: self.backend.token_to_id(mark) is not None)

    @property
    def thinks(self) -> bool:
        """Whether the chat template supports answers that begin with thinking."""
        if self.response_template is not None:
            return any(name in THINKING for name in self.response_template["fields"])
        return self.thinking_tags is not None

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template has this name. With another meaning the variable has no effect."""
        return self.has_chat_template and name in self._template()

    def find_in_template(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the first match of an expression in the chat template."""
        return pattern.search(self._template()) if self.has_chat_template else None

    def special_id(self, mark: str) -> int | None:
        """Return the id of a mark that is one special token; None for other text."""
        token_id = self.backend.token_to_id(mark)
        return token_id if token_id in self.special_ids else None

    def special_ids_in(self, marks: str) -> frozenset[int]:
        """Return the special tokens that these marks contain."""
        return self.special_ids.intersection(self.encode(marks, add_special_tokens=False)) if marks else frozenset()

    def _template(self) -> str:
        template = self.hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default", ""))
        return template or ""

    @property
    def renderer(self) -> TemplateRenderer:
        """Return the renderer of the chat templates; its processes start at the first use."""
        if self._renderer is None:
            template = self.hf.chat_template or ""
            sources = template if isinstance(template, dict) else {_DEFAULT: template}
            self._renderer = TemplateRenderer({str(name): str(source) for name, source in sources.items()})
        return self._renderer

    def _template_name(self, *, has_tools: bool) -> str:
        """Return the name of the template that transformers would use."""
        names = self.hf.chat_template if isinstance(self.hf.chat_template, dict) else (_DEFAULT,)
        if has_tools and _TOOL_USE in names:
            return _TOOL_USE
        if _DEFAULT not in names:
            raise ChatTemplateError(f"the model has no chat template for such a request; it has {', '.join(names)}")
        return _DEFAULT

    def _names(self) -> frozenset[str]:
        """Return the variables that the template reads."""
        if not self.has_chat_template:
            return frozenset()
        names = self.hf.chat_template if isinstance(self.hf.chat_template, dict) else (_DEFAULT,)
        name = next((name for name in (_TOOL_USE, _DEFAULT) if name in names), None)
        if name is None or self.renderer.fault(name):
            return frozenset({"tools"} if "tools" in self._template() else ())
        return self.renderer.variables(name)

    def template_prefix(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the common token prefix of all conversations that begin with `messages[0]`.

        The prefix is what several rendered conversations with different continuations have in common. It is empty if
        the template accepts fewer than two of them. A template may render a further conversation differently, so the
        caller compares the prefix with the prompt first.

        Raises:
            ChatTemplateError: no messages, or no template.
        """
        prompt = self.start_prompt(messages[:1], with_others=True)
        prompt.rendering.wait()
        return self.common_prefix(prompt.others)

    def common_prefix(self, prompts: Sequence[str]) -> list[int]:
        """Return the common token prefix of prompts; empty for fewer than two prompts."""
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
        """Start rendering a conversation; the arguments and errors are those of `apply_chat_template`.

        Args:
            with_others: whether to render other continuations of the first message, too.
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
        elif not self.template_reads("tool_calls"):
            format = self.tool_format
            conversations = [with_calls_in_text(conversation, format) for conversation in conversations]
        elif self.tool_format.shape is Shape.NUMBERED:
            conversations = [with_numbered_calls(conversation) for conversation in conversations]
        rendering = self.renderer.start(
            self._template_name(has_tools=bool(tools)),
            conversations,
            {"documents": None, **self.hf.special_tokens_map, "tools": list(tools) or None, **(variables or {})},
            goes_on=goes_on,
        )
        return ChatPrompt(rendering, len(conversations) - 1)

    def rehearse(self) -> None:
        """Render and tokenize a sample conversation, so that the first request need not wait for the set-up.

        This starts the chat template's processes and computes the bound of `least_tokens`. A template's refusal is
        ignored here; a request that causes the same refusal gets it as its error.
        """
        self.least_tokens("Hello")
        if self.has_chat_template:
            with suppress(ChatTemplateError):
                prompt = self.start_prompt([{"role": "user", "content": "Hello"}])
                prompt.rendering.wait()
                self.encode_prompt(prompt.rendering.prompt(0))


def byte_characters() -> dict[int, str]:
    """Return each byte's character in a byte-level vocabulary, as in GPT-2.

    A printable byte of Latin-1 maps to itself. The other bytes map to the characters from 256 on, in ascending order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}


def _own_process(backend: "Backend") -> TokenizerProcess | None:
    """Return a process for a tokenizer with unbounded run time; None for a tokenizer with bounded run time."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    settings = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    settings["model"] = {"max_input_chars_per_word": getattr(backend.model, "max_input_chars_per_word", None)}
    # guard: a decoder with expressions of its own
    for expression in decoder_expressions(settings):
        raise TokenizerError(f"its decoder has the expression {expression[:60]!r}, which may take any time")
    unknown = unchecked(settings)
    # guard: a process for a tokenizer with expressions of its own
    if unknown:
        log.info("the tokenizer runs in a separate process, because it has unknown parts: %.200r", unknown)
        return TokenizerProcess(backend.to_str())
    return None


_MAX_GROWTH = 1024  # real tokenizers replace a character with three bytes or one word


def _check_growth(backend: "Backend") -> None:
    """Refuse a normalizer or a decoder if its replacements could make a short text take all memory."""
    for part in ("normalizer", "decoder"):
        stage = getattr(backend, part)
        growth = 1 if stage is None else _growth(json.loads(stage.__getstate__()))
        if growth > _MAX_GROWTH:
            raise TokenizerError(f"its {part} replaces texts with texts up to {growth} times as long")


def _growth(step: Any) -> int:
    """Return the factor by which the replacements of a normalizer or a decoder can lengthen a text."""
    if isinstance(step, list):
        return prod(_growth(part) for part in step)
    if not isinstance(step, dict):
        return 1
    texts = [step[name] for name in ("content", "prepend", "replacement", "suffix", "prefix") if name in step]
    lengths = [len(text.encode(errors="replace")) for text in texts if isinstance(text, str)]
    return prod(max(1, length) for length in lengths) * prod(_growth(part) for part in step.values())


def check_template(template: str) -> None:
    """Check that a chat template can be compiled; raises ChatTemplateError otherwise."""
    fault = TemplateRenderer({_DEFAULT: template}).fault(_DEFAULT)
    if fault:
        raise ChatTemplateError(fault)


def _common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the longest common prefix of the rows."""
    first, last = min(rows), max(rows)  # in lexical order these two rows differ earliest
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


_OFFER = """You may call functions to help with the user's request. They are described in JSON, one a line:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object of its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def plain_conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Write tools, calls and their answers into a conversation's texts, in Hermes' format.

    Args:
        messages: messages in the form of transformers' templates, with objects as `arguments`.
        tools: the offered tools; may be empty.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if turns and turns[-1]["role"] == "user" and turns[-1]["content"].startswith("<tool_response>"):
                turns[-1]["content"] += f"\n{content}"
                continue
        for call in message.get("tool_calls") or ():
            shown = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += ("\n" if content else "") + _hermes(shown)
        turns.append({"role": role, "content": content})
    if tools:
        offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns and turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{offer}"
        else:
            turns.insert(0, {"role": "system", "content": offer})
    return turns


def with_calls_in_text(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Write earlier calls into their messages' texts, for a chat template that shows tools but no calls."""
    return [
        {**message, "content": _called(message.get("content") or "", message["tool_calls"], format)}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def with_numbered_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace the ids of earlier calls by those that Kimi writes, functions.NAME:NUMBER."""
    ids: dict[Any, str] = {}
    named: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        copy = dict(message)
        if message.get("tool_calls"):
            calls = copy["tool_calls"] = []
            for call in message["tool_calls"]:
                ids[call.get("id")] = f"functions.{call['function']['name']}:{count}"
                calls.append({**call, "id": ids[call.get("id")]})
                count += 1
        if message.get("tool_call_id") in ids:
            copy["tool_call_id"] = ids[message["tool_call_id"]]
        named.append(copy)
    return named


def _called(content: str, calls: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Return a message's text with its calls, as its model writes them."""
    functions = [call["function"] for call in calls]
    if format is not LFM2:
        return "\n".join(filter(None, [content, *map(_hermes, functions)]))
    written = (
        f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in function['arguments'].items())})"
        for function in functions
    )
    return f"{LFM2.opens[0]}[{', '.join(written)}]{LFM2.closes}{content}"


def _hermes(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
