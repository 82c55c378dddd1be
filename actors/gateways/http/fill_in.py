"""FillIn: a prompt and its suffix as the one text that a model made for filling in goes on with.

Such models were trained with marks around what is in front of a gap and behind it. Each mark is one token of theirs, by
which it is found out whether a model has them.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from genbatch.proto.errors import InvalidRequest

CountTokens = Callable[[str, str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class GapFormat:
    """How a family of models writes a gap: each of `marks` with the one of `parts` that follows it."""

    marks: tuple[str, ...]
    parts: tuple[str, ...]

    def write(self, prefix: str, suffix: str) -> str:
        """The prompt."""
        texts = {"prefix": prefix, "suffix": suffix, "gap": ""}
        return "".join(mark + texts[part] for mark, part in zip(self.marks, self.parts, strict=True))


FORMATS = (
    # Qwen Coder, CodeGemma, Granite from 3.3 on.
    GapFormat(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("prefix", "suffix", "gap")),
    # StarCoder, Granite before.
    GapFormat(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("prefix", "suffix", "gap")),
    # DeepSeek Coder.
    GapFormat(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("prefix", "suffix", "gap")),  # noqa: RUF001
    # Codestral.
    GapFormat(("[SUFFIX]", "[PREFIX]"), ("suffix", "prefix")),
)


class FillIn:
    """Knows the marks of each model that somebody has asked it about.

    Args:
        count_tokens: how many tokens of a model a text is.
    """

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._known: dict[str, GapFormat | None] = {}  # by the model's id

    async def prompt(self, model: str, prefix: str, suffix: str) -> str:
        """What `model` goes on with to fill the gap between `prefix` and `suffix`.

        Raises:
            InvalidRequest: the model was not made for it.
        """
        if model not in self._known:
            self._known[model] = await self._look(model)
        format = self._known[model]
        if format is None:
            raise InvalidRequest("suffix", "this model can only continue text: it has no marks for filling in")
        return format.write(prefix, suffix)

    async def _look(self, model: str) -> GapFormat | None:
        for known in FORMATS:
            if all([await self._count_tokens(model, mark) == 1 for mark in known.marks]):
                return known
        return None
