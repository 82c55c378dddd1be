"""What travels: a generation's request, its tokens and its result; and beside generations token ids and text, which
model is served, and how the service is.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from genbatch.proto.errors import InvalidRequest


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of an answer.

    Args:
        type: "text" is any; "json_object" one JSON object; "json_schema" JSON that validates against `schema`.
        schema: the JSON Schema, as an object or as its JSON text; only with "json_schema".
    """

    type: Literal["text", "json_object", "json_schema"]
    # A schema has no type but JSON's own; `grammar_of` is the only reader.
    schema: dict[str, Any] | str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the caller offers.

    Args:
        name: 1 to 64 letters, digits, "_", "-" and "."; no two tools of a request have the same.
        description: what it does, for the model.
        parameters: a JSON Schema of its arguments, an object; None is a function without any.
        strict: every call of it has arguments that validate.
    """

    name: str
    description: str | None = None
    # A schema has no type but JSON's own.
    parameters: dict[str, Any] | None = None
    strict: bool = False


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the model asks for.

    Args:
        id: names it in the answer that the caller sends back.
        name: the tool's name, as the model wrote it.
        arguments: the arguments as JSON, as the model wrote them: without `strict`, or where the output ended early,
            they may be invalid.
    """

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a call in a stream; the pieces of one `index` joined are the call.

    Args:
        index: which call of its choice, from 0.
        id, name: given in a call's first piece.
        arguments: the JSON text that follows.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Payer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whom a fleet's gateway asks for.

    Args:
        name: the client's, the same at every replica; 1 to 256 characters.
        served: weighted tokens that it had of other replicas since the gateway last told this one; finite, >= 0.
    """

    name: str
    served: float = 0.0


FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline", "error"]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation.

    Args:
        role: who speaks: "system", "user", "assistant", "tool", or what else the model's chat template knows.
        content: what was said; may be empty.
        tool_calls: the calls that an assistant's turn asked for.
        tool_call_id: which call a tool's turn answers.
        name: the speaker's, or the tool's.
        reasoning_content: what an assistant's turn thought first; templates that know it show it.
    """

    role: str
    content: str
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class Range(NamedTuple):
    """Which values of a parameter are taken: from `low`, or above `low`, to `high`."""

    low: float
    high: float
    above: bool = False


# Counts beyond this are mistakes, and would not fit the integers of the native layer.
MAX_COUNT = 2**31 - 1
# The ranges other services document; beyond them logits are drowned, not biased.
MAX_PENALTY = 2.0
MAX_REPETITION = 1e9  # a float32 logit times or by this is still a number


# The levels of OpenAI's and Anthropic's APIs.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to generate; exactly one of `prompt`, `token_ids` and `messages` is given.

    Each of `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` that is None is the value in the model's
    files (`ModelCard.sampling`). Where these say nothing, the answer is greedy and the others are off.

    Args:
        prompt: text, continued as it is; not empty.
        token_ids: the prompt as token ids, each >= 0 and below the logits' width; at least one.
        messages: a conversation, rendered by the model's chat template; at least one.
        max_tokens: most tokens to generate, >= 1, or 0 with `echo` or `prompt_logprobs`; as many as fit where these are
            fewer, and where it is None.
        temperature: 0 is greedy, otherwise the logits' divisor; finite, >= 0; None is the model's own.
        top_k: draw among the k most likely tokens; 0 is off.
        top_p: draw among the fewest most likely tokens that hold this share, 0 < top_p <= 1; 1 is off.
        min_p: draw among tokens at least this fraction as likely as the likeliest, 0 <= min_p <= 1; 0 is off.
        repetition_penalty: divides the logits of tokens seen in prompt or output; 1e-9 to 1e9, 1 is off.
        presence_penalty: taken once from the logits of tokens in the output; -2 to 2, 0 is off.
        frequency_penalty: taken from a token's logit for each time it is in the output; -2 to 2, 0 is off.
        logit_bias: added to the logits of these token ids; -100 to 100.
        seed: makes the draws repeatable; 0 to 2**64 - 1; None draws one.
        stop: strings that end the output and are not part of it; none of them empty.
        stop_token_ids: token ids that end the output.
        allowed_token_ids: token ids of which the output consists; None allows all. A model's end-of-sequence token is
            not among them unless the list has it.
        bad_words: texts that the output does not contain, as their tokens at a word's beginning and within a word.
        min_tokens: tokens before which nothing but `max_tokens` ends the output; >= 0.
        ignore_eos: go on after the model's end-of-sequence tokens.
        logprobs: how many of the likeliest tokens to report with each generated one; 0 reports only the generated
            one's log-prob, None nothing.
        prompt_logprobs: the same for the prompt's tokens.
        return_prompt_token_ids: report the prompt's token ids.
        truncate_prompt_tokens: keep the last tokens of the prompt, at most so many; >= 1, None keeps all.
        echo: put the prompt in front of the text.
        skip_special_tokens: leave special tokens, such as a chat template's marks, out of the text.
        response_format: the shape of the answer; None is free text. At most one of this, `grammar` and `regex`.
        grammar: a Lark grammar, or one in llama.cpp's GBNF, that the whole answer matches.
        regex: a regular expression that the whole answer matches.
        tools: functions that the model may ask for; only with `messages`.
        tool_choice: "none" is free text, "auto" leaves it to the model, "required" at least one call and no text; a
            tool's name is exactly one call of it.
        parallel_tool_calls: whether an answer may have several calls.
        reasoning: tell thinking apart from the text, for templates whose models think before they answer.
        reasoning_effort: how much to think: "none", "minimal", "low", "medium", "high", "xhigh" or "max". Where the
            chat template knows no effort, it is a budget of thinking. None leaves it to the model.
        max_thinking_tokens: most tokens of thinking, >= 0; then the thinking is ended, and the answer follows. None is
            no limit. It takes effect for templates with known marks around the thinking, such as <think> and </think>.
        chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.
        continue_final_message: go on with the last message instead of a new one.
        keep_stop: leave the stop string that ended the output in the text.
        n: how many answers; each has its own draws.
        priority: smaller is served first, -100 to 100.
        deadline_s: seconds from its arrival after which the request ends with what it has; > 0, None is none.
        tenant: in whose name; prompts are shared within a tenant only.
        model: a name that `models` lists, such as an adapter's; None is the first of them.
        payer: whom a fleet's gateway asks for; nobody else may say so.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    temperature: Annotated[float | None, Range(0, math.inf)] = None
    top_k: Annotated[int | None, Range(0, MAX_COUNT)] = None
    top_p: Annotated[float | None, Range(0, 1, above=True)] = None
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
    # Their types are the template's.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    keep_stop: bool = False
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    model: str | None = None
    payer: Payer | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of the prompt's tokens are asked for."""
        return self.prompt_logprobs is not None

    @property
    def named_tool(self) -> str | None:
        """The name of the one tool that must be called."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token of a stream.

    Args:
        text: the text that became final with it; may be empty, while a character or a stop string is incomplete.
        token_id: its id.
        index: its place in its choice's output, from 0, without gaps.
        logprob: its natural log-probability, where `logprobs` was asked for.
        choice: which of the `n` answers it belongs to, from 0.
        top: the likeliest token ids in its place with their log-probs, likeliest first, as many as `logprobs` says.
        reasoning: the thinking that became final with it, where that is told apart.
        tool_calls: what became final of calls with it.
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
    """The log-prob of one token and of the likeliest ones in its place, natural logarithms.

    Args:
        token_id: the token that is there.
        logprob: its log-prob.
        top: the likeliest token ids with their log-probs, likeliest first.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = {}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request took.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated, of all choices together.
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
    """What a request ends with.

    Args:
        text: the output, without the stop string that ended it.
        token_ids: the tokens generated, the one that ended the output included.
        finish_reason: "stop" (end of sequence or a stop string), "tool_calls" (the same, with calls), "length",
            "deadline", "cancelled" or "error".
        usage: tokens that it took.
        logprobs: one a token, where asked for.
        prompt_logprobs: one a token of the prompt, None for the first, where asked for. With finish reason "deadline"
            those that were evaluated by then.
        prompt_token_ids: the prompt's token ids, where asked for.
        reasoning: the thinking before the text, where that is told apart.
        tool_calls: the calls that the model asks for.
        stop_string: the one of `stop` that ended the output, if one did.
        reasoning_tokens: tokens until the thinking ended, where that is told apart; among those of `usage`.
        several: all answers when `n` > 1, of which the first is also above; otherwise empty, so that no text travels
            twice (ADR 72). Its name on the wire is `choices`.
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
        """All answers, at least one."""
        return self.several or (Choice(**{name: getattr(self, name) for name in Choice.__struct_fields__}),)


HealthStatus = Literal["ready", "draining", "stuck", "down"]


class HelloRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client's introduction; the first message on a connection whose service asks for a token.

    Args:
        token: who calls, where that is asked for.
    """

    token: str | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A service's introduction.

    Args:
        methods: what it can be asked.
        tenant: in whose name the caller's requests are served; None where no token or key is asked for.
        version: the wire's, which grows when older clients cannot go on. Release 0.1.0 does not say it, and has 1.
        stream_options: names of the options that a stream may have. Release 0.1.0 does not say them, and has two.
    """

    methods: tuple[str, ...]
    tenant: str | None = None
    version: int = 1
    stream_options: tuple[str, ...] = ("credit", "coalesce")


class ModelsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the models that are served; answered with Models."""


class HealthRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tell how the service is; answered with Health."""


class StatsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report the counters; answered with a dict."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to make token ids of; exactly one of `prompt` and `messages` is given.

    Args:
        prompt: text; may be empty.
        messages: a conversation, rendered by the model's chat template; at least one.
        tools, chat_template_kwargs: as `generate` takes them; only with `messages`.
        add_special_tokens: put the start token in front of `prompt`, if the model wants one, as `generate` does;
            `messages` have those of their template.
        return_text: report the text of the prompt too, as the chat template wrote it.
        model: as `generate` takes it.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_text: bool = False
    model: str | None = None


# A text or a conversation, with what the chat template takes beside it.
PromptRequest = GenerateRequest | TokenizeRequest


class TokenIds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text's token ids.

    Args:
        text: the text itself, where asked for.
    """

    token_ids: list[int]
    text: str | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token ids to make text of.

    Args:
        token_ids: each >= 0 and below the logits' width; may be none.
        model: as `generate` takes it.
    """

    token_ids: list[int]
    model: str | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids; special tokens stand for no text, parts of a character for U+FFFD."""

    text: str


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Texts to make embeddings of.

    Args:
        input: a text, the token ids of one, or a list of texts or of lists of token ids; nothing of it empty.
        encoding_format: how each embedding is written: "float" is a list of numbers, "base64" their bytes as float32 in
            little endian.
        dimensions: elements of each embedding, where the model was trained to have some cut off; None is all.
        priority, deadline_s, tenant, model: as GenerateRequest's; an embedding that is late is none.
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
        """What it counts as where sequences are counted: its texts follow one another."""
        return 1

    @property
    def texts(self) -> list[str | list[int]]:
        """Each input by itself, once `validate_embed` has seen it."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]  # all of them are
        return self.input  # type: ignore[return-value]  # none of them is


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each input, in their order, written as was asked."""

    embeddings: list[list[float] | str]
    usage: Usage


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Texts to score by a reranker or a classifier.

    Args:
        documents: the texts, at least one; a document beside a query may be empty.
        query: what each document is compared with: one text for all of them, or one for each. None scores each document
            by itself.
        instruction: what makes a document relevant, for rerankers whose prompt has a place for it; None is the model's
            own.
        raw_scores: give the numbers of the model's head, without its activation.
        truncate: cut the end of documents that are too long for the model; else such a document is refused.
        max_document_tokens: tokens of a document at most, >= 1; the end of a longer one is cut. None is no bound.
        priority, deadline_s, tenant, model: as GenerateRequest's; a score that is late is none.
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
        """What it counts as where sequences are counted: its texts follow one another."""
        return 1

    @property
    def texts(self) -> list[str]:
        """What is read, a document with its query."""
        return [f"{query or ''}{document}" for query, document in self.pairs]

    @property
    def pairs(self) -> list[tuple[str | None, str]]:
        """Each document with its query, once `validate_score` has seen them."""
        if isinstance(self.query, list):
            return list(zip(self.query, self.documents, strict=True))
        return [(self.query, document) for document in self.documents]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of each document, in their order: a number for each of the model's labels (`ModelCard.labels`)."""

    scores: list[list[float]]
    usage: Usage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place among the others.

    Args:
        index: which of the documents it is, from 0.
        score: its relevance.
    """

    index: int
    score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents by their relevance, the most relevant first; those of one score in the order of the request."""

    results: list[Ranked]
    usage: Usage


def ranking_of(scores: Scores, top_n: int | None = None) -> Ranking:
    """The ranking of scores that have one number each.

    Args:
        top_n: how many documents are kept; None: all.

    Raises:
        InvalidRequest: the model has several labels, so it ranks nothing, or `top_n` is below 1.
    """
    if top_n is not None and top_n < 1:
        raise InvalidRequest("top_n", f"must be at least 1, not {top_n}")
    if any(len(numbers) != 1 for numbers in scores.scores):
        raise InvalidRequest("model", "is a classifier of several labels, which ranks no documents: ask for its scores")
    ranked = [Ranked(index=index, score=numbers[0]) for index, numbers in enumerate(scores.scores)]
    ranked.sort(key=lambda one: one.score, reverse=True)
    return Ranking(results=ranked[:top_n], usage=scores.usage)


ModelState = Literal["loaded", "loading", "unloaded", "failed"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served.

    Args:
        id: its name.
        n_ctx: most positions, prompt and output together, of one request.
        n_parallel: sequences generated at once.
        vocab_size: width of the logits; token ids are below it.
        dtype: of the weights before any quantising, such as "float32".
        quantize: "none", or how the weights are quantised.
        runner: what evaluates it.
        device: where, such as "cpu" or "cuda:0".
        embedding_size: elements of its embeddings; None where it gives none.
        generates: whether it continues text.
        labels: the names of its scores; empty where it scores nothing.
        sampling: how its makers say to draw, by the names of GenerateRequest; requests that do not say it draw so.
        parent: the model that it adapts, where it is an adapter; None where it is a model by itself.
        thinks: whether `reasoning_effort` and `max_thinking_tokens` have an effect.
        state: "loaded"; "unloaded", "loading" or "failed" where models are loaded on demand. Until its first load the
            numbers of such a model are 0 and its texts empty.
    """

    id: str
    n_ctx: int
    n_parallel: int
    vocab_size: int
    dtype: str
    quantize: str
    runner: str
    device: str
    embedding_size: int | None = None
    generates: bool = True
    labels: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    parent: str | None = None
    thinks: bool = False
    state: ModelState = "loaded"


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are served."""

    models: tuple[ModelCard, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the service is.

    Args:
        status: "ready"; "draining": no new requests are taken; "stuck": work is pending and no step has ended for
            too long; "down": the engine does not answer, and the counts are not known.
        steps: steps since the start.
        requests_running: sequences that have a slot.
        requests_waiting: sequences that wait for one.
        stalled_s: seconds since there was progress or nothing to do.
    """

    status: HealthStatus
    steps: int
    requests_running: int
    requests_waiting: int
    stalled_s: float


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve an adapter, too.

    Args:
        name: what requests will name as their model.
        path: its directory on the service's machine, absolute.
    """

    name: str
    path: str


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve an adapter no longer: new requests are refused, accepted ones end.

    Args:
        name: its name.
        timeout_s: seconds after which those still open are cancelled; >= 0.
    """

    name: str
    timeout_s: float = 30.0


class LoadModelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Load a model that is loaded on demand, and set how long it stays loaded without requests.

    Args:
        model: as `generate` takes it.
        keep_alive: seconds without requests after which the model is unloaded. A negative number keeps it. 0 unloads it
            once it has no open request. None leaves the time as it is.
    """

    model: str | None = None
    keep_alive: float | None = None


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take no new requests and let the accepted ones end.

    Args:
        timeout_s: seconds after which those still open are cancelled; >= 0.
    """

    timeout_s: float = 30.0


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Every accepted request, or every one with an adapter that was unloaded, has ended.

    Args:
        num_cancelled: requests that had to be cancelled.
    """

    num_cancelled: int
