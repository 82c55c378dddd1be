"""The messages about texts: generation with its tokens and results, tokenization, sessions, embeddings and scores.

The messages about the service itself are in `service_messages.py`.

A generation may bring the tokens that a stream has shown, from which another engine or another gateway continues:

    record = TokenRecord(scored=False)
    record.add(token)                    # each token of a choice, in order
    record.drawn()                       # DrawnTokens: all tokens so far

A draw depends only on the logits, the seed and the position. All other state of an answer is a function of its tokens.
So a request with its drawn tokens continues with the same next token as if nothing had happened.
"""

import math
import secrets
from array import array
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from genbatch.proto.errors import InvalidRequest, Unavailable


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of an answer.

    Args:
        type: "text" allows any text, "json_object" one JSON object, "json_schema" JSON that validates against `schema`.
        schema: the JSON Schema, as an object or as its JSON text; only with "json_schema".
    """

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call.

    Args:
        name: 1 to 64 letters, digits, "_", "-" and "."; no two tools of a request have the same.
        description: tells the model what the function does.
        parameters: the JSON Schema of its arguments, an object; None for a function without arguments.
        strict: whether the arguments of every call must validate.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a tool in an answer.

    Args:
        id: the call's id, which the tool's message repeats as `tool_call_id`.
        name: the tool's name, as the model wrote it.
        arguments: the arguments as JSON, as the model wrote them: without `strict`, or where the output ended early,
            they may be invalid.
    """

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a call in a stream; the joined pieces of an `index` are the call.

    Args:
        index: the number of the call in its choice, from 0.
        id, name: only in a call's first piece.
        arguments: the next piece of the JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Payer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The client of a fleet's gateway.

    Args:
        name: the client's name, the same at every replica; 1 to 256 characters.
        served: weighted tokens that other replicas served it since the last request here; finite, >= 0.
    """

    name: str
    served: float = 0.0


FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline", "error"]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation.

    Args:
        role: "system", "user", "assistant", "tool", or another role that the model's chat template knows.
        content: the text; may be empty.
        tool_calls: the calls of an assistant's turn.
        tool_call_id: the id of the call that a tool's turn answers.
        name: the name of the speaker or of the tool.
        reasoning_content: the thinking of an assistant's turn, for templates that show it.
    """

    role: str
    content: str
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class Range(NamedTuple):
    """The allowed values of a parameter, ends included."""

    low: float
    high: float


# Larger counts are mistakes, and do not fit the integers of the native layer.
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
# The ranges that other services document; beyond them a penalty replaces the logits.
MAX_PENALTY = 2.0
MAX_REPETITION = 1e9  # a float32 logit times or by this is still a number


# The levels of OpenAI's and Anthropic's APIs.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Generate text after a prompt; exactly one of `prompt`, `token_ids` and `messages` is set.

    Each of `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` that is None is the value in the model's
    files (`ModelCard.sampling`). Without a value there, the temperature is 0 (greedy) and the others are off.

    Args:
        prompt: text, continued as it is; not empty.
        token_ids: the prompt as token ids, each >= 0 and below the logits' width; at least one.
        messages: a conversation, rendered by the model's chat template; at least one.
        max_tokens: most tokens to generate, >= 1, or 0 with `echo` or `prompt_logprobs`; as many as fit where these are
            fewer, and where it is None.
        temperature: 0 is greedy, otherwise the logits' divisor; finite, >= 0; None is the model's own.
        top_k: draw among the k most likely tokens; 0 is off.
        top_p: draw among the fewest most likely tokens that hold this share, 0 <= top_p <= 1; 0 takes the most
            likely one, 1 is off.
        min_p: draw among tokens at least this fraction as likely as the likeliest, 0 <= min_p <= 1; 0 is off.
        repetition_penalty: divides the logits of tokens seen in prompt or output; 1e-9 to 1e9, 1 is off.
        presence_penalty: taken once from the logits of tokens in the output; -2 to 2, 0 is off.
        frequency_penalty: taken from a token's logit for each time it is in the output; -2 to 2, 0 is off.
        logit_bias: added to the logits of these token ids; -100 to 100.
        seed: makes the draws repeatable; 0 to 2**64 - 1; None draws a seed.
        stop: strings that end the output and are not part of it; no string is empty.
        stop_token_ids: token ids that end the output.
        allowed_token_ids: the only token ids of the output; None allows all. A model's end-of-sequence token is
            not among them unless the list has it.
        bad_words: texts that the output must not contain, as tokens at a word's beginning and within a word.
        min_tokens: the number of tokens before which only `max_tokens` ends the output; >= 0.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: the number of likeliest tokens to report with each generated token; 0 reports only the generated
            token's log-prob, None nothing.
        prompt_logprobs: the same for the prompt's tokens.
        return_prompt_token_ids: report the prompt's token ids.
        truncate_prompt_tokens: keep only this many last tokens of the prompt; >= 1, None keeps all.
        echo: put the prompt in front of the text.
        skip_special_tokens: leave special tokens, such as a chat template's marks, out of the text.
        response_format: the shape of the answer; None is free text. At most one of this, `grammar` and `regex`.
        grammar: a grammar in Lark or in llama.cpp's GBNF that the whole answer matches.
        regex: a regular expression that the whole answer matches.
        tools: functions that the model may call; only with `messages`.
        tool_choice: "none" for free text, "auto" for the model's choice, "required" for at least one call and no text;
            a tool's name for exactly one call of that tool.
        parallel_tool_calls: whether an answer may have several calls.
        reasoning: return thinking apart from the text, for models that think before they answer.
        reasoning_effort: how much to think: "none", "minimal", "low", "medium", "high", "xhigh" or "max". Where the
            chat template knows no effort, it is a budget of thinking. None leaves it to the model.
        max_thinking_tokens: most tokens of thinking, >= 0; then the thinking is ended, and the answer follows. None is
            no limit. It takes effect for templates with known marks around the thinking, such as <think> and </think>.
        chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.
        continue_final_message: continue the last message instead of a new one.
        keep_stop: leave the stop string that ended the output in the text.
        n: the number of answers; each has its own draws.
        priority: smaller numbers are served first; -100 to 100.
        deadline_s: seconds after its arrival at which the request ends with its output so far; > 0; None is no limit.
        cache_ttl_s: seconds for which the prompt may come again, so that the prefix cache drops other texts before it;
            > 0, at most 86,400. A hint: the operator bounds its memory (`kept_prefix_share`). None is no hint.
        tenant: the tenant of the request; prompts are shared within a tenant only.
        model: a name that `models` lists, such as an adapter's; None is the first of them.
        payer: the client of a fleet's gateway; only such a gateway may set it.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    temperature: Annotated[float | None, Range(0, math.inf)] = None
    top_k: Annotated[int | None, Range(0, MAX_COUNT)] = None
    top_p: Annotated[float | None, Range(0, 1)] = None
    min_p: Annotated[float | None, Range(0, 1)] = None
    repetition_penalty: Annotated[float | None, Range(1 / MAX_REPETITION, MAX_REPETITION)] = None
    presence_penalty: Annotated[float, Range(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Range(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_prompt_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: bool = False
    reasoning_effort: Effort | None = None
    max_thinking_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    keep_stop: bool = False
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None
    cache_ttl_s: float | None = None
    tenant: str = ""
    model: str | None = None
    payer: Payer | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the request asks for log-probs of the prompt's tokens."""
        return self.prompt_logprobs is not None

    @property
    def named_tool(self) -> str | None:
        """The name of the tool that must be called; None for no particular tool."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token of a stream.

    Args:
        text: the text that became final; may be empty while a character or a stop string is incomplete.
        token_id: its id.
        index: the number of the token in its choice's output, from 0, without gaps.
        logprob: its natural log-probability, if the request sets `logprobs`.
        choice: the number of its answer, from 0 to n - 1.
        top: the likeliest token ids in its place with their log-probs, likeliest first; their number is `logprobs`.
        reasoning: the thinking that became final, if it is returned apart.
        tool_calls: the pieces of calls that became final.
    """

    text: str
    token_id: int
    index: int
    logprob: float | None = None
    choice: int = 0
    top: dict[int, float] = {}
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-prob of a token, and of the likeliest tokens in its place; natural logarithms.

    Args:
        token_id: the token in the output or in the prompt.
        logprob: its log-prob.
        top: the likeliest token ids with their log-probs, likeliest first.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = {}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: the generated tokens of all choices together.
        cached_tokens: prompt tokens that were already evaluated and needed no prefill.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a request's answers; the fields are those of Result."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    reasoning_tokens: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a generation.

    Args:
        text: the output, without the stop string that ended it.
        token_ids: the generated tokens, including the token that ended the output.
        finish_reason: "stop" (end of sequence or a stop string), "tool_calls" (the same, with calls), "length",
            "deadline", "cancelled" or "error".
        usage: the tokens of the request.
        logprobs: an entry for each token, if the request sets `logprobs`.
        prompt_logprobs: an entry for each token of the prompt, None for the first, if the request sets it. With finish
            reason "deadline", the entries of the evaluated tokens.
        prompt_token_ids: the prompt's token ids, if the request asks for them.
        reasoning: the thinking before the text, if it is returned apart.
        tool_calls: the calls in the answer.
        stop_string: the string of `stop` that ended the output; None for another end.
        reasoning_tokens: the tokens until the end of the thinking; `usage` includes them.
        several: all answers if `n` > 1; the first is also in the fields above. Empty for one answer, so that no text
            is sent twice (ADR 72). Its name on the wire is `choices`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_token_ids: list[int] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    reasoning_tokens: int = 0
    several: tuple[Choice, ...] = msgspec.field(default=(), name="choices")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All answers; there is at least one."""
        return self.several or (Choice(**{name: getattr(self, name) for name in Choice.__struct_fields__}),)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Return the token ids of a text or a conversation; exactly one of `prompt` and `messages` is set.

    Args:
        prompt: text; may be empty.
        messages: a conversation, rendered by the model's chat template; at least one.
        tools, chat_template_kwargs: as `generate` takes them; only with `messages`.
        add_special_tokens: put the start token in front of `prompt`, if the model has one, as `generate` does;
            `messages` have the special tokens of their template.
        return_text: return the text of the prompt, too, in the form of the chat template.
        model: as `generate` takes it.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_text: bool = False
    model: str | None = None


class KeepSessionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keep the KV of a conversation on the service's disk; answered with SessionState.

    Args:
        name: of the session, one for each tenant: letters, digits, ".", "_" and "-". A session of this name is
            replaced.
        messages: the conversation, as it was generated.
        model: as `generate` takes it.
        tenant: as `generate` takes it.
    """

    name: str
    messages: list[Message]
    model: str | None = None
    tenant: str = ""


class ResumeSessionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Load a session that was kept, so that its conversation is not evaluated again; answered with SessionState.

    Args:
        name, model, tenant: those that the session was kept with.
    """

    name: str
    model: str | None = None
    tenant: str = ""


SessionRequest = KeepSessionRequest | ResumeSessionRequest


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a session.

    Args:
        positions: tokens of the conversation with their KV; 0 if the service has none, and then nothing is kept.
        num_bytes: of its file.
    """

    positions: int
    num_bytes: int


# A text or a conversation, with the arguments of the chat template.
PromptRequest = GenerateRequest | TokenizeRequest


class TokenIds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text's token ids.

    Args:
        text: the text itself, if the request asks for it.
    """

    token_ids: list[int]
    text: str | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Return the text of token ids.

    Args:
        token_ids: each >= 0 and below the logits' width; may be empty.
        model: as `generate` takes it.
    """

    token_ids: list[int]
    model: str | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids: special tokens have no text, parts of a character are U+FFFD."""

    text: str


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Embed texts.

    Args:
        input: a text, the token ids of a text, or a list of texts or of lists of token ids; no text is empty.
        encoding_format: the format of each embedding: "float" is a list of numbers, "base64" their bytes as float32 in
            little endian.
        dimensions: the elements to keep of each embedding, for models that are trained for that; None keeps all.
        priority, deadline_s, tenant, model: as in GenerateRequest; a late request fails.
    """

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    model: str | None = None

    @property
    def n(self) -> int:
        """The sequences that the request counts as: its texts follow one another."""
        return 1

    @property
    def texts(self) -> list[str | list[int]]:
        """Return each input by itself, after `validate_embed`."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]  # all elements are
        return self.input  # type: ignore[return-value]  # no element is


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each input, in their order, in the requested format."""

    embeddings: list[list[float] | str]
    usage: Usage


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Score texts by a reranker or a classifier.

    Args:
        documents: the texts, at least one; a document beside a query may be empty.
        query: the text that each document is compared with: one for all documents, or one for each. None scores each
            document by itself.
        instruction: describes relevance, for rerankers with such a field in their prompt; None is the model's own.
        raw_scores: return the numbers of the model's head, without its activation.
        truncate: cut the end of documents that are too long for the model; else they are refused.
        max_document_tokens: most tokens of a document, >= 1; a longer document is cut. None is no limit.
        priority, deadline_s, tenant, model: as in GenerateRequest; a late request fails.
    """

    documents: list[str]
    query: str | list[str] | None = None
    instruction: str | None = None
    raw_scores: bool = False
    truncate: bool = False
    max_document_tokens: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    model: str | None = None

    @property
    def n(self) -> int:
        """The sequences that the request counts as: its texts follow one another."""
        return 1

    @property
    def texts(self) -> list[str]:
        """Return the texts to tokenize: each document with its query."""
        return [f"{query or ''}{document}" for query, document in self.pairs]

    @property
    def pairs(self) -> list[tuple[str | None, str]]:
        """Return each document with its query, after `validate_score`."""
        if isinstance(self.query, list):
            return list(zip(self.query, self.documents, strict=True))
        return [(self.query, document) for document in self.documents]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of each document, in their order: a number for each of the model's labels (`ModelCard.labels`)."""

    scores: list[list[float]]
    usage: Usage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A ranked document.

    Args:
        index: the number of the document in the request, from 0.
        score: its relevance.
    """

    index: int
    score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents by their relevance, the most relevant first; equal scores keep the order of the request."""

    results: list[Ranked]
    usage: Usage


def ranking_of(scores: Scores, top_n: int | None = None) -> Ranking:
    """Return the ranking of scores that have one number each.

    Args:
        top_n: the number of documents to keep; None keeps all.

    Raises:
        InvalidRequest: the model has several labels, or `top_n` is below 1.
    """
    if top_n is not None and top_n < 1:
        raise InvalidRequest("top_n", f"must be at least 1, not {top_n}")
    if any(len(numbers) != 1 for numbers in scores.scores):
        raise InvalidRequest("model", "is a classifier of several labels, which cannot rank documents; call `score`")
    ranked = [Ranked(index=index, score=numbers[0]) for index, numbers in enumerate(scores.scores)]
    ranked.sort(key=lambda document: document.score, reverse=True)
    return Ranking(results=ranked[:top_n], usage=scores.usage)


class DrawnTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens that a choice has drawn, from its first token on.

    Args:
        token_ids: the tokens.
        logprobs: for each token its log-prob and the likeliest tokens' log-probs; empty if not requested.
        call_ids: the ids of the tool calls that were shown.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, dict[int, float]]] = []
    call_ids: list[str] = []


class TokenRecord:
    """The drawn tokens of a choice, kept until its request has ended.

    Args:
        scored: whether the request asks for log-probs.
        drawn: the tokens that were drawn before.
    """

    __slots__ = ("_call_ids", "_logprobs", "_token_ids", "scored")

    def __init__(self, *, scored: bool, drawn: DrawnTokens | None = None) -> None:
        drawn = drawn or DrawnTokens([])
        self.scored = scored
        self._token_ids = array("I", drawn.token_ids)
        self._logprobs = list(drawn.logprobs)
        self._call_ids = list(drawn.call_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token: Token) -> None:
        """Keep the next token; a scored record needs its log-prob."""
        if self.scored:
            assert token.logprob is not None, "a token without a log-prob"
            self._logprobs.append((token.logprob, token.top))
        self._token_ids.append(token.token_id)
        self._call_ids += [piece.id for piece in token.tool_calls if piece.id is not None]

    def drawn(self) -> DrawnTokens:
        """Return all drawn tokens."""
        return DrawnTokens(self._token_ids.tolist(), self._logprobs, self._call_ids)


def replayable(request: GenerateRequest) -> GenerateRequest:
    """Return the request with a seed, so that it has the same draws when it is sent again."""
    if request.seed is not None:
        return request
    return msgspec.structs.replace(request, seed=secrets.randbelow(MAX_SEED + 1))


class ShownTokens:
    """The tokens that a stream has received, from which it continues elsewhere.

    Args:
        request: the stream's request.
        drawn: the tokens of an earlier stream of this request.
    """

    __slots__ = ("_is_whole", "_records", "_request")

    def __init__(self, request: GenerateRequest, drawn: tuple[DrawnTokens, ...] = ()) -> None:
        self._request = request
        scored = request.logprobs is not None
        self._records = {choice: TokenRecord(scored=scored, drawn=record) for choice, record in enumerate(drawn)}
        self._is_whole = True

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def add(self, token: Token) -> None:
        """Keep the next token."""
        scored = self._request.logprobs is not None
        if not 0 <= token.token_id < 2**32 or (scored and token.logprob is None):
            self._is_whole = False  # the service has sent something else than the request asks for
            return
        record = self._records.get(token.choice)
        if record is None:
            record = self._records[token.choice] = TokenRecord(scored=scored)
        record.add(token)

    def drawn(self) -> tuple[DrawnTokens, ...]:
        """Return the tokens of each choice; an empty tuple before the first token.

        Raises:
            Unavailable: the stream cannot continue.
        """
        if not self._is_whole:
            raise Unavailable("the stream was lost, and its tokens do not suffice to continue it")
        if not len(self):
            return ()
        records = [self._records.get(choice) for choice in range(self._request.n)]
        return tuple(DrawnTokens([]) if record is None else record.drawn() for record in records)
