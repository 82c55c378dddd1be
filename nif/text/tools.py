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

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

# Most characters of a call that is not JSON, as a bound for Python's parser. A longer call is text.
MAX_HELD = 64 * 1024
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Shape(Enum):
    """The syntax of a call's name and arguments."""

    JSON = "json"  # {"name": …, "arguments": {…}}, or a list of them
    NAMED_JSON = "named_json"  # name[ARGS]{…}
    NUMBERED = "numbered"  # functions.name:0, which is the call's id, a mark and {…}, between marks of the call
    XML = "xml"  # <function=name><parameter=key>value</parameter></function>
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
        key: the name of the arguments in a JSON call.
        listed: whether all calls stand between the marks as one JSON list.
        detect: texts that a chat template with this format contains, all of them.
    """

    name: str
    shape: Shape
    opens: tuple[str, ...]
    closes: str = ""
    bare: str = ""
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
HERMES = ToolFormat("hermes", Shape.JSON, ("<tool_call>",), "</tool_call>", detect=("<tool_call>",))
LFM2 = ToolFormat(
    "lfm2", Shape.PYTHONIC, ("<|tool_call_start|>",), "<|tool_call_end|>", "[", detect=("<|tool_call_start|>",)
)
# The first matching format is used, so narrower formats come first.
FORMATS = (
    ToolFormat("qwen-xml", Shape.XML, ("<tool_call>",), "</tool_call>", detect=("<tool_call>", "<function=")),
    HERMES,
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
            if self.num_calls:  # white space after calls is no text, and no more is the beginning of a mark
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
        whole = _whole_calls(body)
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
    r'[\s\]\[,;}]*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED_HEAD = re.compile(
    r"[\s\]\[,;}]*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*(?=\{)"
)
_NUMBERED_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>\s*)?(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)"
    r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_HEADS = {Shape.JSON: _JSON_HEAD, Shape.NAMED_JSON: _NAMED_HEAD, Shape.NUMBERED: _NUMBERED_HEAD}
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


def _whole_calls(body: str) -> list[tuple[str, str]] | None:
    """Parse JSON calls with another order of members or with arguments in a string; None if the text is no call.

    A call may also be a dictionary of Python, since some chat templates show one: {'name': 'f', 'arguments': {}}.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = _python_value(body)
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            return None
        inner = entry.get("function")
        entry = inner if isinstance(inner, dict) else entry
        name = entry.get("name", inner)
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return None
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append((name, text))
    return calls or None


# Calls that are parsed as a whole

_Calls = list[tuple[str, dict[str, Any]]]
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _read_xml(body: str, schemas: Mapping[str, Any]) -> _Calls:
    calls: _Calls = []
    for name, inner in _FUNCTION.findall(body):
        properties = schemas.get(name.strip(), {}).get("properties") or {}
        arguments = {
            key.strip(): _typed(value, properties.get(key.strip())) for key, value in _PARAMETER.findall(inner)
        }
        calls.append((name.strip(), arguments))
    return calls


def _typed(text: str, schema: object) -> Any:
    """Convert an unquoted value by its schema: JSON, or as Python writes it, unless the schema says string."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        value = None if kind is None else _python_value(text)
        return text if value is None and text.strip() != "None" else value


# The errors that evaluating Python's literals raises.
_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def _python_value(text: str) -> Any:
    """Return the value of a literal of Python that JSON can express, too; None if the text is something else."""
    try:
        value = ast.literal_eval(text.strip()) if len(text) <= MAX_HELD else None
        json.dumps(value, allow_nan=False)
    except _NOT_PYTHON:
        return None
    return value


class _JSONWords(ast.NodeTransformer):
    """Replaces true, false and null, which JSON within a call has."""

    _VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _read_pythonic(body: str, schemas: Mapping[str, Any]) -> _Calls:
    """Parse calls in a list, in lines, or, as LFM2 writes on request, in JSON."""
    try:
        calls: _Calls = []
        for line in ast.parse(body.strip()).body:
            tree = line.value if isinstance(line, ast.Expr) else None
            for node in tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]:
                if not isinstance(node, ast.Call) or node.args:
                    return _read_json(body)
                words = {word.arg: _JSONWords().visit(word.value) for word in node.keywords if word.arg is not None}
                arguments = {name: ast.literal_eval(value) for name, value in words.items()}
                json.dumps(arguments, allow_nan=False)
                calls.append((ast.unparse(node.func), arguments))
    except _NOT_PYTHON:
        return []
    return calls


def _read_json(body: str) -> _Calls:
    """Parse calls in JSON, of which arguments in a string are JSON as well."""
    try:
        return [(name, dict(json.loads(arguments))) for name, arguments in _whole_calls(body) or ()]
    except (ValueError, TypeError, RecursionError):
        return []


_CALLED = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")


def _read_called(body: str, schemas: Mapping[str, Any]) -> _Calls:
    calls: _Calls = []
    place = 0
    while (head := _CALLED.match(body, place)) is not None:
        try:
            arguments, place = _called_value(body, head.end(), 0)
        except (ValueError, IndexError):
            return []
        calls.append((head[1], arguments))
    return calls


_ESCAPE = "<escape>"
_MAX_DEPTH = 32


def _called_value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """Parse a value in Gemma's notation; returns the value and its end.

    Raises:
        ValueError, IndexError: the text is no such value.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(_ESCAPE, place):
        end = text.index(_ESCAPE, place + len(_ESCAPE))
        return text[place + len(_ESCAPE) : end], end + len(_ESCAPE)
    if text[place] == "[":
        items = []
        place += 1
        while text[place] != "]":
            item, place = _called_value(text, place, depth + 1)
            items.append(item)
            place += text[place] == ","
        return items, place + 1
    if text[place] == "{":
        members = {}
        place += 1
        while text[place] != "}":
            colon = text.index(":", place)
            key = text[place:colon].strip().removeprefix(_ESCAPE).removesuffix(_ESCAPE)
            members[key], place = _called_value(text, colon + 1, depth + 1)
            place += text[place] == ","
        return members, place + 1
    word = re.compile(r"[^,\]}]*").match(text, place)
    assert word is not None
    return _typed(word[0].strip(), None), word.end()


_READERS: dict[Shape, Callable[[str, Mapping[str, Any]], _Calls]] = {
    Shape.XML: _read_xml,
    Shape.PYTHONIC: _read_pythonic,
    Shape.CALLED: _read_called,
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
