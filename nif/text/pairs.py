"""Pairs: converts a query and a document to a reranker's token ids.

    pairs = PairReader(tokenizer, form=None, second=0)
    tokens = pairs.tokens("who?", "it was them")

A classifier's tokenizer joins two texts itself. A causal model reads them in a prompt: from a chat template with
the roles "query" and "document", or from the prompt of its family.
"""

from dataclasses import dataclass, replace

from genbatch.nif.text.templates import ChatTemplateError
from genbatch.nif.text.tokenizer import Tokenizer

_MARKS = {"system": "genbatch-instruction", "query": "genbatch-query", "document": "genbatch-document"}


@dataclass(frozen=True, slots=True)
class PairForm:
    """A prompt with places for an instruction, a query and a document, in this order.

    Args:
        parts: the text before each place, and after the last place.
        instruction: the default instruction for requests without one.
        strips: whether spaces around the inserted texts are dropped.
    """

    parts: tuple[str, str, str, str]
    instruction: str
    strips: bool = False

    def text(self, instruction: str | None, query: str, document: str) -> str:
        """Return the prompt."""
        filled = [self.instruction if instruction is None else instruction, query, document]
        filled = [text.strip() for text in filled] if self.strips else filled
        return "".join(part + text for part, text in zip(self.parts, [*filled, ""], strict=True))


QWEN3 = PairForm(
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ',
        "\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Given a web search query, retrieve relevant passages that answer the query",
)
"""The form of a pair that Qwen3-Reranker was trained with."""
KNOWN_FORMS = {"qwen3": QWEN3}
"""Forms by transformers' kind of model, for chat templates that have no places for a pair."""


def template_form(tokenizer: Tokenizer, instruction: str) -> PairForm | None:
    """Return the form of the model's chat template; None if it has no place for a query and a document.

    Args:
        instruction: the instruction in the model's files for every pair; "" if there is none.
    """
    if not tokenizer.has_chat_template:
        return None
    whole, pair = _rendered(tokenizer, ("system", "query", "document")), _rendered(tokenizer, ("query", "document"))
    if pair is None or instruction:
        return None if whole is None else replace(whole, instruction=instruction)
    if whole is None or whole.parts[2:] != pair.parts[2:]:
        return pair
    # The template's default instruction is the text between these two.
    start, end, text = whole.parts[0], whole.parts[1], pair.parts[1]
    if len(start) + len(end) < len(text) and text.startswith(start) and text.endswith(end):
        return replace(whole, instruction=text[len(start) : len(text) - len(end)])
    return pair


def _rendered(tokenizer: Tokenizer, roles: tuple[str, ...]) -> PairForm | None:
    """Return the form from rendering messages with these roles; None unless each appears once and in order."""
    marks = [_MARKS[role] for role in roles]
    try:
        prompt = tokenizer.start_prompt(
            [{"role": role, "content": f" {mark} "} for role, mark in zip(roles, marks, strict=True)]
        )
        prompt.rendering.wait()
        text = prompt.text
    except ChatTemplateError:
        return None
    strips = not all(f" {mark} " in text for mark in marks)
    parts, rest = [""] * (3 - len(roles)), text
    for mark in marks:
        before, mark_here, rest = rest.partition(mark if strips else f" {mark} ")
        if not mark_here:
            return None
        parts.append(before)
    if any(mark in part for mark in marks for part in (*parts, rest)):
        return None
    return PairForm((parts[0], parts[1], parts[2], rest), "", strips)


class PairReader:
    """Makes the tokens of pairs and of single texts; safe to use on another thread.

    Args:
        tokenizer: the model's tokenizer.
        form: the prompt of a pair; None means that the tokenizer joins the two texts.
        second: added to the ids of the second text's tokens, for encoders with token types; 0 for other encoders.
        padding_id: dropped from a text's end, because transformers' head reads the last token that is no padding.
    """

    def __init__(
        self, tokenizer: Tokenizer, form: PairForm | None = None, *, second: int = 0, padding_id: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self.second = second
        self._padding_id = padding_id

    @property
    def takes_instruction(self) -> bool:
        """Whether a request may have an instruction."""
        return self._form is not None and bool(self._form.instruction)

    @property
    def needs_query(self) -> bool:
        """Whether the model needs a query for each text."""
        return self._form is not None

    def tokens(self, query: str | None, document: str, instruction: str | None = None) -> list[int]:
        """Return the ids of a pair, or of a single document.

        Raises:
            TokenizerError: the tokenizer fails on this text.
        """
        if self._form is not None:
            return self._tokenizer.encode_prompt(self._form.text(instruction, query or "", document))
        tokens = self._tokenizer.encode(document) if query is None else self._joined(query, document)
        while len(tokens) > 1 and tokens[-1] == self._padding_id:
            tokens.pop()
        return tokens

    def cut(self, query: str | None, document: str, limit: int, instruction: str | None = None) -> list[int]:
        """Return at most `limit` ids, as `tokens` does; the document's end is cut.

        The result is longer than `limit` if the pair is too long even without a document.
        """
        tokens = self.tokens(query, document, instruction)
        num_tokens = self._count(document)
        while len(tokens) > limit and document:
            num_tokens -= len(tokens) - limit
            document = self.beginning(document, num_tokens) if num_tokens > 0 else ""
            tokens = self.tokens(query, document, instruction)
        return tokens

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return the text of a text's first tokens."""
        offsets = self._tokenizer.encoding(text, add_special_tokens=False).offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens][0]]

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encoding(text, add_special_tokens=False).ids)

    def _joined(self, query: str, document: str) -> list[int]:
        encoding = self._tokenizer.encoding(query, document)
        if not self.second:
            return list(encoding.ids)
        return [token + kind * self.second for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]
