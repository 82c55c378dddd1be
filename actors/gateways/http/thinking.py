"""Thinking fields: read the efforts and budgets of thinking of several APIs.

    OpenAI                reasoning_effort, reasoning.effort
    Anthropic             thinking {type, budget_tokens}, output_config.effort
    vLLM, Qwen            thinking_token_budget, thinking_budget, enable_thinking
    OpenRouter            reasoning {effort, max_tokens, enabled}
    Ollama                think

All of them become `reasoning_effort` and `max_thinking_tokens` of a GenerateRequest.
"""

from typing import Any, get_args

import msgspec

from genbatch.actors.gateways.http.fields import Fields
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Effort

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
