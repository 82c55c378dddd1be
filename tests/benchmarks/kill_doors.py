"""The doors through which `kills` asks: clients of the wire, programs with an engine process, and four APIs over HTTP.

Each door has the same two questions for a kind of request: its whole answer, and its stream. An answer is compared by
its essence: all that does not depend on a clock, a random id or a cache.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import httpx2

from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Result, Token

ADAPTER = "changed"
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
DRAWN: dict[str, Any] = {**LONG, "temperature": 1.0, "seed": 11}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME = "get_weather"
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
COUNTING = [{"role": "user", "content": "Count from one to thirty in words."}]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The capital of France is", **LONG},
    "drawn": {"prompt": "The capital of Spain is", **DRAWN, "top_p": 0.95},
    "penalties": {"prompt": "The capital of Italy is", **DRAWN, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "log-probs": {"prompt": "The capital of Norway is", **DRAWN, "logprobs": 3},
    "several": {"prompt": "The capital of Peru is", **DRAWN, "n": 3},
    "stop": {"prompt": "The capital of Chile is", **DRAWN, "stop": [". The", "\n\n"], "min_tokens": 5},
    "grammar": {"prompt": "A date:", "regex": "([0-9]{4}-[0-9]{2}-[0-9]{2} ?){6}", "temperature": 1.0, "seed": 4},
    "tools": {
        "messages": WEATHER,
        "tools": [{"name": NAME, "parameters": PARAMETERS}],
        "tool_choice": {"name": NAME},
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 100,
    },
    "adapter": {"prompt": "The capital of Japan is", **LONG, "model": ADAPTER},
}


class Wrong(Exception):
    """An answer that contradicts itself."""


class Door(Protocol):
    """One way to ask."""

    kinds: list[str]

    async def whole(self, kind: str) -> Any:
        """Return the essence of the whole answer."""

    async def stream(self, kind: str, on_piece: Callable[[], None]) -> Any:
        """Return the essence of the streamed answer; calls `on_piece` at each piece."""


def essence(result: Result) -> Any:
    """All of a result but the random ids of calls, and what a cache knew."""
    choices = result.choices or (result,)
    return [
        (one.text, one.token_ids, one.finish_reason, one.logprobs, one.reasoning, one.stop_string,
         [(call.name, call.arguments) for call in one.tool_calls])
        for one in choices
    ]  # fmt: skip


class ClientDoor:
    """A client of the wire, or a program's own Batcher with an engine process."""

    def __init__(self, client: Any, *, adapter: bool) -> None:
        self._client = client
        self.kinds = [kind for kind in KINDS if kind != "adapter" or adapter]

    async def whole(self, kind: str) -> Any:
        """See Door."""
        return essence(await self._client.generate(**KINDS[kind]))

    async def stream(self, kind: str, on_piece: Callable[[], None]) -> Any:
        """See Door."""
        tokens: dict[int, list[Token]] = defaultdict(list)
        async with self._client.stream(**KINDS[kind]) as stream:
            async for token in stream:
                on_piece()
                own = tokens[token.choice]
                if token.index != len(own):
                    raise Wrong(f"token {token.index} after {len(own)}")
                own.append(token)
        for number, choice in enumerate(stream.result.choices or (stream.result,)):
            if [token.token_id for token in tokens[number]] != choice.token_ids:
                raise Wrong("the stream is not the result's")
            if "".join(token.text for token in tokens[number]) != choice.text:
                raise Wrong("the stream's text is not the result's")
        return essence(stream.result)


def _openai(kind: str) -> tuple[str, dict[str, Any]]:
    params = dict(KINDS[kind])
    if "messages" not in params:
        if "regex" in params:
            params["guided_regex"] = params.pop("regex")
        return "/v1/completions", params
    tool = {"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}
    choice = {"type": "function", "function": {"name": NAME}}
    return "/v1/chat/completions", {**params, "tools": [tool], "tool_choice": choice}


_RESPONSES = {
    "responses": {"input": COUNTING, "max_output_tokens": 60, "temperature": 1.0, "seed": 3},
    "responses tools": {
        "input": WEATHER,
        "tools": [{"type": "function", "name": NAME, "parameters": PARAMETERS, "strict": True}],
        "tool_choice": {"type": "function", "name": NAME},
        "max_output_tokens": 100,
        "seed": 5,
    },
}
_ANTHROPIC = {
    "anthropic": {"messages": COUNTING, "max_tokens": 60, "temperature": 0.0},
    "anthropic tools": {
        "messages": WEATHER,
        "tools": [{"name": NAME, "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": NAME},
        "max_tokens": 100,
        "temperature": 0.0,
    },
}
_OLLAMA = {
    "ollama": {"messages": COUNTING, "options": {"num_predict": 60, "temperature": 1.0, "seed": 3}},
    "ollama shape": {
        "messages": WEATHER,
        "format": PARAMETERS,
        "options": {"num_predict": 100, "temperature": 1.0, "seed": 3},
    },
}
# Fields of an answer that differ from one request to the next.
_RANDOM = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "usage", "response_id", "_request_id"}
_RANDOM |= {"system_fingerprint", "previous_response_id", "sequence_number", "cached_tokens", "input_tokens_details"}


class HTTPDoor:
    """OpenAI's chats and completions, its responses, Anthropic's messages and Ollama's chats."""

    def __init__(self, http: httpx2.AsyncClient, model: str, *, adapter: bool) -> None:
        self._http = http
        self._bodies: dict[str, tuple[str, dict[str, Any]]] = {
            f"openai {kind}": _openai(kind) for kind in KINDS if kind != "adapter" or adapter
        }
        for path, bodies in (("/v1/responses", _RESPONSES), ("/v1/messages", _ANTHROPIC), ("/api/chat", _OLLAMA)):
            self._bodies |= {kind: (path, {"model": model, **body}) for kind, body in bodies.items()}
        self.kinds = list(self._bodies)

    async def whole(self, kind: str) -> Any:
        """See Door."""
        path, body = self._bodies[kind]
        answer = await self._http.post(path, json={**body, "stream": False})
        _check(answer.status_code, answer.text)
        return _plain(answer.json())

    async def stream(self, kind: str, on_piece: Callable[[], None]) -> Any:
        """See Door."""
        path, body = self._bodies[kind]
        joined: dict[str, str] = defaultdict(str)
        others: set[str] = set()
        async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                _check(answer.status_code, (await answer.aread()).decode())
            async for event in _events(answer):
                on_piece()
                if "error" in event:
                    _check(500, json.dumps(event))
                if event.get("type") != "ping":  # Anthropic's heartbeat, which a long pause has
                    _join(_plain(event), joined, others)
        return dict(joined), sorted(others)


def _check(status: int, text: str) -> None:
    if status != 200:
        raise GenbatchError(f"{status}: {text[:300]}")


async def _events(answer: httpx2.Response) -> AsyncIterator[Any]:
    """The events of a stream: SSE, or a JSON text a line."""
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _plain(part)
            for name, part in value.items()
            if name not in _RANDOM and not name.endswith("_duration") and part is not None
        }
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _join(event: Any, joined: dict[str, str], others: set[str]) -> None:
    """Join the texts of a stream by their place, since how many tokens an event has depends on the time."""
    rest: list[tuple[str, Any]] = []
    _walk(event, "", joined, rest)
    others.add(json.dumps(rest))


def _walk(value: Any, path: str, joined: dict[str, str], rest: list[tuple[str, Any]]) -> None:
    if isinstance(value, dict):
        place = f"{path}#{value['index']}" if isinstance(value.get("index"), int) else path
        for name, part in value.items():
            _walk(part, f"{place}.{name}", joined, rest)
    elif isinstance(value, list):
        for part in value:
            _walk(part, f"{path}[]", joined, rest)
    elif isinstance(value, str | float) and path.rsplit(".", 1)[-1] in _PIECES:
        joined[path] += str(value)
    elif path != ".index":
        rest.append((path, value))


_PIECES = {"text", "content", "delta", "partial_json", "arguments", "reasoning_content", "thinking", "token", "logprob"}
_PIECES |= {"token_logprobs[]", "tokens[]"}
