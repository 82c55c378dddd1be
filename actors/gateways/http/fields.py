"""Fields: which fields of an HTTP body are used, accepted, ignored and refused (ADR 34).

A field of OpenAI's, Anthropic's or vLLM's API is of one of these kinds:

    used      a field of the endpoint's Struct: its value is checked, and the answer follows it
    accepted  a name, a label or a bill: every answer is the same with it and without it
    a hint    a wish that this service cannot fulfil: the field is ignored, and the response names it
    refused   the answer would be another one: InvalidRequest with the field's path

A field that no API has published is ignored and named as a hint is. In strict mode such a field is refused. `null` is
the same as not given.

Efforts and budgets of thinking have other names in each API; ThinkingParams reads them all:

    OpenAI                reasoning_effort, reasoning.effort
    Anthropic             thinking {type, budget_tokens}, output_config.effort
    vLLM, Qwen            thinking_token_budget, thinking_budget, enable_thinking
    OpenRouter            reasoning {effort, max_tokens, enabled}
    Ollama                think

All of them become `reasoning_effort` and `max_thinking_tokens` of a GenerateRequest.
"""

import re
from collections.abc import Container
from typing import Any, TypeVar, get_args

import msgspec

from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Effort
from genbatch.proto.validation import check_type

Body = TypeVar("Body", bound=msgspec.Struct)

# The tables have paths without indexes. "*." in front of a name means: at any depth.
ACCEPTED = frozenset(
    (
        *("metadata", "user", "safety_identifier", "store", "client_metadata", "request_id", "rid"),
        *("betas", "anthropic_version", "container", "max_tool_calls", "stream_options.include_obfuscation"),
        # An answer's turn comes back with them.
        *("messages.annotations", "messages.content.annotations", "messages.tool_calls.index", "messages.name"),
        *("input.id", "input.status", "input.phase", "input.summary", "input.encrypted_content"),
        *("input.content.annotations", "input.content.logprobs", "messages.content.signature"),
        *("messages.content.citations", "system.citations", "messages.content.caller"),
        # How a tool's arguments are streamed, and how a schema is called.
        *("tools.eager_input_streaming", "response_format.json_schema.name", "text.format.name"),
    )
)
HINTS = frozenset(
    (
        *("*.cache_control", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("context_management", "reasoning_effort", "verbosity", "prediction", "reasoning", "thinking", "speed"),
        *("output_config.task_budget", "reasoning.summary", "reasoning.exclude"),
        *("reasoning.generate_summary", "text.verbosity", "thinking.display"),
        *("options.num_ctx", "options.num_batch", "options.num_gpu", "options.main_gpu", "options.num_thread"),
        *("options.use_mmap", "options.use_mlock", "options.numa", "options.num_keep", "options.repeat_last_n"),
        *(
            "options.penalize_newline",
            "options.low_vram",
            "options.f16_kv",
            "truncate",
            "shift",
            "keep_alive",
            "verbose",
        ),
        # llama.cpp's server
        *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "t_max_predict_ms"),
        *("n_indent", "return_tokens", "return_progress", "timings_per_token", "repeat_last_n"),
        *("samplers", "min_keep", "post_sampling_probs"),
        *("inference_geo", "mcp_servers", "tools.defer_loading", "tools.input_examples", "tools.allowed_callers"),
    )
)
# Without these the answer is another one; each with the reason.
REFUSED = {
    "functions": "is the old name of tools",
    "function_call": "is the old name of tool_choice",
    "rank_fields": "documents are ranked by their text",
    "audio": "only text can be generated",
    "modalities": "only text can be generated",
    "web_search_options": "the web cannot be searched",
    "use_beam_search": "beam search is not supported over HTTP",
    "conversation": "conversations are not stored: send the messages, or previous_response_id",
    "messages.audio": "only text is understood",
    "messages.images": "only text is understood",
    "messages.refusal": "is not text of the answer: send it as content",
    "messages.function_call": "is the old name of tool_calls",
}
# Values at which a field of the other tables asks for nothing.
_NOTHING: tuple[object, ...] = ([], {}, "", "none", "auto", False, ["text"])
# Fields of other servers that ask for nothing at these values; at any other they are refused by name.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n_probs": (0,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "options.typical_p": (1, 1.0),
    "options.tfs_z": (1, 1.0),
    "options.mirostat": (0,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "best_of": (1,),
    "spaces_between_special_tokens": (True, False),
    "add_special_tokens": (True, False),
    "echo": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "cache_salt": ("",),
    "ebnf": (),
    "lora_path": (),
    "session_params": ({},),
    "return_hidden_states": (False,),
    "data_parallel_rank": (),
    "stop_regex": ([],),
    "return_cached_tokens_details": (False,),
    "return_routed_experts": (False,),
    "stream_reasoning": (True, False),
}
# The response header that names what was ignored. Names come from the client, so their number, length and letters
# are bounded.
HEADER = "x-ignored-fields"
MAX_NAMED, MAX_NAME_LENGTH = 32, 80
_INDEX = re.compile(r"\[\d+\]")
_NO_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)


class Fields:
    """Reads the fields of one body, and remembers the names of those that it ignores.

    Args:
        strict: whether a field that no API has published is refused.
        elsewhere: fields of other endpoints. Here they would be without effect, so they are refused.
    """

    def __init__(self, *, strict: bool = False, elsewhere: Container[str] = ()) -> None:
        self._strict = strict
        self._elsewhere = elsewhere
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths of the ignored fields, without their indexes: `messages[].content[].cache_control`."""
        return tuple(self._ignored)

    @property
    def headers(self) -> dict[str, str]:
        """The response's header about them; none where nothing was ignored."""
        return {HEADER: ", ".join(self._ignored)} if self._ignored else {}

    def read(self, body: dict[str, Any], kind: type[Body]) -> Body:
        """The body as a Struct.

        Raises:
            InvalidRequest: with the path of the first fault.
        """
        made: Body = check_type(self._known(body, kind, ""), kind)
        return made

    def take(self, body: dict[str, Any], names: Container[str], path: str) -> dict[str, Any]:
        """The fields of `body` that have these names and a value; raises as `read`.

        Args:
            path: of `body` itself, "" for the whole one.
        """
        found = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in names:
                found[name] = value
            else:
                self._leave(f"{path}.{name}" if path else name, value)
        return found

    def ignore(self, path: str) -> None:
        """Names a part of the body that has no effect."""
        if len(self._ignored) < MAX_NAMED:
            self._ignored[_NO_NAME.sub("?", _INDEX.sub("[]", path))[:MAX_NAME_LENGTH]] = None

    def _known(self, body: dict[str, Any], kind: type[msgspec.Struct], path: str) -> dict[str, Any]:
        """The fields of `kind` in `body`, and of Structs within it."""
        found = self.take(body, kind.__struct_fields__, path)
        for field in msgspec.structs.fields(kind):
            inner = next((each for each in get_args(field.type) if _is_struct(each)), None)
            if inner is not None and isinstance(found.get(field.name), dict):
                place = f"{path}.{field.name}" if path else field.name
                found[field.name] = self._known(found[field.name], inner, place)
        return found

    def _leave(self, path: str, value: object) -> None:
        """Judges a field that the endpoint does not use."""
        plain = _INDEX.sub("", path)
        if plain in ACCEPTED:
            return
        if plain in NEUTRAL:
            if value not in NEUTRAL[plain]:
                raise InvalidRequest(path, f"is not supported at this value: {value!r:.60}")
            return
        is_hint = plain in HINTS or f"*.{plain.rpartition('.')[2]}" in HINTS
        is_known = is_hint or plain in REFUSED or plain in self._elsewhere
        if is_known and value in _NOTHING:
            return
        if plain in REFUSED:
            raise InvalidRequest(path, REFUSED[plain])
        if not is_hint and plain in self._elsewhere:
            raise InvalidRequest(path, "is a field of another endpoint, and would be without effect")
        if not is_hint and self._strict:
            raise InvalidRequest(path, "is a field of no API that is served here (http_strict)")
        self.ignore(path)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


EFFORT_NAMES = get_args(Effort)


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's `thinking`.

    Args:
        type: "disabled" for no thinking; "enabled" or "adaptive" for some.
        budget_tokens: most tokens of it.
    """

    type: str
    budget_tokens: int | None = None


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `reasoning`, and OpenRouter's.

    Args:
        effort: one of `EFFORT_NAMES`.
        max_tokens: most tokens of thinking.
        enabled: whether to think at all.
    """

    effort: Any = None
    max_tokens: int | None = None
    enabled: bool | None = None


class ThinkingParams:
    """Collects the parameters of one body; a field that is None is not given.

    Args:
        reader: remembers which fields are ignored.
    """

    def __init__(self, reader: Fields) -> None:
        self.names: dict[str, str] = {}  # the caller's names, by ours
        self.asked: list[str] = []  # fields without effect for a model that does not think
        self._reader = reader
        self._params: dict[str, Any] = {}
        self._is_off = self._is_on = False

    def effort(self, path: str, effort: object) -> None:
        """Set the effort. A value that no API has published is ignored and named."""
        if effort is None:
            return
        if effort not in EFFORT_NAMES:
            self._reader.ignore(path)
            return
        self._set("reasoning_effort", effort, path)
        if effort != "none":
            self.asked.append(path)

    def budget(self, path: str, budget: int | None) -> None:
        """Set the most tokens of thinking."""
        if budget is not None:
            self._set("max_thinking_tokens", budget, path)
            self.asked.append(path)

    def switch(self, path: str, is_on: bool | None) -> None:
        """Turn thinking on or off."""
        if is_on is not None:
            self._is_on |= is_on
            self._is_off |= not is_on
            if is_on:
                self.asked.append(path)

    def thinking(self, fields: ThinkingFields | None) -> None:
        """Read Anthropic's object."""
        if fields is not None:
            self.switch("thinking.type", fields.type != "disabled")
            self.budget("thinking.budget_tokens", fields.budget_tokens)

    def reasoning(self, fields: ReasoningFields | None) -> None:
        """Read OpenAI's and OpenRouter's object."""
        if fields is not None:
            self.effort("reasoning.effort", fields.effort)
            self.budget("reasoning.max_tokens", fields.max_tokens)
            self.switch("reasoning.enabled", fields.enabled)

    def result(self, variables: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the parameters of the request.

        Args:
            variables: the caller's own variables of the chat template, which have priority.
        """
        params = dict(self._params)
        if self._is_off:  # an effort may then be meant for the answer
            params = {"reasoning_effort": "none"}
            self.asked.clear()
        elif self._is_on and "reasoning_effort" not in params:
            variables = {"enable_thinking": True, "thinking": True} | (variables or {})
        if variables:
            params["chat_template_kwargs"] = variables
        return params

    def _set(self, name: str, value: object, path: str) -> None:
        if self._params.setdefault(name, value) != value:
            raise InvalidRequest(path, f"is another name of {self.names[name]}, which says something else")
        self.names.setdefault(name, path)
