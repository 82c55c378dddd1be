"""transformers' parser of answers with a time limit for its expressions. Only models that need it import it."""

from collections.abc import Mapping, Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from genbatch.nif.text.expressions import Expression, SearchTime


class TimedParser(ResponseParser):
    """transformers' parser with a time budget for its expressions.

    Raises:
        TimeoutError: from every method.
    """

    def __init__(
        self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]], left: SearchTime
    ) -> None:
        self._left = left
        spec = load_response_template(dict(template))
        spec.start_anchor_re = Expression(spec.start_anchor_re, left)
        for field in spec.fields.values():
            for name in ("open_re", "close_re"):
                if (pattern := getattr(field, name)) is not None:
                    setattr(field, name, Expression(pattern, left))
        super().__init__(spec, prefix=prefix, tools=[dict(tool) for tool in tools])

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current is not None and self._opened:
            self._try_tags(self._body, self._spec.fields[self._current].content_args)
        super()._close_current(events)

    def _try_tags(self, text: str, args: Any) -> None:
        """Search for a region's tags under the time limit first, because the parser's own search has no limit."""
        inner = args.get("value_parser") if isinstance(args, dict) else None
        if not isinstance(args, dict) or "tag_pattern" not in args:
            return
        expression = Expression(regex.compile(args["tag_pattern"], regex.DOTALL), self._left)
        for match in expression.finditer(text):
            if isinstance(inner, dict):
                self._try_tags(match.groupdict().get("value") or "", inner.get("args"))
