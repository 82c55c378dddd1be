"""TemplateReader: an answer taken apart by the response template of its tokenizer, with transformers' own parser.

    template = checked_template(tokenizer.response_template)
    reader = TemplateReader(template, prefix="…<|im_start|>assistant\\n", tools=[…])
    parts = reader.push("<think>hm</think>Yes.")

It is what `AnswerReader` is for the models whose format stands in our own table. A template names regions of the
output: "content", the thinking, "tool_calls". Text and thinking are handed on while they are written, a call once it is
whole.
What cannot be read as a call is text: nothing that a model writes is lost.

A template's expressions come from a model's file, and may take for ever. They share the time of one answer; once it is
used up, the rest of the answer is text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from genbatch.nif.text.expressions import SearchTime, check_repeats
from genbatch.nif.text.tools import CallPiece, Parts, new_call_id

Events = Sequence[Mapping[str, Any]]

_CALLS = "tool_calls"
# What the parser raises at a region whose text is not what the template says.
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, TimeoutError)
# Seconds that a template's expressions may take, at first and more for each piece of an answer. An ordinary template
# takes 0.000005 a piece.
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


def known_template(chat_template: str) -> Mapping[str, Any] | None:
    """The response template of a chat template that we know to need one; None of any other."""
    return HARMONY if all(mark in chat_template for mark in _HARMONY_MARKS) else None


def checked_template(spec: Any) -> Mapping[str, Any] | None:
    """A tokenizer's response template; None where it has none.

    Raises:
        ValueError: it is none that this version of transformers reads.
    """
    if spec is None:
        return None
    from transformers.utils.chat_parsing import ResponseParser  # here: few models have such a template

    try:
        _check_patterns(spec)
        ResponseParser(spec, prefix="")
    except Exception as error:  # whatever a file may have in its place
        raise ValueError(f"the response template cannot be read: {error}") from error
    assert isinstance(spec, dict)
    return spec


def _check_patterns(value: object) -> None:
    """Bounds what compiling a template's expressions takes; they are at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and name.endswith("_pattern"):
                check_repeats(inner)
            _check_patterns(inner)


class TemplateReader:
    """Takes one answer apart while it is written.

    Where something cannot be read, the answer is read once more, one character at a time: what transformers' parser had
    found in the same piece before is not lost, and where the faulty region began is known.

    Args:
        template: see `checked_template`.
        prefix: the prompt, special tokens included: it may have begun a region.
        tools: what is offered, as the chat template gets it; arguments get the types of their schemas. Without any,
            calls are text.
        by_character: read so from the beginning.
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
        self._held: dict[str, str] = {}  # white space at the end of a region so far, by its field
        self._begun: set[str] = set()  # fields that have shown something
        self._num_calls = 0
        # By pieces: what a reader by characters needs to take over.
        self._slow: TemplateReader | None = None
        self._new_slow = partial(TemplateReader, template, prefix, tools, by_character=True)
        self._written: list[str] = []
        self._opened = False  # whether there was a region at all
        self._shown = (0, 0, 0)  # characters of text and of thinking, calls
        # By characters:
        self._by_character = by_character
        self._unread = ""  # what was written since the last of it was handed on

    def push(self, piece: str) -> Parts:
        """What is certain now."""
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
        """The rest; the answer has ended."""
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
        """What the events of a piece bring; those of a reader by characters, where it cannot be read."""
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
        """Reads events; a region that the template cannot read, and all that follows, is text."""
        try:
            self._read(parts, events())
        except _UNREADABLE:
            self._has_failed = True
            parts.text += self._unread

    def _read(self, parts: Parts, events: Events) -> None:
        """Raises:
        ValueError: read by pieces, a region of calls has none.
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
            if not opens_calls:  # else what is left is the mark that does
                self._unread = ""
            if kind == "region_close":
                if not self._strips[name]:
                    self._add(parts, name, self._held.get(name, ""))
                self._held[name] = ""

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
        text = self._held.get(name, "") + text
        shown = text.rstrip()
        self._held[name] = text[len(shown) :]
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
    """Names and arguments of the calls in a region's value; None if it has none."""
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
