"""Intake: check a request against the model, and make its sequences.

The request's prompt is rendered and tokenized here, on the calling thread; arrivals.py decides when.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any

from genbatch.actors.batcher.beam_search import BeamSearch
from genbatch.actors.batcher.embeddings import NO_TEXT, EmbedIntake, ScoreIntake, TextIntake
from genbatch.actors.batcher.generation import (
    BeamGeneration,
    Generation,
    GenerationRequest,
    Output,
    OutputRules,
    Reading,
)
from genbatch.actors.batcher.messages import BILLING_HEADER, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import HeldPrompt, Prompt
from genbatch.actors.batcher.thinking import Thinking
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.lora import Adapters
from genbatch.nif.runner import LoraAdapter
from genbatch.nif.sampling.constraints import TokenRules
from genbatch.nif.sampling.sampler import Constraint, SamplerState, SamplingParams
from genbatch.nif.text.answer_grammar import Calls, answer_grammar, forced_format, is_json
from genbatch.nif.text.response_template import HARMONY, TemplateReader
from genbatch.nif.text.templates import ChatTemplateError, NothingToContinue, TemplateEnded
from genbatch.nif.text.tokenizer import ChatPrompt
from genbatch.nif.text.tools import AnswerReader, ThinkingTags
from genbatch.proto.errors import InvalidRequest, ModelNotFound, PromptTooLong, QueueFull
from genbatch.proto.messages import (
    DetokenizeRequest,
    EmbedRequest,
    GenerateRequest,
    Message,
    PromptRequest,
    ScoreRequest,
    Tool,
)
from genbatch.proto.validation import (
    Grammar,
    call_arguments,
    grammar_of,
    has_shape,
    holds_to_tools,
    num_characters,
    validate_detokenize,
    validate_request,
    validate_text,
)

MAX_SEED = 2**64
# The sampling parameters of a request, with defaults for values that neither the request nor the model's files set.
SAMPLING_DEFAULTS: dict[str, Any] = {
    each.name: each.default
    for each in fields(SamplingParams)
    if each.name in GenerateRequest.__struct_fields__ and each.name != "seed"
}
# These parameters change the draws or add to them, and a beam search makes no draws.
SAMPLING_PARAMETERS = (
    *(name for name in SAMPLING_DEFAULTS if name != "logprobs"),
    *("stop", "n", "response_format", "grammar", "regex", "tools", "keep_stop"),
    *("reasoning", "reasoning_effort", "max_thinking_tokens", "allowed_token_ids", "bad_words"),
)
_SYSTEM = ("system", "developer")
# The number of first messages with remembered tokens.
MAX_PREFIXES = 64
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
# The approximate number of conversations that are rendered to find the prefix of a first message.
PREFIX_RENDERINGS = 7
# The work of decoding a token, in characters to tokenize.
CHARS_PER_TOKEN = 4
# The delay after which to retry a request with a chat template that was ended for slowness.
RETRY_AFTER_TEMPLATE_MS = 1000


class Intake:
    """Knows the model's vocabulary and template, and the most positions of one sequence.

    Args:
        model: the loaded model.
        options: the Batcher's options.
        max_positions: most positions, prompt and output, of one sequence.
        adapters: the adapters that requests may name as their model; None for none.
    """

    def __init__(
        self, model: Model, options: BatcherOptions, max_positions: int, adapters: Adapters | None = None
    ) -> None:
        self._model = model
        self._adapters = Adapters(model) if adapters is None else adapters
        self._tokenizer = model.tokenizer
        self._thinking = Thinking.of(model)
        self._options = options
        self.max_positions = max_positions
        # Returns the most tokens for which there are blocks. The owner of the KV cache sets it (KVView.longest).
        self.longest: Callable[..., int] = lambda prompt_tokens, width, cap, shares: cap
        self._ids: Iterator[int] = count(1)
        self.of_texts: dict[type, TextIntake[Any]] = {
            EmbedRequest: EmbedIntake(model, options, max_positions, self._ids),
            ScoreRequest: ScoreIntake(model, options, max_positions, self._ids),
        }
        # Finding a prefix renders several conversations, and callers repeat the same first message.
        self._prefixes: dict[tuple[str, str], list[int]] = {}
        self._prefixes_lock = Lock()  # the event loop and the tokenizer's thread use them

    @property
    def generates(self) -> bool:
        """True if the model continues text."""
        return self._model.generates

    def check(self, message: Generate) -> None:
        """Raise InvalidRequest for a fault that is visible without tokenizing."""
        params = message.request
        if not self._model.generates:
            raise InvalidRequest("model", f"{self._model.name} {NO_TEXT}")
        if not message.is_validated:
            limits, is_typed = self._options.limits, bool(message.client)
            validate_request(params, limits, drawn=message.drawn, is_typed=is_typed)
        if params.priority and not self._options.priority_ageing_s:
            raise InvalidRequest("priority", "priorities are off in this service (priority_ageing_s is 0)")
        self._check_length(params)
        self._check_tokens(params.token_ids or ())
        for choice, drawn in enumerate(message.drawn):
            for index, token_id in enumerate(drawn.token_ids):
                self._check_token(token_id, f"drawn[{choice}].token_ids[{index}]")
        for index, token_id in enumerate(params.stop_token_ids):
            self._check_token(token_id, f"stop_token_ids[{index}]")
        for index, token_id in enumerate(params.allowed_token_ids or ()):
            self._check_token(token_id, f"allowed_token_ids[{index}]")
        for token_id in params.logit_bias or ():
            self._check_token(token_id, f"logit_bias[{token_id}]")

    def adapter(self, name: str | None) -> LoraAdapter | None:
        """Return the adapter that the request's model names; None for the model itself.

        Raises:
            ModelNotFound: no model or adapter of this name is served.
        """
        if name is None or name == self._model.name:
            return None
        adapter = self._adapters.find(name)
        if adapter is None:
            served = ", ".join([self._model.name, *(each.name for each in self._adapters.serving())])
            raise ModelNotFound(f"the model {name[:128]!r} is not served here; there is {served}", field="model")
        return adapter

    def _check_length(self, request: GenerateRequest) -> None:
        """Raise PromptTooLong for a text that is certainly too long. This does not use the tokenizer's only thread.

        Of a conversation, it reads the users' messages: every template keeps them, except for surrounding spaces.
        """
        if request.truncate_prompt_tokens is not None:
            return
        user_texts = [message.content.strip() for message in request.messages or () if message.role == "user"]
        for text in (request.prompt or "", *user_texts):
            self._check_text(text, "prompt" if request.messages is None else "messages")

    def _check_text(self, text: str, field: str) -> None:
        if len(text) <= self.max_positions:
            return  # no token is shorter than a quarter of a character
        least = self._tokenizer.least_tokens(text)
        if least > self.max_positions:
            raise PromptTooLong(
                f"a text of {len(text)} characters has {least} tokens at least, and {self.max_positions} fit",
                field=field,
            )

    def check_beams(self, beam_width: int, request: GenerateRequest) -> None:
        """Raise InvalidRequest for a beam search that cannot run as requested."""
        most = min(self._options.n_parallel, self._options.max_batch_tokens)
        if not 1 <= beam_width <= most:
            raise InvalidRequest("beam_width", f"must be at least 1 and at most {most}, not {beam_width}")
        if beam_width == 1:
            return
        if request.max_tokens == 0:
            raise InvalidRequest("max_tokens", "must be at least 1 for a beam search")
        plain = GenerateRequest()
        for name in SAMPLING_PARAMETERS:
            if getattr(request, name) not in (getattr(plain, name), SAMPLING_DEFAULTS.get(name)):
                raise InvalidRequest(name, "a beam search ranks by the model's own log-probabilities")

    def _check_tokens(self, token_ids: ListOf[int]) -> None:
        if token_ids and max(token_ids) >= self._model.vocab_size:  # one pass in C: there may be a million of them
            for index, token_id in enumerate(token_ids):
                self._check_token(token_id, f"token_ids[{index}]")

    def _check_token(self, token_id: int, field: str) -> None:
        # guard: token ids of a request
        if not 0 <= token_id < self._model.vocab_size:
            raise InvalidRequest(field, f"token id {token_id} is outside 0..{self._model.vocab_size - 1}")

    def check_text(self, request: PromptRequest) -> None:
        """Raise InvalidRequest for a fault that is visible without tokenizing."""
        self.adapter(request.model)  # raises for a name that is not served
        validate_text(request, self._options.limits)

    def check_detokenize(self, request: DetokenizeRequest) -> None:
        """Raise InvalidRequest for token ids outside the model's vocabulary."""
        self.adapter(request.model)  # raises for a name that is not served
        validate_detokenize(request)
        self._check_tokens(request.token_ids)

    def size(self, request: GenerateRequest) -> int:
        """Return the number of characters to tokenize."""
        if request.token_ids is not None:
            return CHARS_PER_TOKEN * len(request.token_ids) if request.echo else 0
        size = self.text_size(request)
        if request.messages:
            first = request.messages[0]
            if (first.role, self._content(first)) not in self._prefixes:
                size += PREFIX_RENDERINGS * len(first.content)
        return size

    def text_size(self, request: PromptRequest) -> int:
        """Return the number of characters of a text or of a conversation."""
        if request.messages is None:
            return len(request.prompt or "")
        return num_characters((request.messages, request.tools, request.chat_template_kwargs))

    def start_prompt(self, request: GenerateRequest) -> ChatPrompt | None:
        """Begin to render a request's conversation; return None without one. Safe to run on another thread.

        Raises:
            InvalidRequest: the model has no chat template, or the template cannot be compiled.
        """
        if request.token_ids is not None:
            return None
        tools = request.tools if request.tool_choice != "none" else []
        first = None if request.scores_prompt else self._first_key(request)
        with_others = first is not None and first not in self._prefixes
        return self._start(request, tools, goes_on=request.continue_final_message, with_others=with_others)

    def start_text(self, request: PromptRequest) -> ChatPrompt | None:
        """Begin to render a conversation that is only tokenized; runs and raises as `start_prompt` does."""
        return self._start(request, request.tools, goes_on=False, with_others=False)

    def _start(
        self, request: PromptRequest, tools: ListOf[Tool], *, goes_on: bool, with_others: bool
    ) -> ChatPrompt | None:
        if request.messages is None:
            return None
        turns, offered = [self._turn(message) for message in request.messages], [_offer(tool) for tool in tools]
        with _named_refusals():
            return self._tokenizer.start_prompt(
                turns, offered, self._variables(request), goes_on=goes_on, with_others=with_others
            )

    def read(self, request: GenerateRequest, prompt: ChatPrompt | None) -> Prompt:
        """Tokenize the prompt and the prefix that others may share; safe to run on another thread.

        Args:
            prompt: the rendered result of `start_prompt`.

        Raises:
            InvalidRequest: the prompt is empty, or the chat template refuses it.
            QueueFull: the chat template was ended to make room for other requests.
            PromptTooLong: the rendered conversation does not fit.
        """
        tokens = self._encode(request, prompt)
        if request.truncate_prompt_tokens is not None:
            tokens = tokens[-request.truncate_prompt_tokens :]
        fits = len(tokens) < self.max_positions  # a prompt that does not fit is refused and not remembered
        shares = request.messages and not request.scores_prompt and request.truncate_prompt_tokens is None and fits
        first = self._first_message(request, prompt) if shares else []
        return Prompt(tokens, first, self._echo(request, tokens) if fits else "")

    def _encode(self, request: GenerateRequest, prompt: ChatPrompt | None) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        if prompt is not None:
            with _named_refusals():
                text = prompt.text
            if request.truncate_prompt_tokens is None:
                self._check_text(text, "messages")  # a few words may become a megabyte
            return self._tokenizer.encode_prompt(text)
        assert request.prompt is not None
        tokens = self._tokenizer.encode(request.prompt)
        if not tokens:
            raise InvalidRequest("prompt", "is empty")
        return tokens

    def token_ids(self, text: str, prompt: ChatPrompt | None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a rendered conversation or a text, possibly none; raises and runs as `read` does."""
        if prompt is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        with _named_refusals():
            return self._tokenizer.encode_prompt(prompt.text)

    def detokenize(self, request: DetokenizeRequest) -> str:
        """Return the text of token ids; safe to run on another thread."""
        return self._tokenizer.decode(request.token_ids)

    def _content(self, message: Message) -> str:
        """Return a message's text, without a line that Claude Code writes into system prompts for itself."""
        if not self._options.strip_billing_header or message.role not in _SYSTEM:
            return message.content
        return message.content.partition("\n")[2] if message.content.startswith(BILLING_HEADER) else message.content

    def _turn(self, message: Message) -> dict[str, Any]:
        """Return a message in the form that chat templates take."""
        turn: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        for name in ("name", "reasoning_content"):
            if getattr(message, name) is not None:
                turn[name] = getattr(message, name)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": self._call_id(call.id),
                    "function": {"name": call.name, "arguments": call_arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        return turn

    def _call_id(self, call_id: str) -> str:
        """Return an id that the template accepts: Mistral's templates accept only nine letters and digits."""
        is_mistral = self._tokenizer.tool_format.name.startswith("mistral")
        if not is_mistral or _MISTRAL_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def grammar(self, request: GenerateRequest) -> Grammar | None:
        """Return the grammar of the answers: thinking, then calls or the requested format; None for free answers."""
        shape, calls = grammar_of(request), self._calls(request)
        thinking = self._free_thinking(request)
        if calls is None and thinking is None:
            return shape
        if shape is None and (calls is None or not holds_to_tools(request)):
            return None
        has_format = shape is not None and not (calls is not None and calls.forced)
        text = answer_grammar(calls, self._tokenizer.special_id, has_format=has_format, thinking=thinking)
        most = self._options.limits.max_grammar_bytes
        # guard: size of the tools' schemas
        if calls is not None and len(text) > most:
            raise InvalidRequest("tools", f"their schemas have {len(text)} bytes, {most} are allowed")
        field = "tools" if calls is not None else shape.field if shape is not None else ""
        return Grammar("lark", text, field, shape if has_format else None)

    def _calls(self, request: GenerateRequest) -> Calls | None:
        """Return the tool calls that the answers may contain; None for none."""
        choice = request.tool_choice
        if not request.tools or choice == "none":
            return None
        offered = [tool for tool in request.tools if request.named_tool in (None, tool.name)]
        own = self._tokenizer.tool_format
        # With a response format, calls are constrained to the model's own notation where that is possible. An
        # unreadable call would be text that does not match the format.
        is_written = is_json(own) or self._tokenizer.response_template is not None
        free = not holds_to_tools(request) and not (has_shape(request) and is_written)
        return Calls(
            format=own if free else forced_format(own),
            tools=[{"name": tool.name, "parameters": tool.parameters, "strict": tool.strict} for tool in offered],
            several=request.parallel_tool_calls and request.named_tool is None,
            forced=choice != "auto",
            free=free,
        )

    def _tells_thinking(self, request: GenerateRequest, *, calls: bool) -> bool:
        """Return whether thinking is separated from the text."""
        return (calls or request.reasoning) and request.messages is not None and self._tokenizer.thinks

    def _variables(self, request: PromptRequest) -> dict[str, Any] | None:
        """Return the chat template's variables."""
        return request.chat_template_kwargs if self._thinking is None else self._thinking.variables(request)

    def _free_thinking(self, request: GenerateRequest) -> ThinkingTags | None:
        """Return the tags of thinking that a grammar must allow first; None if it must not.

        A caller's grammar or expression that contains the opening tag describes the thinking itself.
        """
        calls = bool(request.tools) and request.tool_choice != "none"
        tags = self._tokenizer.thinking_tags if self._tells_thinking(request, calls=calls) else None
        if tags is None:
            return None
        described = request.grammar or (request.regex or "").replace("\\", "")
        return None if tags.opens in described else tags

    def reading(self, request: GenerateRequest, prompt_tokens: list[int]) -> Reading | None:
        """Return how to separate calls and thinking from the text; None where the request needs neither."""
        calls = self._calls(request)
        thinks = self._tells_thinking(request, calls=calls is not None)
        if not (calls or thinks):
            return None
        template, offered = self._tokenizer.response_template, [_offer(tool) for tool in request.tools]
        names_channels = "<|channel|>" in (request.grammar or request.regex or "").replace("\\", "")
        if template is HARMONY and calls is None and has_shape(request) and not names_channels:
            return None  # the grammar allows no channel marks beside the format
        if template is not None and (calls is None or calls.free):
            prompt = self._tokenizer.decode(prompt_tokens, skip_special_tokens=False)
            by_template = partial(TemplateReader, template, prompt, offered if calls else [])
            return Reading(by_template, self._tokenizer.response_marks, request.parallel_tool_calls)
        tags = self._tokenizer.thinking_tags if thinks else None
        marks = (*(calls.format.marks if calls else ()), *(tags[:2] if tags else ()))
        has_branches = calls is not None and not calls.forced and has_shape(request)
        reader = partial(
            AnswerReader,
            calls.format if calls else None,
            offered,
            thinking=tags,
            starts_thinking=tags is not None and self._thinking is not None and self._thinking.opens(prompt_tokens),
            begins=calls.beginnings if calls and has_branches else (),
        )
        return Reading(reader, self._tokenizer.special_ids_in("".join(marks)), request.parallel_tool_calls)

    def _first_key(self, request: GenerateRequest) -> tuple[str, str] | None:
        """Return a key for the first message; None if the shared prefix depends on more than this message."""
        if not request.messages or request.tools or self._variables(request):
            return None
        return request.messages[0].role, self._content(request.messages[0])

    def _first_message(self, request: GenerateRequest, prompt: ChatPrompt | None) -> list[int]:
        key = self._first_key(request)
        if key is None or prompt is None:
            return []
        return self._prefix_of(key, prompt)

    def system_prompt(self, content: str) -> list[int]:
        """Return the tokens that every conversation with this system message starts with."""
        return self._prefix_of(("system", content), None)

    def _prefix_of(self, key: tuple[str, str], prompt: ChatPrompt | None) -> list[int]:
        """Return the tokens that all conversations with one first message share.

        Args:
            prompt: a rendering that includes other conversations, unless the prefix was known when it began.
        """
        with self._prefixes_lock:
            prefix = self._prefixes.pop(key, None)
        if prefix is None and prompt is not None and prompt.num_others:
            prefix = self._tokenizer.common_prefix(prompt.others)
        elif prefix is None:
            prefix = self._tokenizer.template_prefix([{"role": key[0], "content": key[1]}])
        with self._prefixes_lock:
            self._prefixes[key] = prefix  # the most recently used key is the last
            if len(self._prefixes) > MAX_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
        return prefix

    def held_prompt(self, tokens: list[int], key: bytes, adapter: LoraAdapter | None = None) -> HeldPrompt:
        """Return a prompt to hold, as a unit of scheduling."""
        request_id = next(self._ids)
        # One token to generate, which is never drawn, makes the length at completion equal the prompt's.
        return HeldPrompt(
            request_id=request_id,
            arrival=request_id,
            num_prompt_tokens=len(tokens),
            max_new_tokens=1,
            tokens=tokens,
            key=key,
            adapter=adapter,
        )

    def max_tokens(self, request: GenerationRequest) -> int:
        """Return the most tokens to generate: the requested number, or the number that fits.

        Other requests' blocks do not reduce this number. Configured prompts, which always stay, reduce it.

        Raises:
            PromptTooLong: no token fits after the prompt.
        """
        params, num_prompt = request.params, len(request.prompt_tokens)
        longest = self.longest(
            request.prompt_tokens,
            request.beam_width,
            self.max_positions,
            shares=not request.scores_prompt and request.adapter is None,
        )
        holds = f"the context holds {self.max_positions}"
        if longest < self.max_positions:
            holds = f"the KV cache has room for {longest} of one request"
        room = longest - num_prompt
        # guard: the prompt fits
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens, {holds} including at least one to generate",
                field=_prompt_field(params),
            )
        # guard: the answer fits
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def start(self, request: GenerationRequest, prompt: Prompt) -> None:
        """Give a request its prompt and its sequences.

        Raises:
            PromptTooLong: there is no room for a token after the prompt.
        """
        request.prompt_tokens, request.first_message, request.echo = prompt.tokens, prompt.first_message, prompt.echo
        if request.params.scores_prompt:
            request.prompt_logprobs = [None]  # no logits precede the first token
        request.sequences = [*self.sequences(request, self.max_tokens(request))]

    def sequences(self, request: GenerationRequest, max_tokens: int) -> list[Generation]:
        """Return the request's `n` sequences; those after the first share the first one's prompt."""
        params = request.params
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._model.eos_token_ids
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        rules = OutputRules(
            stop=params.stop,
            stop_ids=stop_ids,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            echo=request.echo,
            wants_logprobs=params.logprobs is not None,
            keep_stop=params.keep_stop,
            shown=frozenset() if params.skip_special_tokens else self._tokenizer.special_ids,
            reading=self.reading(params, request.prompt_tokens),
        )
        thinking = self._thinking
        if thinking is not None and request.constraints and self._free_thinking(params):
            opening = thinking.opening() if thinking.opens(request.prompt_tokens) else ()
            for constraint in request.constraints:  # the constraint begins where the answer begins
                for token_id in opening:
                    constraint.accept(token_id)
        digest = "" if request.adapter is None else request.adapter.digest
        sequences: list[Generation] = []
        for choice in range(params.n):
            request_id = next(self._ids)
            sampling = self._sampling(request, (seed + choice) % MAX_SEED, stop_ids)
            make: Callable[..., Generation] = Generation
            if request.beam_width > 1:
                search = BeamSearch(request.beam_width, stop_ids, max_tokens)
                sampler = SamplerState(replace(sampling, logprobs=search.num_candidates), ())
                make = partial(BeamGeneration, search=search, width=request.beam_width)
            else:
                own = self._token_rules(params, request.constraints[choice] if request.constraints else None)
                if thinking is not None:
                    own = thinking.constraint(params, request.prompt_tokens, max_tokens, own)
                sampler = SamplerState(sampling, request.prompt_tokens, own)
            sequence = make(
                request_id=request_id,
                arrival=request_id,
                num_prompt_tokens=len(request.prompt_tokens),
                max_new_tokens=max(max_tokens, 1),  # with max_tokens 0, one token is drawn with the prompt and dropped
                priority=params.priority,
                # guard: ageing
                turn=request.accepted_at + params.priority * self._options.priority_ageing_s,
                account=request.account if self._options.fair_share else "",
                tokens=list(request.prompt_tokens),
                request=request,
                choice=choice,
                adapter=request.adapter,
                # guard: tenant in the key
                # guard: adapter in the key
                cache_key=prefix_key(params.tenant, digest),
                scores_prompt=request.scores_prompt and choice == 0,
                output=Output(self._tokenizer.backend, request.prompt_tokens, rules),
                sampler=sampler,
            )
            if sequences:
                sequence.donor = sequences[0]
                sequence.num_shared = len(request.prompt_tokens) - 1
            sequences.append(sequence)
        return sequences

    def _token_rules(self, request: GenerateRequest, inner: Constraint | None) -> Constraint | None:
        """Return the constraint by token ids around another one; `inner` itself for a request without such rules."""
        if request.allowed_token_ids is None and not request.bad_words:
            return inner
        bad = {
            tuple(self._tokenizer.encode(space + text.strip(), add_special_tokens=False))
            for text in request.bad_words
            for space in ("", " ")
        }
        words = -(-self._model.vocab_size // 32)
        return TokenRules(request.allowed_token_ids, sorted(filter(None, bad)), words, inner)

    def _echo(self, request: GenerateRequest, tokens: list[int]) -> str:
        if not request.echo:
            return ""
        is_whole = request.prompt is not None and request.truncate_prompt_tokens is None
        return request.prompt or "" if is_whole else self._tokenizer.decode(tokens)

    def _sampling(self, request: GenerationRequest, seed: int, stop_ids: frozenset[int]) -> SamplingParams:
        params = request.params
        # A beam search draws nothing: it ranks by the model's own log-probabilities.
        own = {} if request.beam_width > 1 else self._model.sampling
        drawn = {}
        for name, default in SAMPLING_DEFAULTS.items():
            value = getattr(params, name)
            if value is None:
                value = own.get(name, default)
            drawn[name] = value if default is None else type(default)(value)
        if drawn["top_p"] == 0:  # OpenAI's API takes 0 as greedy
            drawn |= {"temperature": 0.0, "top_p": 1.0}
        return SamplingParams(seed=seed, suppress=stop_ids, **drawn)


@contextmanager
def _named_refusals() -> Iterator[None]:
    """Raise a chat template's refusal as the error for the client."""
    try:
        yield
    except TemplateEnded as error:
        raise QueueFull(str(error), retry_after_ms=RETRY_AFTER_TEMPLATE_MS) from error
    except NothingToContinue as error:
        raise InvalidRequest("continue_final_message", str(error)) from error
    except ChatTemplateError as error:
        raise InvalidRequest("messages", str(error)) from error


def _offer(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form that chat templates take."""
    parameters = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _prompt_field(request: GenerateRequest) -> str:
    if request.messages is not None:
        return "messages"
    return "token_ids" if request.token_ids is not None else "prompt"
