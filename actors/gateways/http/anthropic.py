"""/v1/messages, Anthropic's API: read its bodies, count their tokens, and write whole answers and events."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from genbatch.actors.batcher.messages import BILLING_HEADER
from genbatch.actors.gateways.http.bodies import (
    MESSAGES_PATH,
    Fields,
    HTTPRequest,
    ThinkingFields,
    ThinkingParams,
    build_request,
    describe,
    parsed_arguments,
    set_fields,
    to_json,
)
from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import Result, Token, Usage

# Stands in front of a tool's error, since chat templates have no field for errors.
_ERROR = "Error: "
_BLOCK_FIELDS = {
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
    "thinking": ("type", "thinking"),
}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer: "json_schema" with its `schema`."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer, and how much to think before it."""

    format: OutputFormat | None = None
    effort: Any = None


class CountFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format


class MessageFields(CountFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Ours
    deadline_s: float | None = None


def read_message(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    """Return the request in a body for /v1/messages.

    Args:
        reader: remembers which fields are ignored.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    reader = reader or Fields()
    fields = reader.read(body, MessageFields)
    params, names = _conversation(fields, reader)
    params |= {"max_tokens": fields.max_tokens, "reasoning": True}
    params |= set_fields(fields, ("temperature", "top_p", "top_k", "deadline_s"))
    if fields.stop_sequences is not None:
        params["stop"] = fields.stop_sequences
    shape, shape_name = fields.output_format, "output_format"
    if fields.output_config is not None and fields.output_config.format is not None:
        if shape not in (None, fields.output_config.format):
            raise InvalidRequest("output_format", "is the older name of output_config.format, which has another value")
        shape, shape_name = fields.output_config.format, "output_config.format"
    if shape is not None:
        params["response_format"] = msgspec.structs.asdict(shape)
    thinking = ThinkingParams(reader)
    thinking.thinking(fields.thinking)
    thinking.effort("output_config.effort", fields.output_config.effort if fields.output_config else None)
    params |= thinking.result(params.get("chat_template_kwargs"))
    last = params["messages"][-1] if params["messages"] else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        params["continue_final_message"] = True  # the caller has begun the answer
    names_of_choice = ("type", "name", "disable_parallel_tool_use")
    choice = reader.take(fields.tool_choice or {"type": "auto"}, names_of_choice, "tool_choice")
    if choice.pop("disable_parallel_tool_use", False):
        params["parallel_tool_calls"] = False
    kind = choice.get("type")
    if kind == "tool":
        params["tool_choice"] = {"name": choice.get("name")}
    elif kind in ("auto", "any", "none"):
        params["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise InvalidRequest("tool_choice.type", f'must be "auto", "any", "tool" or "none", not {kind!r:.40}')
    names |= {"stop": "stop_sequences", "response_format": shape_name} | thinking.names
    return HTTPRequest(
        model=fields.model,
        requests=[build_request(params | reader.hints, names)],
        stream=bool(fields.stream),
        names=names,
        body=body,
        thinking=thinking.asked,
    )


def read_count(body: dict[str, Any], reader: Fields | None = None) -> tuple[str | None, dict[str, Any], dict[str, str]]:
    """Read a body for /v1/messages/count_tokens; raises as `read_message`.

    Returns:
        The model, the parameters of `tokenize`, and the caller's names of these where they differ.
    """
    reader = reader or Fields()
    fields = reader.read(body, CountFields)
    return fields.model, *_conversation(fields, reader)


def _conversation(fields: CountFields, reader: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the chat template's variables, and the caller's name of each of their parts by our name."""
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    system = _system(fields.system or "", reader)
    if system:
        turns.append({"role": "system", "content": system})
        names["messages[0].content"] = "system"
    for index, message in enumerate(fields.messages):
        for turn, theirs in _turns(message, f"messages[{index}]", reader):
            names |= {f"messages[{len(turns)}]{part}": place for part, place in theirs.items()}
            turns.append(turn)
    params: dict[str, Any] = {"messages": turns}
    offered: list[dict[str, Any]] = []
    for index, tool in enumerate(fields.tools or ()):
        kind = tool.get("type", "custom")
        if isinstance(kind, str) and kind != "custom":
            reader.ignore(f"tools[{index}].{kind}")  # the service offers such a tool and cannot run it
            continue
        names[f"tools[{len(offered)}].parameters"] = f"tools[{index}].input_schema"
        names[f"tools[{len(offered)}]"] = f"tools[{index}]"
        offered.append(_tool(tool, f"tools[{index}]", reader))
    if offered:
        params["tools"] = offered
    if fields.thinking is not None:
        params["chat_template_kwargs"] = {"enable_thinking": fields.thinking.type != "disabled"}
    return params, names


def _system(system: str | list[dict[str, Any]], reader: Fields) -> str:
    """Return the system prompt. A billing header in the first block becomes a line, which the Batcher removes."""
    text = _text(system, "system", reader)
    first = _text(system[:1], "system", reader) if isinstance(system, list) else text
    is_line = first.endswith("\n") or not first.startswith(BILLING_HEADER)
    return text if is_line else f"{first}\n{text[len(first) :]}"


def _tool(tool: dict[str, Any], path: str, reader: Fields) -> dict[str, Any]:
    fields = reader.take(tool, ("type", "name", "description", "input_schema", "strict"), path)
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    converted = {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}
    if fields.get("strict"):
        converted["strict"] = True
    return converted


def _turns(message: dict[str, Any], path: str, reader: Fields) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return a message as turns: the results of tools are separate turns, in front of the rest of the message.

    Each turn comes with the caller's names of the turn and of its parts, the longest first.
    """
    turn = reader.take(message, ("role", "content"), path)
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{path}.role", f'must be "user" or "assistant", not {role!r:.40}')
    if isinstance(content, str):
        return [({"role": role, "content": content}, {"": path})]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content", "must be a string or a list of blocks")
    texts, results, thoughts = [], [], []
    calls: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the calls
    for index, block in enumerate(content):
        place = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _BLOCK_FIELDS:
            reader.take(block, _BLOCK_FIELDS[kind], place)
        if kind == "text":
            texts.append(_block(block, place, reader))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            names |= {f".tool_calls[{len(calls)}].arguments": f"{place}.input", f".tool_calls[{len(calls)}]": place}
            calls.append({"id": block.get("id"), "name": block.get("name"), "arguments": arguments})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{place}.content", reader)
            if block.get("is_error"):
                text = _ERROR + text
            result = {"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")}
            results.append((result, {".tool_call_id": f"{place}.tool_use_id", "": place}))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            raise InvalidRequest(
                f"{place}.type", f"{kind!r:.40} is not supported: send text, tool uses and their results"
            )
    if not texts and not calls and results:
        return results
    turn = {"role": role, "content": "".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    return [*results, (turn, names | {"": path})]


def _text(content: object, path: str, reader: Fields) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    return "".join(_block(block, f"{path}[{index}]", reader) for index, block in enumerate(blocks))


def _block(block: object, path: str, reader: Fields) -> str:
    """Return the text of a text block."""
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(block, dict) or not isinstance(text, str):
        raise InvalidRequest(path, "only text is understood")
    reader.take(block, ("type", "text"), path)
    return text


class MessageAnswer:
    """An answer of /v1/messages, whole or as events.

    Args:
        request: the answered request.
        model: the model's id.
    """

    def __init__(self, request: HTTPRequest, model: str) -> None:
        self.id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._has_begun = False
        self._open: str | None = None  # the kind of the open block
        self._index = -1

    # Whole

    async def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer, for a request without a stream."""
        result = results[0]
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.text or not (result.tool_calls or result.reasoning):
            content.append({"type": "text", "text": result.text})
        for call in result.tool_calls:
            arguments = parsed_arguments(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return self._head(content, result.usage) | _stop(result)

    def _head(self, content: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    # Streamed

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return the events that show these tokens."""
        parts = [self._begin()]
        for token in tokens:
            if token.reasoning:
                parts.append(self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
                parts.append(self._delta({"type": "thinking_delta", "thinking": token.reasoning}))
            if token.text:
                parts.append(self._start("text", {"type": "text", "text": ""}))
                parts.append(self._delta({"type": "text_delta", "text": token.text}))
            for piece in token.tool_calls:
                if piece.id is not None:
                    parts.append(self._stop())
                    block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                    parts.append(self._start("tool_use", block))
                if piece.arguments:
                    parts.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
        return b"".join(parts)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return _event("message_start", message=self._head([], None))

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        stopped = self._stop()
        self._open = kind
        self._index += 1
        return stopped + _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def heartbeat(self) -> bytes:
        """Return the bytes that keep a silent stream alive."""
        return self._begin() + _event("ping")

    def ending(self, results: Sequence[Result]) -> bytes:
        """Return the events that follow the last token."""
        result = results[0]
        ended = _event("message_delta", delta=_stop(result), usage=_usage(result.usage))
        return self._begin() + self._stop() + ended + _event("message_stop")

    def failure(self, error: GenbatchError) -> bytes:
        """Return the event with the error that ends a failed stream."""
        return b"event: error\ndata: " + to_json(describe(error, MESSAGES_PATH)) + b"\n\n"


def _stop(result: Result) -> dict[str, Any]:
    """Return the reason for the answer's end, in Anthropic's names."""
    reason = _STOP_REASONS[result.finish_reason]
    if reason == "end_turn" and result.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_string}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage | None) -> dict[str, Any]:
    if usage is None:  # the request ended before its prompt was evaluated
        return {"input_tokens": 0, "output_tokens": 0}
    counts = {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "output_tokens": usage.completion_tokens}
    return counts | {"cache_read_input_tokens": usage.cached_tokens, "cache_creation_input_tokens": 0}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"
