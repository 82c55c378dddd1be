"""Tool calls and thinking in a model's text: the format of each model family, and a reader that parses the text.

    format = tool_format(template)                  # by the marks in the chat template
    reader = AnswerReader(format, tools, thinking=thinking_tags(template))
    for piece in pieces:
        parts = reader.push(piece)                  # text, reasoning and pieces of calls, in order
    parts = reader.finish()

    TEXT ── a mark that opens a call ──> CALL ── the mark that closes it ──> TEXT
    THINKING ── the tag that closes it, such as </think> ──> TEXT

Text that cannot be parsed as a call stays text, so no output is lost. JSON arguments are streamed while they are
generated. Other arguments are parsed once their call is complete.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from genbatch.nif.text.whole_calls import (
    MAX_HELD,
    CallList,
    read_by_name,
    read_called,
    read_pythonic,
    read_tagged,
    read_xml,
    whole_calls,
)

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Shape(Enum):
    """The syntax of a call's name and arguments."""

    JSON = "json"  # {"name": …, "arguments": {…}}, or a list of them
    NAMED_JSON = "named_json"  # name[ARGS]{…}
    NUMBERED = "numbered"  # functions.name:0, which is the call's id, a mark and {…}, between marks of the call
    SEPARATED = "separated"  # a name, a mark and {…}, between marks of the call
    XML = "xml"  # <function=name><parameter=key>value</parameter></function>, or <invoke name="name"> likewise
    TAGGED = "tagged"  # name<arg_key>key</arg_key><arg_value>value</arg_value>
    BY_NAME = "by_name"  # [{"name": {…}}, …]
    PYTHONIC = "pythonic"  # [name(key=value), …]
    CALLED = "called"  # call:name{key:<escape>text<escape>}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model family's format of calls.

    Args:
        name: the format's name for messages and tests.
        shape: the syntax of one call.
        opens: marks, each of which opens a call.
        closes: the mark that closes a call; "" means the end of the answer.
        bare: the first character of an answer of calls only, without a mark.
        name_key, key: the names of the name and of the arguments in a JSON call.
        listed: whether all calls stand between the marks as one JSON list.
        detect: texts that a chat template with this format contains, all of them.
    """

    name: str
    shape: Shape
    opens: tuple[str, ...]
    closes: str = ""
    bare: str = ""
    name_key: str = "name"
    key: str = "arguments"
    listed: bool = False
    detect: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks. A mark may be a special token, and then its text must be visible to the reader."""
        inner = _INNER_MARKS.get(self.shape, ())
        return (*self.opens, *((self.closes,) if self.closes else ()), *inner)


# The marks around an id, and after the arguments.
CALL_BEGINS, CALL_ARGUMENTS, CALL_ENDS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_INNER_MARKS: Mapping[Shape, tuple[str, ...]] = {
    Shape.NAMED_JSON: ("[ARGS]", "[CALL_ID]"),
    Shape.NUMBERED: (CALL_BEGINS, CALL_ARGUMENTS, CALL_ENDS),
}


def _deepseek(name: str) -> str:
    """Return one of DeepSeek's marks; its bars are U+FF5C, not the ASCII bar."""
    return f"<\uff5ctool▁{name}\uff5c>"


HERMES = ToolFormat("hermes", Shape.JSON, ("<tool_call>",), "</tool_call>", detect=("<tool_call>",))
LFM2 = ToolFormat(
    "lfm2", Shape.PYTHONIC, ("<|tool_call_start|>",), "<|tool_call_end|>", "[", detect=("<|tool_call_start|>",)
)
# The first matching format is used, so narrower formats come first.
FORMATS = (
    ToolFormat("qwen-xml", Shape.XML, ("<tool_call>",), "</tool_call>", detect=("<tool_call>", "<function=")),
    ToolFormat("glm", Shape.TAGGED, ("<tool_call>",), "</tool_call>", detect=("<tool_call>", "<arg_key>")),
    ToolFormat("seed", Shape.XML, ("<seed:tool_call>",), "</seed:tool_call>", detect=("<seed:tool_call>",)),
    ToolFormat("minimax", Shape.XML, ("<minimax:tool_call>",), "</minimax:tool_call>", detect=("<minimax:tool_call>",)),
    ToolFormat(
        "deepseek",
        Shape.SEPARATED,
        (_deepseek("calls▁begin"), _deepseek("call▁begin")),
        _deepseek("calls▁end"),
        listed=True,
        detect=(_deepseek("calls▁begin"),),
    ),
    ToolFormat(
        "cohere",
        Shape.JSON,
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        name_key="tool_name",
        key="parameters",
        listed=True,
        detect=("<|START_ACTION|>",),
    ),
    ToolFormat("hunyuan", Shape.JSON, ("<tool_calls>",), "</tool_calls>", listed=True, detect=("<tool_calls>",)),
    HERMES,
    ToolFormat("apertus", Shape.BY_NAME, ("<|tools_prefix|>",), "<|tools_suffix|>", detect=("<|tools_prefix|>",)),
    ToolFormat(
        "phi4",
        Shape.JSON,
        ("<|tool_call|>",),
        "<|/tool_call|>",
        listed=True,
        detect=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolFormat("granite", Shape.JSON, ("<|tool_call|>",), listed=True, detect=("<|tool_call|>",)),
    ToolFormat("mistral-args", Shape.NAMED_JSON, ("[TOOL_CALLS]",), detect=("[TOOL_CALLS]", "[ARGS]")),
    ToolFormat("mistral", Shape.JSON, ("[TOOL_CALLS]",), detect=("[TOOL_CALLS]",)),
    ToolFormat("nemotron", Shape.JSON, ("<TOOLCALL>",), "</TOOLCALL>", listed=True, detect=("<TOOLCALL>",)),
    ToolFormat("olmo", Shape.PYTHONIC, ("<function_calls>",), "</function_calls>", detect=("<function_calls>",)),
    ToolFormat(
        "kimi",
        Shape.NUMBERED,
        ("<|tool_calls_section_begin|>", CALL_BEGINS),  # Kimi leaves out the section's mark now and then
        "<|tool_calls_section_end|>",
        listed=True,
        detect=("<|tool_calls_section_begin|>",),
    ),
    LFM2,
    ToolFormat("pythonic", Shape.PYTHONIC, ("<|python_start|>",), "<|python_end|>", "[", detect=("<|python_start|>",)),
    ToolFormat(
        "gemma",
        Shape.CALLED,
        ("<start_function_call>",),
        "<end_function_call>",
        detect=("<start_function_call>",),
    ),
    ToolFormat("llama3", Shape.JSON, ("<|python_tag|>",), bare="{", key="parameters", detect=("ipython", "parameters")),
)


def tool_format(template: str, is_token: Callable[[str], bool] = lambda mark: False) -> ToolFormat:
    """Return the format of calls in a chat template; Hermes' format if no known format matches.

    Args:
        is_token: whether a mark is one token of the model. Templates of LFM2 and LFM2.5 show the tools and never a
            call, so only the vocabulary tells their format.
    """
    for known in FORMATS:
        if all(mark in template for mark in known.detect):
            return known
    return LFM2 if is_token(LFM2.opens[0]) else HERMES


class ThinkingTags(NamedTuple):
    """The texts around a model's thinking.

    Args:
        opens, closes: the tags.
        ending: the text that ends the thinking as the model itself would: the closing tag and what follows it.
    """

    opens: str
    closes: str
    ending: str


THINK = ThinkingTags("<think>", "</think>", "\n</think>\n\n")
# The first tags that a template contains are used. Some templates also name <think>, for answers of other models.
THINKING_TAGS = (
    ThinkingTags("[THINK]", "[/THINK]", "[/THINK]"),  # Magistral, Ministral 3, Mistral Small 4
    ThinkingTags("<seed:think>", "</seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),  # Command R7B, Command A
    ThinkingTags("<|channel>thought", "<channel|>", "<channel|>"),  # Gemma 4
    ThinkingTags("<|begin_of_thought|>", "<|end_of_thought|>", "<|end_of_thought|>\n\n"),  # OpenThinker, Sky-T1
    ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>", "<|inner_suffix|>"),  # Apertus
    ThinkingTags("<longcat_think>", "</longcat_think>", "</longcat_think>\n"),
    ThinkingTags("<thought>", "</thought>", "\n</thought>\n\n"),  # EXAONE Deep
    ThinkingTags("◁think▷", "◁/think▷", "◁/think▷"),  # Kimi-VL
    THINK,
)


def thinking_tags(template: str) -> ThinkingTags | None:
    """Return the tags around thinking that a chat template contains; None if it contains no known tags.

    LFM2.5's template only cuts off what stands before </think>: its model opens the thinking itself.
    """
    known = next((tags for tags in THINKING_TAGS if tags.opens in template and tags.closes in template), None)
    return THINK if known is None and THINK.closes in template else known


@dataclass(slots=True)
class CallPiece:
    """A piece of a call: the first piece has the id and the name, later pieces extend the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """The parts of a piece of output."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Reader(Protocol):
    """Parses one answer while it is generated."""

    def push(self, piece: str) -> Parts:
        """Add a piece of the answer; return the parts that no later piece can change."""

    def finish(self) -> Parts:
        """Return the remaining parts, since the answer has ended."""


class _State(Enum):
    START = "start"
    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


class AnswerReader:
    """Parses one answer while it is generated.

    Args:
        format: the format of calls; None if the answer has no calls.
        tools: the offered tools in the chat template's form; they give the types of arguments that are not JSON.
        thinking: the tags of the thinking that an answer may begin with, which is returned separately; None for none.
        starts_thinking: whether the prompt opened the thinking already.
        begins: texts with which an answer with calls can begin; any other answer is text, even with marks.
            Empty if calls may come anywhere.
    """

    def __init__(
        self,
        format: ToolFormat | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: ThinkingTags | None = None,
        starts_thinking: bool = False,
        begins: Sequence[str] = (),
    ) -> None:
        self._format = format
        self._begins = begins
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._opens = format.opens if format is not None else ()
        self._state = _State.THINKING if starts_thinking else _State.START
        self._thinking = thinking  # None once the answer has thought
        self._buffer = ""
        self._opened_by = ""  # the mark of the current call; "" for a bare call
        self._call: _JSONCalls | None = None
        self._trims = False  # whether following white space is dropped
        self._begun: dict[_State, bool] = {}
        self.num_calls = 0

    def push(self, piece: str) -> Parts:
        """Add a piece of the answer; return the parts that no later piece can change."""
        self._buffer += piece
        parts = Parts()
        while self._step(parts, at_end=False):
            pass
        return parts

    def finish(self) -> Parts:
        """Return the remaining parts, since the answer has ended."""
        parts = Parts()
        while self._step(parts, at_end=True):
            pass
        return parts

    def _step(self, parts: Parts, *, at_end: bool) -> bool:
        """Advance by one state; returns False if more text is needed."""
        match self._state:
            case _State.START:
                return self._start(at_end)
            case _State.THINKING:
                return self._think(parts, at_end)
            case _State.TEXT:
                return self._read_text(parts, at_end)
            case _State.CALL:
                return self._read_call(parts, at_end)

    def _start(self, at_end: bool) -> bool:
        """Decide whether the answer begins with thinking, with a bare call, or with text."""
        begun = self._buffer.lstrip()
        if self._trims:
            self._buffer = begun
        if self._thinking is not None and begun.startswith(self._thinking.opens):
            self._buffer = begun.removeprefix(self._thinking.opens)
            self._state = _State.THINKING
            return True
        if not at_end and (not begun or (self._thinking is not None and self._thinking.opens.startswith(begun))):
            return False
        if self._begins and not begun.startswith(tuple(self._begins)):
            if not at_end and any(text.startswith(begun) for text in self._begins):
                return False
            self._opens = ()
            self._state = _State.TEXT
            return True
        if self._format is not None and self._format.bare and begun.startswith(self._format.bare):
            self._open("")
            return True
        self._state = _State.TEXT
        return True

    def _think(self, parts: Parts, at_end: bool) -> bool:
        assert self._thinking is not None
        before, mark, after = self._buffer.partition(self._thinking.closes)
        if mark:
            parts.reasoning += self._shown(before.rstrip(), _State.THINKING)
            self._buffer = after.lstrip()
            self._trims = True
            self._thinking = None
            self._state = _State.START
            return True
        keep = 0 if at_end else _held_back(self._buffer, (self._thinking.closes,))
        parts.reasoning += self._shown(self._buffer[: len(self._buffer) - keep], _State.THINKING)
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _read_text(self, parts: Parts, at_end: bool) -> bool:
        if self._trims:
            self._buffer = self._buffer.lstrip()
        first = min(((self._buffer.index(mark), mark) for mark in self._opens if mark in self._buffer), default=None)
        if first is not None:
            start, mark = first
            parts.text += self._text(self._buffer[:start].rstrip())
            self._buffer = self._buffer[start + len(mark) :]
            self._open(mark)
            return True
        if at_end:
            rest = self._buffer
            if self.num_calls:  # after calls, white space and the beginning of a mark are not text
                cut = _held_back(rest, self._opens) if self._opens else 0
                rest = rest[: len(rest) - cut].rstrip()
            parts.text += self._text(rest)
            self._buffer = ""
            return False
        keep = _held_back(self._buffer, self._opens) if self._opens else 0
        parts.text += self._text(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _text(self, text: str) -> str:
        if text:
            self._trims = False
        return text

    def _shown(self, text: str, state: _State) -> str:
        """Return `text` without white space at the answer's beginning."""
        if not self._begun.get(state):
            text = text.lstrip()
            self._begun[state] = bool(text)
        return text

    # Calls

    def _open(self, mark: str) -> None:
        assert self._format is not None
        self._opened_by = mark
        self._state = _State.CALL
        if head := _HEADS.get(self._format.shape):
            self._call = _JSONCalls(head, self._next_call)

    def _next_call(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1

    def _read_call(self, parts: Parts, at_end: bool) -> bool:
        assert self._format is not None
        if self._call is None:
            return self._read_held(parts, at_end)
        calls = self._call
        self._buffer = calls.feed(self._buffer, parts)
        if calls.is_open:
            if at_end:
                self._buffer = ""
                self._state = _State.TEXT
            return at_end
        closes = self._format.closes if self._opened_by else ""
        if closes and closes in self._buffer:
            body, _, self._buffer = self._buffer.partition(closes)
            self._close(parts, body, closes)
            return True
        gives_up = not self._opened_by and calls.num_read == 0 and len(self._buffer) > _MAX_HEAD
        if at_end or gives_up:
            body, self._buffer = self._buffer, ""
            self._close(parts, body, "")
            return True
        return False

    def _close(self, parts: Parts, body: str, closes: str) -> None:
        """Parse the rest of a call's text, or all of it if its beginning had no known form."""
        assert self._call is not None
        calls, self._call = self._call, None
        self._state = _State.TEXT
        self._trims = True
        if calls.num_read or not body.strip():
            return  # what follows the last call is brackets
        whole = whole_calls(body)
        if whole is None:
            self._as_text(parts, body + closes)
            return
        for name, arguments in whole:
            parts.calls.append(CallPiece(self._next_call(), new_call_id(), name, arguments))

    def _read_held(self, parts: Parts, at_end: bool) -> bool:
        """Parse a call of a format that is parsed as a whole."""
        assert self._format is not None
        closes = self._format.closes if self._opened_by else ""
        is_closed = bool(closes) and closes in self._buffer
        if not (is_closed or at_end or len(self._buffer) > MAX_HELD):
            return False
        if is_closed:
            body, _, self._buffer = self._buffer.partition(closes)
        else:
            body, self._buffer = self._buffer, ""
        self._state = _State.TEXT
        self._trims = True
        read = _READERS[self._format.shape]
        calls = read(body, self._schemas) if len(body) <= MAX_HELD else None
        if not calls:
            self._as_text(parts, body + (closes if is_closed else ""))
            return True
        for name, arguments in calls:
            text = json.dumps(arguments, ensure_ascii=False)
            parts.calls.append(CallPiece(self._next_call(), new_call_id(), name, text))
        return True

    def _as_text(self, parts: Parts, body: str) -> None:
        parts.text += self._opened_by + body
        self._trims = False


def new_call_id() -> str:
    """Return an id of nine letters and digits, as the strictest template, Mistral's, requires."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


# Calls in JSON, parsed while they are generated

_JSON_HEAD = re.compile(
    r'[\s\]\[,;}]*\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"]*"\s*,\s*)*"(?:tool_)?name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED_HEAD = re.compile(
    r"[\s\]\[,;}]*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*(?=\{)"
)
_NUMBERED_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>\s*)?(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)"
    r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
# DeepSeek V3 writes function, the separator, the name and a block of code; V3.1 the name and the separator.
_SEPARATED_HEAD = re.compile(
    rf"[\s`]*(?:{_deepseek('call▁end')}\s*)?(?:{_deepseek('call▁begin')})?\s*(?:function{_deepseek('sep')})?"
    rf"(?P<name>[\w.-]+)(?:{_deepseek('sep')}|\s*```json)\s*(?=\{{)"
)
_HEADS = {
    Shape.SEPARATED: _SEPARATED_HEAD,
    Shape.JSON: _JSON_HEAD,
    Shape.NAMED_JSON: _NAMED_HEAD,
    Shape.NUMBERED: _NUMBERED_HEAD,
}
# Most characters of a call without a mark before its name is complete.
_MAX_HEAD = 512


class _JSONCalls:
    """Parses one JSON call after another: a head with a name, an object with arguments, brackets in between."""

    def __init__(self, head: "re.Pattern[str]", next_index: Callable[[], int]) -> None:
        self._head = head
        self._next_index = next_index
        self.num_read = 0
        self.is_open = False  # within arguments
        self._index = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, parts: Parts) -> str:
        """Consume text; returns the rest that cannot be consumed yet or at all."""
        while text:
            if not self.is_open:
                head = self._head.match(text)
                if head is None:
                    return text
                name = head["name"]
                try:
                    name = json.loads(name) if name.startswith('"') else name
                except ValueError:
                    return text
                self._index = self._next_index()
                self.num_read += 1
                self.is_open = True
                parts.calls.append(CallPiece(self._index, head.groupdict().get("id") or new_call_id(), name))
                text = text[head.end() :]
            length = self._scan(text)
            if length:
                parts.calls.append(CallPiece(self._index, arguments=text[:length]))
            text = text[length:]
        return text

    def _scan(self, text: str) -> int:
        """Return the length of the part of `text` that belongs to the open object."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_open = False
                    return place + 1
        return len(text)


_READERS: dict[Shape, Callable[[str, Mapping[str, Any]], CallList]] = {
    Shape.XML: read_xml,
    Shape.TAGGED: read_tagged,
    Shape.BY_NAME: read_by_name,
    Shape.PYTHONIC: read_pythonic,
    Shape.CALLED: read_called,
}


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end that may begin a mark, with the white space before them."""
    longest = max(map(len, marks)) - 1
    keep = 0
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            keep = length
            break
    shown = text[: len(text) - keep]
    return keep + len(shown) - len(shown.rstrip())
