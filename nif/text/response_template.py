"""TemplateReader: parses an answer by its tokenizer's response template, with transformers' own parser.

    template = checked_template(tokenizer.response_template)
    reader = TemplateReader(template, prefix="…<|im_start|>assistant\\n", tools=[…])
    parts = reader.push("<think>hm</think>Yes.")

Models with a format in our own table use `AnswerReader` instead. A template names regions of the output: "content", the
thinking, "tool_calls". Text and thinking are streamed, and a call is returned once it is complete. Text that cannot be
parsed as a call stays text, so no output is lost.

A template's expressions come from a model's file and may run for ever. The expressions share one answer's time budget.
Once the budget is used up, the rest of the answer is text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from genbatch.nif.text.expressions import SearchTime, check_repeats
from genbatch.nif.text.tools import CallPiece, Parts, new_call_id

Events = Sequence[Mapping[str, Any]]

_CALLS = "tool_calls"
# The parser's exceptions for a region that does not match the template.
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, TimeoutError)
# The time budget of a template's expressions in seconds: a base, and an allowance for each piece of an answer. An
# ordinary template takes 0.000005 s per piece.
FIRST_S = 0.1
PER_PIECE_S = 0.0005
THINKING = frozenset(("reasoning_content", "reasoning", "thinking"))


# Harmony, as gpt-oss writes: messages in channels. Thinking is "analysis"; "final" is for the reader, and so is a
# "commentary" without a recipient. The recipient of a call stands before or behind the channel's name.
_KIND = r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
_END = r"<\|(?:end|return|call)\|>"
HARMONY: Mapping[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open_pattern": rf"<\|channel\|>analysis{_KIND}",
            "close_pattern": _END,
            "repeats": True,
            "join": "\n",
        },
        _CALLS: {
            "open_pattern": rf"(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?{_KIND}",
            "close_pattern": _END,
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": rf"<\|channel\|>(?:final|commentary){_KIND}",
            "close_pattern": _END,
            "repeats": True,
            "join": "\n",
            "content_args": {"strip": False},
        },
    },
}
_HARMONY_MARKS = ("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|message|>")
# Gemma 4's, for files without a template of their own, such as GGUF.
GEMMA_4: Mapping[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        _CALLS: {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    },
}
_GEMMA_4_MARKS = ("<|turn>model", "<|channel>thought", "<channel|>", "<|tool_call>call:")
_KNOWN = ((HARMONY, _HARMONY_MARKS), (GEMMA_4, _GEMMA_4_MARKS))


def known_template(chat_template: str) -> Mapping[str, Any] | None:
    """Return our response template for a known chat template; None for any other chat template."""
    return next((known for known, marks in _KNOWN if all(mark in chat_template for mark in marks)), None)


def checked_template(spec: Any) -> Mapping[str, Any] | None:
    """Return a tokenizer's response template after checking it; None if there is none.

    Raises:
        ValueError: this version of transformers cannot read the template.
    """
    if spec is None:
        return None
    from transformers.utils.chat_parsing import ResponseParser  # here: few models have such a template

    try:
        _check_patterns(spec)
        ResponseParser(spec, prefix="")
    except Exception as error:  # the file may hold any value
        raise ValueError(f"the response template cannot be read: {error}") from error
    assert isinstance(spec, dict)
    return spec


def _check_patterns(value: object) -> None:
    """Check that a template's expressions, at any depth, are cheap to compile."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and name.endswith("_pattern"):
                check_repeats(inner)
            _check_patterns(inner)


class TemplateReader:
    """Parses one answer while it is generated.

    After a parse error the answer is parsed again, one character at a time. So the parser's earlier results for the
    same piece are not lost, and the start of the faulty region is known.

    Args:
        template: see `checked_template`.
        prefix: the prompt with special tokens, because the prompt may have begun a region.
        tools: the offered tools in the chat template's form; their schemas give the arguments' types. Without tools,
            calls are text.
        by_character: whether to parse by character from the beginning.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        by_character: bool = False,
    ) -> None:
        from genbatch.nif.text.response_parser import TimedParser  # needs transformers, and few models need it

        # The template says whether the white space around a region is part of it.
        fields = template["fields"].items()
        self._strips = {name: bool(field.get("content_args", {}).get("strip", True)) for name, field in fields}
        self._time = SearchTime(FIRST_S)
        self._has_failed = False
        try:
            self._parser = TimedParser(template, prefix, tools, self._time)
        except TimeoutError:  # of the prompt
            self._has_failed = by_character = True
        self._has_tools = bool(tools)
        self._trailing: dict[str, str] = {}  # trailing white space of the open region, by its field
        self._begun: set[str] = set()  # fields with returned text
        self._num_calls = 0
        # When parsing by pieces: the state that a parser by characters needs to take over.
        self._slow: TemplateReader | None = None
        self._new_slow = partial(TemplateReader, template, prefix, tools, by_character=True)
        self._written: list[str] = []
        self._opened = False  # whether there was a region at all
        self._shown = (0, 0, 0)  # characters of text and of thinking, calls
        # When parsing by characters:
        self._by_character = by_character
        self._unread = ""  # text since the last returned part

    def push(self, piece: str) -> Parts:
        """Add a piece of the answer; return the parts that no later piece can change."""
        self._time.left_s += PER_PIECE_S
        if self._slow is not None:
            return self._slow.push(piece)
        if self._by_character:
            parts = Parts()
            for character in piece:
                self._push_character(parts, character)
            return parts
        self._written.append(piece)
        return self._handed_on(lambda: self._parser.feed(piece))

    def finish(self) -> Parts:
        """End the answer, and return the rest of its parts."""
        if self._slow is not None:
            return self._slow.finish()
        if not self._by_character:
            parts = self._handed_on(lambda: self._parser.finalize()[1])
            if self._slow is None:
                return parts if self._opened else Parts("".join(self._written))
            return _joined([parts, self._slow.finish()])
        parts = Parts()
        if not self._has_failed:
            self._try(parts, lambda: self._parser.finalize()[1])
        return parts

    def _handed_on(self, events: Callable[[], Events]) -> Parts:
        """Return the parts of a piece's events; after a parse error, those of a parser by characters."""
        parts = Parts()
        try:
            self._read(parts, events())
        except _UNREADABLE:
            self._slow = self._new_slow()
            whole = _joined([self._slow.push(piece) for piece in self._written])
            text, reasoning, calls = self._shown
            parts = Parts(whole.text[text:], whole.reasoning[reasoning:], whole.calls[calls:])
        else:
            text, reasoning, calls = self._shown
            self._shown = (text + len(parts.text), reasoning + len(parts.reasoning), calls + len(parts.calls))
        return parts

    def _push_character(self, parts: Parts, character: str) -> None:
        if self._has_failed:
            parts.text += character
            return
        self._unread += character
        self._try(parts, lambda: self._parser.feed(character))

    def _try(self, parts: Parts, events: Callable[[], Events]) -> None:
        """Read events. A region that the template cannot parse is text, and so is the rest."""
        try:
            self._read(parts, events())
        except _UNREADABLE:
            self._has_failed = True
            parts.text += self._unread

    def _read(self, parts: Parts, events: Events) -> None:
        """Add the events' text, thinking and calls to `parts`.

        Raises:
            ValueError: when parsing by pieces, a region of calls has no call.
        """
        opens_calls = any((event["field"], event["type"]) == (_CALLS, "region_open") for event in events)
        self._opened |= bool(events)
        for event in events:
            name, kind = event["field"], event["type"]
            if name == _CALLS:
                if kind == "region_close":
                    self._close_calls(parts, event["value"])
                continue
            if kind == "region_chunk":
                self._show(parts, name, event["text"])
                is_next = self._unread.startswith(event["text"])
                self._unread = self._unread[len(event["text"]) :] if is_next else ""
                continue
            if not opens_calls:  # else the unread rest is the mark that opens them
                self._unread = ""
            if kind == "region_close":
                if not self._strips[name]:
                    self._add(parts, name, self._trailing.get(name, ""))
                self._trailing[name] = ""

    def _close_calls(self, parts: Parts, value: object) -> None:
        calls = _calls(value) if self._has_tools else None
        if calls is not None:
            for name, arguments in calls:
                parts.calls.append(CallPiece(self._num_calls, new_call_id(), name, arguments))
                self._num_calls += 1
        elif self._by_character:
            parts.text += self._unread
        else:
            raise ValueError("a region of tool calls has no call in it")
        self._unread = ""

    def _show(self, parts: Parts, name: str, text: str) -> None:
        if name not in self._begun and self._strips[name]:
            text = text.lstrip()
        if not text:
            return
        text = self._trailing.get(name, "") + text
        shown = text.rstrip()
        self._trailing[name] = text[len(shown) :]
        self._add(parts, name, shown)

    def _add(self, parts: Parts, name: str, text: str) -> None:
        if text:
            self._begun.add(name)
        if name in THINKING:
            parts.reasoning += text
        else:
            parts.text += text


def _joined(all_parts: Sequence[Parts]) -> Parts:
    return Parts(
        "".join(parts.text for parts in all_parts),
        "".join(parts.reasoning for parts in all_parts),
        [call for parts in all_parts for call in parts.calls],
    )


def _calls(value: object) -> list[tuple[str, str]] | None:
    """Return names and arguments of the calls in a region's value; None if there are none."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            return None
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return None
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return calls or None
