"""OpenAIAnswer: results in the shapes of OpenAI's API, whole or as the events of a stream."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from genbatch.actors.gateways.http.bodies import HTTPRequest, describe, to_json
from genbatch.actors.gateways.http.custom_tools import InputReader, input_of
from genbatch.actors.gateways.http.service_calls import TokenTexts
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Choice, GenerateRequest, Result, Token, TokenLogprob, ToolCall, ToolCallDelta, Usage

# JSON has no infinity; OpenAI's own value for "as good as never".
LOWEST = -9999.0
_INCOMPLETE = "\ufffd"


def chat_logprobs(logprobs: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """Return a list with each token, its log-prob and the likeliest tokens in its place."""
    content = []
    for entry in logprobs:
        top = [named_token(texts[token_id], logprob) for token_id, logprob in entry.top.items()]
        content.append(named_token(texts[entry.token_id], entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def token_logprob(token: Token) -> TokenLogprob:
    """Return the log-prob of a streamed token that has one."""
    assert token.logprob is not None
    return TokenLogprob(token_id=token.token_id, logprob=token.logprob, top=token.top)


def named_token(text: str, logprob: float) -> dict[str, Any]:
    """Return a token and its log-prob as chats show them."""
    # A part of a character has bytes, but its text does not tell which.
    shown = None if _INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": shown}


class LogprobTable:
    """Log-probs as completions show them: four lists with an entry for each token.

    Args:
        texts: the texts of tokens.
        offset: characters in front of the first token.
    """

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self.offset = offset
        self._texts = texts
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_first(self, token_id: int) -> None:
        """Add a prompt's first token, which has no log-prob."""
        self._place(self._texts[token_id])
        self._logprobs.append(None)
        self._tops.append(None)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Add tokens."""
        for entry in entries:
            text = self._texts[entry.token_id]
            self._place(text)
            logprob = max(entry.logprob, LOWEST)
            self._logprobs.append(logprob)
            top: dict[str, float] = {}
            for token_id, other in entry.top.items():
                top.setdefault(self._texts[token_id], max(other, LOWEST))  # for tokens of the same text, the likelier
            top.setdefault(text, logprob)
            self._tops.append(top)

    def to_dict(self) -> dict[str, Any]:
        """Return the lists under OpenAI's names."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _place(self, text: str) -> None:
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)


DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": heartbeat\n\n"  # a comment of server-sent events, which clients skip
_OBJECTS = {True: ("chatcmpl-", "chat.completion"), False: ("cmpl-", "text_completion")}


class OpenAIAnswer:
    """An answer; all its events share a head and a tail, which are encoded once.

    Args:
        request: the answered request.
        model: the model's id.
        texts: what tokens look like.
    """

    def __init__(self, request: HTTPRequest, model: str, texts: TokenTexts) -> None:
        prefix, name = _OBJECTS[request.is_chat]
        self.id = prefix + secrets.token_hex(12)
        self._request = request
        self._texts = texts
        self._is_chat = request.is_chat
        self._created = int(time.time())
        self._model = model
        self._object = name
        self._tables: dict[int, LogprobTable] = {}  # by choice, of a stream
        self._opened: set[int] = set()  # choices that have had an event
        self._inputs: dict[tuple[int, int], InputReader] = {}  # of calls of custom tools, by choice and call
        chunk = f"{name}.chunk" if self._is_chat else name
        head = {"id": self.id, "object": chunk, "created": self._created, "model": model}
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    # Whole

    async def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer; `results` are those of `request.requests`."""
        choices: list[dict[str, Any]] = []
        for result, request in zip(results, self._request.requests, strict=True):
            for choice in result.choices:
                choices.append(await self._choice(len(choices), choice, result, request))
        # A chat has one prompt. With completions each choice has its own prompt.
        about_prompt = await self._about_prompt(results[0]) if self._is_chat else {}
        return {
            "id": self.id,
            "object": self._object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": _usage(results),
            **about_prompt,
        }

    async def _choice(self, index: int, choice: Choice, result: Result, request: GenerateRequest) -> dict[str, Any]:
        logprobs = None
        if self._request.num_top is not None and choice.logprobs is not None:
            await self._learn(choice.logprobs)
            if self._is_chat:
                logprobs = chat_logprobs(choice.logprobs, self._texts)
            else:
                logprobs = (await self._table(choice.logprobs, result, request)).to_dict()
        shown: dict[str, Any] = {"text": choice.text}
        if self._is_chat:
            shown = {"message": _message(choice, self._request.custom)}
        if self._request.shows_ids:
            shown["token_ids"] = choice.token_ids
        if not self._is_chat:
            shown |= await self._about_prompt(result)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    async def _about_prompt(self, result: Result) -> dict[str, Any]:
        """Return the token ids of a prompt and their log-probs, under vLLM's names, if the request asks for them."""
        fields: dict[str, Any] = {}
        if self._request.shows_ids:
            fields["prompt_token_ids"] = result.prompt_token_ids
        if self._request.scores_prompt:
            rows: list[dict[str, Any] | None] = []
            for entry in result.prompt_logprobs or ():
                if entry is not None:
                    await self._learn([entry])
                rows.append(None if entry is None else self._ranked(entry))
            fields["prompt_logprobs"] = rows
        return fields

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        """Return the log-probs of a position in the prompt by token id. Only the likeliest tokens have a rank."""
        ranks = {token_id: rank for rank, token_id in enumerate(entry.top, 1)}
        every = {entry.token_id: entry.logprob} | entry.top
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST),
                "rank": ranks.get(token_id),
                "decoded_token": self._texts[token_id],
            }
            for token_id, logprob in every.items()
        }

    async def _table(self, logprobs: list[TokenLogprob], result: Result, request: GenerateRequest) -> LogprobTable:
        table = LogprobTable(self._texts)
        if self._request.echo and result.prompt_logprobs is not None:
            scored = [entry for entry in result.prompt_logprobs if entry is not None]
            assert request.token_ids is not None  # tokenized for this table
            first = request.token_ids[0]
            await self._texts.learn([first])
            await self._learn(scored)
            table.add_first(first)
            table.add(scored)
        table.add(logprobs)
        return table

    # Streamed

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return an event with these tokens, if they have text or log-probs; the first event has the role."""
        parts = b""
        if any(token.reasoning or token.tool_calls for token in tokens):
            parts = self._reasoning_and_calls(index, tokens)
        text = tokens[0].text if len(tokens) == 1 else "".join(token.text for token in tokens)
        logprobs = b"null" if self._request.num_top is None else await self._encode_logprobs(index, tokens)
        opening = self.opening(index)
        shows_ids = self._request.shows_ids
        if not text and logprobs == b"null" and not shows_ids:
            return opening + parts
        body = b'"delta":{"content":%b}' if self._is_chat else b'"text":%b'
        body %= to_json(text)
        if shows_ids:
            body += b',"token_ids":' + to_json([token.token_id for token in tokens])
        return opening + parts + self._event(index, body, logprobs, b"null")

    def _reasoning_and_calls(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Encode thinking and pieces of calls as events, in the order in which they were written."""
        events = []
        for token in tokens:
            if token.reasoning:
                delta = _thought(token.reasoning)
                events.append(self._event(index, b'"delta":' + to_json(delta), b"null", b"null"))
            events += [self._call_event(index, self._call_piece(index, piece)) for piece in token.tool_calls]
        return b"".join(events)

    def _call_event(self, index: int, piece: dict[str, Any]) -> bytes:
        return self._event(index, b'"delta":' + to_json({"tool_calls": [piece]}), b"null", b"null")

    def _call_piece(self, index: int, piece: ToolCallDelta) -> dict[str, Any]:
        if piece.name in self._request.custom:
            self._inputs[index, piece.index] = InputReader()
        reader = self._inputs.get((index, piece.index))
        if reader is None:
            kind, more = "function", {"arguments": piece.arguments}
        else:
            kind, more = "custom", {"input": reader.push(piece.arguments)}
        if piece.id is None:
            return {"index": piece.index, kind: more}
        return {"index": piece.index, "id": piece.id, "type": kind, kind: {"name": piece.name, **more}}

    def _last_inputs(self, index: int) -> bytes:
        """Encode the remaining inputs of this choice's custom tools as events."""
        rests = {call: reader.finish() for (choice, call), reader in self._inputs.items() if choice == index}
        pieces = [{"index": call, "custom": {"input": rest}} for call, rest in rests.items() if rest]
        return b"".join(self._call_event(index, piece) for piece in pieces)

    def opening(self, index: int) -> bytes:
        """Return the event with the role, which comes first in each choice of a chat; b"" after the first call."""
        if not self._is_chat or index in self._opened:
            return b""
        self._opened.add(index)
        return self._event(index, b'"delta":{"role":"assistant","content":""}', b"null", b"null")

    def heartbeat(self) -> bytes:
        """Return the bytes that keep a silent stream alive."""
        return HEARTBEAT

    def ending(self, results: Sequence[Result]) -> bytes:
        """Return the events that follow the last token."""
        parts = []
        index = 0
        for result in results:
            for choice in result.choices:
                # A repeated prompt comes before the first token, if there is one.
                text = choice.text if self._request.echo and not choice.token_ids else ""
                body = b'"delta":{}' if self._is_chat else b'"text":' + to_json(text)
                if self._request.shows_ids:
                    body += b',"prompt_token_ids":' + to_json(result.prompt_token_ids)
                parts.append(self.opening(index) + self._last_inputs(index))
                parts.append(self._event(index, body, b"null", to_json(choice.finish_reason)))
                index += 1
        if self._request.include_usage:
            parts.append(self._head + b'],"usage":' + to_json(_usage(results)) + b"}\n\n")
        return b"".join([*parts, DONE])

    def failure(self, error: GenbatchError) -> bytes:
        """Return the event with the error that ends a failed stream."""
        return b"data: " + to_json(describe(error)) + b"\n\n"

    def _event(self, index: int, body: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]' % (index, body, logprobs, finish_reason)
        return self._head + choice + self._tail

    async def _encode_logprobs(self, index: int, tokens: Sequence[Token]) -> bytes:
        entries = [token_logprob(token) for token in tokens if token.logprob is not None]
        await self._learn(entries)
        if self._is_chat:
            return to_json(chat_logprobs(entries, self._texts))
        before = self._tables.get(index)
        table = self._tables[index] = LogprobTable(self._texts, before.offset if before else 0)
        table.add(entries)
        return to_json(table.to_dict())

    async def _learn(self, entries: Sequence[TokenLogprob]) -> None:
        for entry in entries:
            await self._texts.learn((entry.token_id, *entry.top))


def _message(choice: Choice, custom: frozenset[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message |= _thought(choice.reasoning)
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call(call, call.name in custom) for call in choice.tool_calls]
    return message


def _thought(text: str) -> dict[str, str]:
    """Return thinking under DeepSeek's name for it, and under vLLM's and OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall, is_custom: bool) -> dict[str, Any]:
    if is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    """Return the usage of all prompts together."""
    usages: list[Usage] = [result.usage for result in results]
    thinking = sum(choice.reasoning_tokens for result in results for choice in result.choices)
    prompt, completion = sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": thinking},
    }
