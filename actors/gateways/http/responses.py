"""/v1/responses, OpenAI's newer API: read its bodies, and write whole answers and events.

The gateway remembers the newest conversations for `previous_response_id`, in memory only. A restart forgets them: a
client that must not lose its conversation sends the history itself.
"""

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from genbatch.actors.gateways.http.bodies import (
    Fields,
    HTTPRequest,
    ReasoningFields,
    Refusal,
    ThinkingParams,
    build_request,
    describe,
    set_fields,
    to_json,
)
from genbatch.actors.gateways.http.custom_tools import InputReader, arguments_of, as_function, input_of
from genbatch.actors.gateways.http.openai_answer import HEARTBEAT
from genbatch.actors.gateways.http.openai_request import (
    CUSTOM_FIELDS,
    ROLES,
    TOOL_FIELDS,
    AllowedTools,
    StreamExtras,
    allowed_tools,
    is_run_by_client,
)
from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import Result, Token

# Characters of a tool's name.
MAX_TOOL_NAME = 64
# The most remembered conversations, and the most characters of all of them together.
MAX_REMEMBERED, MAX_REMEMBERED_CHARS = 256, 16 * 2**20


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer: "text", "json_object" or "json_schema"."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an answer's text."""

    format: TextFormat | None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    truncation: str | None = None
    stream_options: StreamExtras | None = None
    # Published fields; they are refused at values that would have an effect.
    top_logprobs: int | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Ours
    deadline_s: float | None = None


class Conversations:
    """Remembers the newest conversations, by the id of their last answer and by their owner."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._size = 0

    def remember(self, owner: str, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep a conversation; the oldest conversations are dropped for it."""
        size = len(to_json(messages))
        # guard: size of one remembered conversation
        if size > MAX_REMEMBERED_CHARS:
            return
        self._known[owner, response_id] = (messages, size)
        self._size += size
        # guard: number and size of remembered conversations
        while len(self._known) > MAX_REMEMBERED or self._size > MAX_REMEMBERED_CHARS:
            self._size -= self._known.popitem(last=False)[1][1]

    def find(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Return the messages of a conversation.

        Raises:
            Refusal: the gateway does not remember this conversation, or it has another owner.
        """
        # guard: owner of a remembered conversation
        known = self._known.get((owner, response_id))
        if known is None:
            reason = f"the response {response_id[:64]!r} is not remembered: send the conversation as input instead"
            raise Refusal(404, "previous_response_not_found", reason)
        return known[0]


def read_response(
    body: dict[str, Any], conversations: Conversations, owner: str, reader: Fields | None = None
) -> HTTPRequest:
    """Return the request in a body for /v1/responses.

    Args:
        owner: the owner of the conversations that this request may continue.
        reader: remembers which fields are ignored.

    Raises:
        InvalidRequest: with the path of the first fault.
        Refusal: the gateway does not remember the conversation to continue.
    """
    reader = reader or Fields()
    fields = reader.read(body, ResponseFields)
    _refuse(fields)
    if fields.truncation not in (None, "disabled"):
        reader.ignore("truncation")  # no effect if the conversation fits; otherwise the request fails
    before = conversations.find(owner, fields.previous_response_id) if fields.previous_response_id else []
    items: list[dict[str, Any]] = [{"role": "user", "content": fields.input}]
    if not isinstance(fields.input, str):
        items = fields.input
    system = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    names = {"messages[0].content": "instructions"} if system else {}
    names |= {f"messages[{len(system) + turn}]": "previous_response_id" for turn in range(len(before))}
    if isinstance(fields.input, str):
        names[f"messages[{len(system) + len(before)}].content"] = "input"
    allowed = allowed_tools(fields.tool_choice)
    offered, namespaces, custom = _read_tools(fields.tools or [], names, reader, allowed)
    asked = [*before, *read_items(items, names, len(system) + len(before), reader, namespaces)]
    params: dict[str, Any] = {"messages": [*system, *asked], "reasoning": True}
    params |= set_fields(fields, ("temperature", "top_p", "seed", "deadline_s"))
    thinking = ThinkingParams(reader)
    thinking.reasoning(fields.reasoning)
    params |= thinking.result(fields.chat_template_kwargs)
    if fields.max_output_tokens is not None:
        params["max_tokens"] = fields.max_output_tokens
    if offered:
        params["tools"] = offered
        if fields.parallel_tool_calls is not None:
            params["parallel_tool_calls"] = fields.parallel_tool_calls
    if fields.tool_choice is not None:
        choice = fields.tool_choice if allowed is None else allowed.mode
        params["tool_choice"] = choice if isinstance(choice, str) else _read_choice(choice, reader)
    if fields.text is not None and fields.text.format is not None:
        shape: dict[str, Any] = {"type": fields.text.format.type}
        if fields.text.format.schema is not None:
            shape["schema"] = fields.text.format.schema
        params["response_format"] = shape
    names |= {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
    names |= thinking.names
    return HTTPRequest(
        model=fields.model,
        requests=[build_request(params | reader.hints, names)],
        stream=bool(fields.stream),
        names=names,
        body=body | {"asked": asked},
        namespaces=namespaces,
        custom=custom,
        thinking=thinking.asked,
    )


def _refuse(fields: ResponseFields) -> None:
    if fields.background:
        raise InvalidRequest("background", "background responses are not supported")
    if fields.prompt is not None:
        raise InvalidRequest("prompt", "prompts are not stored: send their text as instructions and input")
    wants_logprobs = {
        "include": "message.output_text.logprobs" in (fields.include or ()),
        "top_logprobs": fields.top_logprobs,
    }
    for name, is_wanted in wants_logprobs.items():
        if is_wanted:
            raise InvalidRequest(name, "only /v1/chat/completions returns log-probs")


def _read_choice(choice: dict[str, Any], reader: Fields) -> dict[str, Any]:
    named = ("type", "name") if choice.get("type") == "custom" else ("type", *TOOL_FIELDS)
    return _without_type(choice, "tool_choice", named, reader)


def _read_tool(tool: dict[str, Any], path: str, reader: Fields) -> dict[str, Any]:
    """Return a function, or a custom tool as a function."""
    if tool.get("type") == "custom":
        return as_function(_without_type(tool, path, ("type", *CUSTOM_FIELDS), reader), path, reader)
    return _without_type(tool, path, ("type", *TOOL_FIELDS), reader)


def _without_type(tool: dict[str, Any], path: str, names: Sequence[str], reader: Fields) -> dict[str, Any]:
    if tool.get("type") not in ("function", "custom"):
        shown = f"{tool.get('type')!r}"[:40]
        raise InvalidRequest(f"{path}.type", f'must be "function" or "custom": {shown} is not run by this service')
    return {name: value for name, value in reader.take(tool, names, path).items() if name != "type"}


# By our name of a function: its namespace, and its name in the namespace.
Namespaces = dict[str, tuple[str, str]]


def _read_tools(
    tools: list[dict[str, Any]], names: dict[str, str], reader: Fields, allowed: AllowedTools | None
) -> tuple[list[dict[str, Any]], Namespaces, frozenset[str]]:
    """Return the functions among the tools, the namespaces of some of them, and the names of the custom tools.

    A function keeps its name. Where several have the same one, the namespace's name is put in front of it.
    `names` gets the caller's names of the functions, by ours.
    """
    functions: list[tuple[str, dict[str, Any], str]] = []  # namespace, function, path
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.get("type") != "namespace":
            functions.append(("", tool, path))
            continue
        space = reader.take(tool, ("type", "name", "description", "tools"), path)
        inner = space.get("tools", [])
        if not isinstance(inner, list) or not all(isinstance(function, dict) for function in inner):
            raise InvalidRequest(f"{path}.tools", "must be a list of functions")
        name = _string(space, "name", path)
        functions += [(name, function, f"{path}.tools[{number}]") for number, function in enumerate(inner)]
    offered: list[dict[str, Any]] = []
    namespaces: Namespaces = {}
    custom: set[str] = set()
    same = Counter(str(function.get("name")) for _, function, _ in functions)
    for namespace, function, path in functions:
        is_allowed = allowed is None or function.get("name") in allowed.names
        if not is_run_by_client(function, path, reader) or not is_allowed:
            continue
        template_tool = _read_tool(function, path, reader)
        if namespace:
            name = _string(template_tool, "name", path)
            template_tool["name"] = name if same[name] == 1 else f"{namespace}.{name}"[-MAX_TOOL_NAME:]
            namespaces[template_tool["name"]] = (namespace, name)
        if function["type"] == "custom":
            custom.add(str(template_tool.get("name")))
        names[f"tools[{len(offered)}]"] = path
        offered.append(template_tool)
    return offered, namespaces, frozenset(custom)


_ITEM_FIELDS = {
    "message": ("type", "role", "content"),
    "function_call": ("type", "call_id", "name", "namespace", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
    "custom_tool_call": ("type", "call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("type", "call_id", "output"),
    "reasoning": ("type", "content"),
}


def read_items(
    items: list[dict[str, Any]],
    names: dict[str, str] | None = None,
    first: int = 0,
    reader: Fields | None = None,
    namespaces: Namespaces | None = None,
) -> list[dict[str, Any]]:
    """Return the turns in a list of input items; raises as `read_response`.

    Args:
        names: gets the caller's names of the turns, by ours.
        first: the first turn's index among the messages.
        reader: remembers which fields are ignored.
        namespaces: the functions that have one, by our names of them.
    """
    turns: list[dict[str, Any]] = []
    names = {} if names is None else names
    reader = reader or Fields()
    ours_of = {theirs: ours for ours, theirs in (namespaces or {}).items()}
    thought: dict[str, str] = {}  # of the answer that follows
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEM_FIELDS:
            reader.take(item, _ITEM_FIELDS[kind], path)
        if kind == "message":
            role = _string(item, "role", path)
            if role not in ROLES or role == "tool":
                raise InvalidRequest(f"{path}.role", f"must be system, developer, user or assistant, not {role!r:.40}")
            content = _content(item.get("content"), f"{path}.content", reader)
            turns.append({"role": "system" if role == "developer" else role, "content": content})
            names[f"messages[{first + len(turns) - 1}]"] = path
            if role == "assistant":
                turns[-1] |= thought
                thought = {}
        elif kind in ("function_call", "custom_tool_call"):
            name = _string(item, "name", path)
            call = {
                "id": _string(item, "call_id", path),
                "name": ours_of.get((str(item.get("namespace")), name), name),
                "arguments": _arguments(item, path),
            }
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": "", **thought})
                thought = {}
            calls = turns[-1].setdefault("tool_calls", [])
            ours = f"messages[{first + len(turns) - 1}]"
            # In front of the turn's own name, which begins as this one does.
            turn_name = names.pop(ours, path)
            names |= {f"{ours}.tool_calls[{len(calls)}].id": f"{path}.call_id"}
            names |= {f"{ours}.tool_calls[{len(calls)}]": path, ours: turn_name}
            calls.append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), f"{path}.output", reader)
            turns.append({"role": "tool", "content": content, "tool_call_id": _string(item, "call_id", path)})
            ours = f"messages[{first + len(turns) - 1}]"
            names |= {f"{ours}.content": f"{path}.output", f"{ours}.tool_call_id": f"{path}.call_id", ours: path}
        elif kind == "reasoning":
            # Some templates show the thinking of the turns since the last question.
            thought = {"reasoning_content": _thinking(item, path)} if item.get("content") else {}
        else:
            raise InvalidRequest(
                f"{path}.type", f"{kind!r:.40} is not supported: send messages, calls and their outputs"
            )
    return turns


def _arguments(call: dict[str, Any], path: str) -> str:
    if call["type"] == "custom_tool_call":
        return arguments_of(_string(call, "input", path))
    return _string(call, "arguments", path)


def _string(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name}", "must be a string")
    return value


def _thinking(item: dict[str, Any], path: str) -> str:
    parts = item["content"] if isinstance(item["content"], list) else []
    return "".join(_string(part, "text", path) for part in parts if isinstance(part, dict))


def _content(content: object, path: str, reader: Fields) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(path, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{path}[{index}]", f"only text is understood, not {kind!r:.40}")
        reader.take(part, ("type", "text"), f"{path}[{index}]")
        texts.append(part["text"])
    return "".join(texts)


class ResponseAnswer:
    """An answer of /v1/responses, whole or as events.

    Args:
        request: the answered request.
        model: the model's id.
        conversations: the store that remembers the answer.
        owner: the owner of the remembered conversation.
    """

    def __init__(self, request: HTTPRequest, model: str, conversations: Conversations, owner: str) -> None:
        self.id = "resp_" + secrets.token_hex(16)
        self._request = request
        self._model = model
        self._conversations = conversations
        self._owner = owner
        self._created = int(time.time())
        self._number = 0
        self._items: list[dict[str, Any]] = []  # the items of a stream; the last may be open
        self._is_open = False
        self._input = InputReader()  # reads the item's input, if the item is a call of a custom tool
        self._has_begun = False

    # Whole

    async def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer, for a request without a stream."""
        return self._whole(results[0], output_items(results[0], self._request.namespaces, self._request.custom))

    def _whole(self, result: Result, items: list[dict[str, Any]]) -> dict[str, Any]:
        self._remember(items)
        status = _ended(result)
        usage = result.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head(status) | {"incomplete_details": details, "output": items, "usage": counts}

    def _head(self, status: str) -> dict[str, Any]:
        body, request = self._request.body, self._request.requests[0]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": request.reasoning_effort, "summary": None},
            "store": body.get("store") is not False,
            "temperature": request.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _remember(self, items: list[dict[str, Any]]) -> None:
        if self._request.body.get("store") is not False:
            # A conversation cannot continue after a call that was cut short.
            kept = [item for item in items if item["type"] not in _CALLS or item["status"] != "incomplete"]
            asked = [*self._request.body["asked"], *read_items(kept, namespaces=self._request.namespaces)]
            self._conversations.remember(self._owner, self.id, asked)

    # Streamed

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return the events that show these tokens."""
        parts = [self._begin()]
        for token in tokens:
            if token.reasoning:
                parts.append(self._add("reasoning", token.reasoning))
            if token.text:
                parts.append(self._add("message", token.text))
            for piece in token.tool_calls:
                if piece.id is not None:
                    name, request = piece.name or "", self._request
                    call = _call(piece.id, name, "", request.namespaces, is_custom=name in request.custom)
                    parts.append(self._open(call))
                    self._input = InputReader()
                parts.append(self._add_arguments(piece.arguments))
        return b"".join(parts)

    def _add_arguments(self, arguments: str) -> bytes:
        item = self._items[-1]
        if item["type"] == "custom_tool_call":
            return self._add_input(self._input.push(arguments))
        if not arguments:
            return b""
        item["arguments"] += arguments
        return self._delta("response.function_call_arguments.delta", arguments)

    def _add_input(self, text: str) -> bytes:
        self._items[-1]["input"] += text
        return self._delta("response.custom_tool_call_input.delta", text) if text else b""

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        head = self._head("in_progress")
        begun = self._event("response.created", response=head)
        return begun + self._event("response.in_progress", response=head)

    def _add(self, kind: str, text: str) -> bytes:
        opened = b""
        if not self._is_open or self._items[-1]["type"] != kind:
            opened = self._open(_message("") if kind == "message" else _reasoning(""))
            if kind == "message":
                part = self._items[-1]["content"][0]
                opened += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        self._items[-1]["content"][0]["text"] += text
        if kind == "message":
            return opened + self._delta("response.output_text.delta", text, content_index=0, logprobs=[])
        return opened + self._delta("response.reasoning_text.delta", text, content_index=0)

    def _open(self, item: dict[str, Any]) -> bytes:
        closed = self._close()
        self._items.append(item)
        self._is_open = True
        index = len(self._items) - 1
        shown = dict(item, content=[]) if item["type"] == "message" else item
        return closed + self._event("response.output_item.added", output_index=index, item=shown)

    def _close(self, status: str = "completed") -> bytes:
        """End the open item."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        parts = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            parts.append(self._event("response.function_call_arguments.done", **self._place(), **done))
        elif item["type"] == "custom_tool_call":
            parts.append(self._add_input(self._input.finish()))
            parts.append(self._event("response.custom_tool_call_input.done", **self._place(), input=item["input"]))
        else:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            text: dict[str, Any] = {"text": item["content"][0]["text"], "content_index": 0}
            if kind == "output_text":
                text["logprobs"] = []
            parts.append(self._event(f"response.{kind}.done", **self._place(), **text))
            if kind == "output_text":
                part = item["content"][0]
                parts.append(self._event("response.content_part.done", **self._place(), content_index=0, part=part))
        item["status"] = status
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.done", output_index=index, item=item))
        return b"".join(parts)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _delta(self, kind: str, delta: str, **more: Any) -> bytes:
        return self._event(kind, **self._place(), delta=delta, **more)

    def heartbeat(self) -> bytes:
        """Return the bytes that keep a silent stream alive: its opening events first, then comments."""
        return self._begin() or HEARTBEAT

    def ending(self, results: Sequence[Result]) -> bytes:
        """Return the events that follow the last token."""
        parts = [self._begin(), self._close(_ended(results[0]))]
        whole = self._whole(results[0], self._items)
        parts.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(parts)

    def failure(self, error: GenbatchError) -> bytes:
        """Return the event with the error that ends a failed stream."""
        details = describe(error)["error"]
        assert isinstance(details, dict)
        return self._event("error", code=details["code"], message=details["message"], param=details["param"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def output_items(
    result: Result, namespaces: Namespaces | None = None, custom: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return a result as items: thinking, text, calls."""
    items = [_reasoning(result.reasoning)] if result.reasoning else []
    if result.text or not result.tool_calls:
        items.append(_message(result.text))
    items += [
        _call(call.id, call.name, call.arguments, namespaces or {}, is_custom=call.name in custom)
        for call in result.tool_calls
    ]
    for item in items:
        item["status"] = "completed"
    items[-1]["status"] = _ended(result)
    return items


def _ended(result: Result) -> str:
    """Return the status of an answer, which its last item has, too."""
    return "incomplete" if result.finish_reason == "length" else "completed"


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    item_id = "msg_" + secrets.token_hex(12)
    return {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": content}


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    item_id = "rs_" + secrets.token_hex(12)
    return {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": content}


_CALLS = ("function_call", "custom_tool_call")  # types of items


def _call(call_id: str, name: str, arguments: str, namespaces: Namespaces, *, is_custom: bool) -> dict[str, Any]:
    prefix, kind = ("ctc_", "custom_tool_call") if is_custom else ("fc_", "function_call")
    item = {"id": prefix + secrets.token_hex(12), "type": kind, "call_id": call_id}
    if name in namespaces:
        item["namespace"], name = namespaces[name]
    written = {"input": input_of(arguments)} if is_custom else {"arguments": arguments}
    return item | {"name": name, **written, "status": "in_progress"}
