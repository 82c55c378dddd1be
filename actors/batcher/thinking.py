"""Thinking: limits how much a model thinks before it answers, by the marks of its chat template.

effort, budget ──> variables of the template, where it reads them
              └──> a constraint that ends the thinking at the template's own mark, so that the answer follows
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.constraints import ThinkingBudget, ThinkingMarks
from genbatch.nif.sampling.sampler import Constraint
from genbatch.nif.text.response_template import HARMONY
from genbatch.proto.messages import Effort, GenerateRequest, PromptRequest


class EffortBudget(NamedTuple):
    """A budget of thinking: so many tokens, and at most this share of the answer's `max_tokens`."""

    max_tokens: int
    share: float


# The budgets of efforts for templates that know no effort; docs/guide.md has this table. Other efforts have no limit.
EFFORTS = {
    "none": EffortBudget(0, 0),
    "minimal": EffortBudget(512, 1 / 8),
    "low": EffortBudget(1024, 1 / 4),
    "medium": EffortBudget(4096, 1 / 2),
    "high": EffortBudget(16384, 3 / 4),
}
# The variables by which templates turn thinking on and off, and the name of an effort and of a budget.
SWITCHES = ("enable_thinking", "thinking")
EFFORT, BUDGET = "reasoning_effort", "thinking_budget"
EFFORT_NAMES = get_args(Effort)
# Templates that know efforts know these three, unless they list the efforts that they accept.
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
_LISTED = re.compile(r"reasoning_effort\s{1,9}not\s{1,9}in\s{0,9}[\[(]([^\])]{0,200})[\])]")
_EFFORT = re.compile(r"['\"](\w+)['\"]")
# The number of tokens at the end of a prompt that may open or close the thinking.
TAIL_TOKENS = 24


class Thinking:
    """Knows how one model's chat template marks thinking.

    Args:
        model: the loaded model.
    """

    @classmethod
    def of(cls, model: Model) -> "Thinking | None":
        """Return the thinking of a model; None if its template neither marks thinking nor reads a setting of it."""
        tokenizer = model.tokenizer
        has_settings = any(tokenizer.template_reads(name) for name in (*SWITCHES, EFFORT, BUDGET))
        return cls(model) if model.generates and (tokenizer.thinks or has_settings) else None

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer
        self._num_words = -(-model.vocab_size // 32)

    @property
    def takes_effort(self) -> bool:
        """Whether an effort or a budget has an effect."""
        has_marks = self._tokenizer.response_template is HARMONY or self._tokenizer.thinking_tags is not None
        return self._tokenizer.template_reads(EFFORT) or (self._tokenizer.thinks and has_marks)

    def variables(self, request: PromptRequest) -> dict[str, Any] | None:
        """Return the chat template's variables: the request's own, and those that follow from its effort and budget."""
        if not isinstance(request, GenerateRequest):
            return request.chat_template_kwargs
        reads, effort = self._tokenizer.template_reads, request.reasoning_effort
        variables: dict[str, Any] = {}
        if effort is not None:
            variables = {name: effort != "none" for name in SWITCHES if reads(name)}
            if (written := self._written(effort)) is not None:
                variables[EFFORT] = written
        if request.max_thinking_tokens is not None and reads(BUDGET):
            variables[BUDGET] = request.max_thinking_tokens
        return variables | (request.chat_template_kwargs or {}) or None

    def opens(self, prompt_tokens: Sequence[int]) -> bool:
        """Return whether the prompt has opened a thinking part that the answer continues."""
        tags = self._tokenizer.thinking_tags
        return tags is not None and self._tail(prompt_tokens).endswith(tags.opens)

    def opening(self) -> list[int]:
        """Return the tokens of the tag that opens thinking."""
        tags = self._tokenizer.thinking_tags
        return [] if tags is None else self._encode(tags.opens)

    def constraint(
        self, request: GenerateRequest, prompt_tokens: Sequence[int], max_tokens: int, inner: Constraint | None
    ) -> Constraint | None:
        """Return the constraint of one answer: `inner`, and the budget of its thinking.

        Args:
            max_tokens: most tokens of the answer, its thinking included.
        """
        budget = self._budget(request, max_tokens)
        marks = None if budget is None else self._marks()
        if budget is None or marks is None or self._tail(prompt_tokens).endswith(marks.closes):
            return inner
        return ThinkingBudget(marks, budget, self._num_words, thinks=self.opens(prompt_tokens), inner=inner)

    def _budget(self, request: GenerateRequest, max_tokens: int) -> int | None:
        """Return the most tokens of thinking; None is no limit."""
        if request.max_thinking_tokens is not None:
            return request.max_thinking_tokens
        budget = (request.chat_template_kwargs or {}).get(BUDGET)
        if type(budget) is int and budget >= 0:
            return budget
        name = request.reasoning_effort
        # A template that reads this effort limits the thinking itself. A template that reads another effort does not.
        if name not in EFFORTS or (name != "none" and self._written(name) in (name, _NEAREST.get(name, name))):
            return None
        effort = EFFORTS[name]
        return min(effort.max_tokens, int(effort.share * max_tokens))

    def _written(self, effort: str) -> str | None:
        """Return the effort to put into the template; None if it reads no effort, or has no "none"."""
        listed = self._tokenizer.find_in_template(_LISTED)
        if listed is None:
            is_read = effort != "none" and self._tokenizer.template_reads(EFFORT)
            return _NEAREST.get(effort, effort) if is_read else None
        known = [name for name in EFFORT_NAMES if name in _EFFORT.findall(listed[1])]
        if effort == "none":
            return effort if effort in known else None
        levels = [name for name in known if name != "none"]
        higher = [name for name in levels if EFFORT_NAMES.index(name) >= EFFORT_NAMES.index(effort)]
        return next(iter(higher or levels[-1:]), None)

    def _marks(self) -> ThinkingMarks | None:
        """Return the marks around thinking; None if no known marks are in the template."""
        if not self._tokenizer.thinks:
            return None
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        if self._tokenizer.response_template is HARMONY:
            return ThinkingMarks(
                opens="<|channel|>analysis<|message|>",
                closes="<|end|>",
                ending=self._encode("<|end|><|start|>assistant<|channel|>"),
                decode=decode,
                forbidden=self._encode("analysis")[0],
            )
        tags = self._tokenizer.thinking_tags
        if tags is None:
            return None
        ending = self._encode(tags.ending)
        return ThinkingMarks(opens=tags.opens, closes=tags.closes, ending=ending, decode=decode)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _tail(self, prompt_tokens: Sequence[int]) -> str:
        tail = list(prompt_tokens[-TAIL_TOKENS:])
        return self._tokenizer.decode(tail, skip_special_tokens=False).rstrip()
