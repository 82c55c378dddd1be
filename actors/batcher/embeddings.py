"""Embeddings and scores: evaluate a request's texts in slots, and pool their states into vectors or scores.

    width = intake.check(params)                          # texts that run at a time
    intake.start(request, intake.read(params), longest)   # its texts are tokenized
    sequence = request.next_sequence(now)                 # the next text that waits for a slot

A text is a sequence that draws no token: it ends with its last prompt token. A request may have thousands of texts.
At most as many as the service has slots wait or run at a time. Each text queues behind the texts and requests that
wait already. So a long list delays other clients no more than a few requests would.

A document to score, by a reranker or a classifier, is evaluated as a text to embed is, with two differences. It is
read together with its query. Its vector is the output of the model's head, with or without the activation.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from genbatch.actors.batcher.messages import Embedded
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Books, Evaluated, Planned, Request, Sequence
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.pooling import Pooling
from genbatch.nif.runner import Logits, Rows, host_copy
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState
from genbatch.proto.errors import EngineError, InvalidRequest, PromptTooLong
from genbatch.proto.messages import EmbedRequest, FinishReason, ScoreRequest
from genbatch.proto.validation import validate_embed, validate_score

Asked = TypeVar("Asked", EmbedRequest, ScoreRequest)

NO_EMBEDDINGS = (
    "there are no embeddings: this model was trained to generate text, and its hidden states do not measure "
    "meaning; use an embedding model"
)
NO_VECTORS = "it scores texts and gives no embeddings; request its scores"
NO_TEXT = "does not generate text; use a model that does"
# The share of the queue that embeddings may fill, so that a flood of them leaves room for generation.
QUEUE_SHARE = 0.5


class PooledText:
    """Collects the states of one text, chunk by chunk.

    Args:
        pooling: the model's pooling.
    """

    __slots__ = ("_count", "_pooling", "_sum")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum = np.zeros(pooling.size, np.float32)
        self._count = 0

    def states(self, *, is_last: bool) -> Logits:
        """Return which states or logits of a chunk the pooling reads."""
        if self._pooling.needs_every_state:
            return Logits.EVERY_STATE
        if not is_last:
            return Logits.NONE
        return Logits.LAST_STATE if self._pooling.needs_states else Logits.LAST

    def add(self, first: int, states: npt.NDArray[np.float32]) -> None:
        """Add the rows read from a chunk, [n, size]; the chunk begins at position `first`."""
        if not self._pooling.needs_every_state:
            self._sum = states[-1]
            self._count = 1
            return
        if first == 0:  # a paused text begins again
            self._sum, self._count = np.zeros(self._pooling.size, np.float32), 0
        assert first == self._count, f"states from {first} on, after {self._count}"
        self._sum = self._sum + states.sum(0)
        self._count += len(states)

    @property
    def is_finite(self) -> bool:
        """True if all values are finite numbers."""
        return bool(np.isfinite(self._sum).all())

    def vector(self, dimensions: int | None = None, *, activates: bool = True) -> npt.NDArray[np.float32]:
        """Return the embedding, or the scores; see Pooling.finish."""
        return self._pooling.finish(self._sum / np.float32(self._count), dimensions, activates=activates)


@dataclass(slots=True, kw_only=True, eq=False)
class TextsRequest(Request, Generic[Asked]):
    """A request for one vector per text.

    Args:
        params: the validated message.
    """

    early: ClassVar[str] = "all texts were read"
    counts_answers: ClassVar[bool] = False
    embeds: ClassVar[bool] = True

    params: Asked
    num_tokens: int = 0  # of all texts, once they are tokenized
    vectors: list[bytes] = field(default_factory=list)
    num_left: int = 0  # texts without a vector
    texts: deque[tuple[int, list[int]]] = field(default_factory=deque)  # tokenized texts that have no sequence yet
    make: "Callable[[int, list[int], float], TextEmbedding] | None" = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    @property
    def rounds(self) -> int:
        return -(-len(self.vectors) // self.width)

    def start(self, texts: list[list[int]], make: "Callable[[int, list[int], float], TextEmbedding]") -> None:
        """Take the tokenized texts and make the first sequences.

        Args:
            make: makes a text's sequence, from its index, its tokens and the time when it begins to wait.
        """
        self.num_tokens = sum(map(len, texts))
        self.vectors = [b""] * len(texts)
        self.num_left = len(texts)
        self.texts.extend(enumerate(texts))
        self.make = make
        for _ in range(self.width):
            self.next_sequence(self.accepted_at)

    def next_sequence(self, now: float) -> "TextEmbedding | None":
        if not self.texts:
            return None
        assert self.make is not None
        sequence = self.make(*self.texts.popleft(), now)
        self.sequences.append(sequence)
        return sequence

    def add(self, sequence: "TextEmbedding") -> bool:
        """Take an evaluated text; return whether it was the last."""
        self.sequences.remove(sequence)  # a request may have thousands
        self.vectors[sequence.place] = self.vector(sequence.text).astype("<f4").tobytes()
        self.num_left -= 1
        return not self.num_left

    def vector(self, text: PooledText) -> npt.NDArray[np.float32]:
        """Return the answer to one text."""
        raise NotImplementedError

    def response(self) -> Embedded:
        assert not self.num_left, "a text has no vector yet"
        return Embedded(vectors=self.vectors, prompt_tokens=self.num_tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingRequest(TextsRequest[EmbedRequest]):
    """A request for the embeddings of texts."""

    @property
    def kind(self) -> str:
        return "embeddings"

    def vector(self, text: PooledText) -> npt.NDArray[np.float32]:
        return text.vector(self.params.dimensions)


@dataclass(slots=True, kw_only=True, eq=False)
class TextEmbedding(Sequence):
    """One text of a request: the sequence draws no token and ends with its last prompt token.

    Args:
        place: the text's index in the request.
        text: collects the states.
    """

    request: TextsRequest[Any]
    place: int
    text: PooledText

    def conclude(self, reason: FinishReason) -> bool:
        return self.request.add(self)

    def reads(self, start: int, *, is_last: bool) -> tuple[Logits, SamplerState | None]:
        return self.text.states(is_last=is_last), None

    def reads_rows(self, planned: Planned) -> bool:
        return True

    def read(self, planned: Planned, rows: Rows, drawn: Sampled | SampleFault | None) -> Evaluated:
        return Evaluated(drawn, rows=host_copy(rows) if len(rows) else None)

    def book(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        """Book a chunk; the last chunk completes the embedding."""
        Sequence.book(self, planned, evaluated, books)
        if evaluated.rows is not None:
            self.text.add(planned.entry.n_past, evaluated.rows)
        if self.num_computed < len(self.tokens) or self.request.abandoned is not None:
            return
        if not self.text.is_finite:
            books.fail(self.request, EngineError("the model's states are no finite numbers"))
        else:
            books.embedded()
            books.finish(self, "stop")


class TextIntake(Generic[Asked]):
    """Checks and tokenizes the texts of a request, and makes its sequences.

    Args:
        model: the loaded model.
        options: the Batcher's options.
        max_positions: most positions of one sequence.
        ids: numbers the sequences.
    """

    noun: ClassVar[str]  # the noun for the answers
    request_type: ClassVar[type[TextsRequest[Any]]]

    def __init__(self, model: Model, options: BatcherOptions, max_positions: int, ids: Iterator[int]) -> None:
        self._model = model
        self._options = options
        self._ids = ids
        self._max_positions = max_positions

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text."""
        pooling = self._model.pooling
        if pooling is None or pooling.max_tokens is None:
            return self._max_positions
        return min(self._max_positions, pooling.max_tokens)

    def check(self, request: Asked, *, is_validated: bool) -> int:
        """Check a request without tokenizing; return how many of its texts wait or run at a time.

        Args:
            is_validated: see Generate.

        Raises:
            InvalidRequest: the request cannot be served.
        """
        raise NotImplementedError

    def size(self, request: Asked) -> int:
        """Return the number of characters to tokenize."""
        raise NotImplementedError

    def read(self, request: Asked) -> list[list[int]]:
        """Return the token ids of each text; safe to run on another thread.

        Raises:
            InvalidRequest: a text has no tokens.
            PromptTooLong: a text has more tokens than the model reads.
        """
        raise NotImplementedError

    def field(self, request: Asked, place: int) -> str:
        """Return the path of a text's field, for errors."""
        raise NotImplementedError

    def check_priority(self, request: Asked) -> None:
        """Refuse a priority where the service has no priorities.

        Raises:
            InvalidRequest: the service has no priorities.
        """
        if request.priority and not self._options.priority_ageing_s:
            raise InvalidRequest("priority", "priorities are off in this service (priority_ageing_s is 0)")

    def start(self, request: TextsRequest[Asked], texts: list[list[int]], longest: Callable[..., int]) -> None:
        """Make sequences of a request's texts.

        Args:
            longest: see Intake.longest.

        Raises:
            PromptTooLong: the KV cache has no room for a text.
        """
        pooling = self._model.pooling
        assert pooling is not None
        longest_text = max(texts, key=len)
        # `longest` reserves no position for the last token, which is drawn and never evaluated. A text draws no token.
        room = longest(longest_text, 1, len(longest_text) + 1, shares=False) - 1
        if room < len(longest_text):
            place = texts.index(longest_text)
            limit = f"has {len(longest_text)} tokens; the KV cache has room for {max(0, room)} of one text"
            raise PromptTooLong(limit, field=self.field(request.params, place))
        ageing_s = self._options.priority_ageing_s
        key = prefix_key(request.tenant)

        def make(place: int, tokens: list[int], now: float) -> TextEmbedding:
            number = next(self._ids)
            return TextEmbedding(
                request_id=number,
                arrival=number,
                num_prompt_tokens=len(tokens),
                max_new_tokens=0,
                priority=request.params.priority,
                turn=now + request.params.priority * ageing_s,
                account=request.account if self._options.fair_share else "",
                tokens=tokens,
                request=request,
                cache_key=key,
                scores_prompt=pooling.needs_every_state,
                place=place,
                text=PooledText(pooling),
            )

        request.start(texts, make)


class EmbedIntake(TextIntake[EmbedRequest]):
    """Checks and tokenizes the texts of an embedding request."""

    noun, request_type = "embeddings", EmbeddingRequest

    def check(self, request: EmbedRequest, *, is_validated: bool) -> int:
        pooling, vocab_size = self._model.pooling, self._model.vocab_size
        if pooling is None or not pooling.embeds:
            raise InvalidRequest("input", NO_EMBEDDINGS if pooling is None else NO_VECTORS)
        if not is_validated:
            validate_embed(request, self._options.limits)
        self.check_priority(request)
        if request.dimensions not in (None, pooling.size, *pooling.shorter):
            others = f", and {_sizes(pooling.shorter)}" if pooling.shorter else "; it was not trained for others"
            rule = f"{request.dimensions} is not possible: {self._model.name} gives {pooling.size}{others}"
            raise InvalidRequest("dimensions", rule)
        for place, text in enumerate(request.texts):
            if not isinstance(text, str) and max(text) >= vocab_size:
                at = next(at for at, token_id in enumerate(text) if token_id >= vocab_size)
                path = f"{self.field(request, place)}[{at}]"
                raise InvalidRequest(path, f"token id {text[at]} is outside 0..{vocab_size - 1}")
        return min(len(request.texts), self._options.n_parallel)

    def size(self, request: EmbedRequest) -> int:
        return sum(len(text) for text in request.texts if isinstance(text, str))

    def read(self, request: EmbedRequest) -> list[list[int]]:
        pooling, encode = self._model.pooling, self._model.tokenizer.encode
        assert pooling is not None
        tokenized = []
        for place, text in enumerate(request.texts):
            tokens = encode(pooling.text(text)) if isinstance(text, str) else text
            if not tokens:
                raise InvalidRequest(self.field(request, place), "is empty")
            if len(tokens) > self.max_tokens:
                limit = f"has {len(tokens)} tokens; {self._model.name} reads at most {self.max_tokens} of a text"
                raise PromptTooLong(limit, field=self.field(request, place))
            tokenized.append(tokens)
        return tokenized

    def field(self, request: EmbedRequest, place: int) -> str:
        return "input" if request.texts[0] == request.input else f"input[{place}]"


def _sizes(shorter: frozenset[int]) -> str:
    if len(shorter) == max(shorter):
        return f"1 to {max(shorter)}"
    return ", ".join(map(str, sorted(shorter)))


NO_SCORES = "it scores no texts; use a reranker or a classifier"


@dataclass(slots=True, kw_only=True, eq=False)
class ScoringRequest(TextsRequest[ScoreRequest]):
    """A request for the scores of documents."""

    @property
    def kind(self) -> str:
        return "scores"

    def vector(self, text: PooledText) -> npt.NDArray[np.float32]:
        return text.vector(activates=not self.params.raw_scores)


class ScoreIntake(TextIntake[ScoreRequest]):
    """Checks and tokenizes documents to score."""

    noun, request_type = "scores", ScoringRequest

    def check(self, request: ScoreRequest, *, is_validated: bool) -> int:
        pooling, pairs = self._model.pooling, self._model.pairs
        if pooling is None or pairs is None:
            raise InvalidRequest("model", NO_SCORES)
        if not is_validated:
            validate_score(request, self._options.limits)
        self.check_priority(request)
        if request.query is None and pairs.needs_query:
            raise InvalidRequest("query", f"is missing: {self._model.name} scores a document by a query")
        if request.instruction is not None and not pairs.takes_instruction:
            raise InvalidRequest("instruction", f"{self._model.name} has no place for one in what it reads")
        return min(len(request.documents), self._options.n_parallel)

    def size(self, request: ScoreRequest) -> int:
        return sum(len(query or "") + len(document) for query, document in request.pairs)

    def read(self, request: ScoreRequest) -> list[list[int]]:
        pairs = self._model.pairs
        assert pairs is not None
        tokenized = []
        for place, (query, document) in enumerate(request.pairs):
            if request.max_document_tokens is not None:
                document = pairs.beginning(document, request.max_document_tokens)
            tokens = pairs.tokens(query, document, request.instruction)
            if len(tokens) > self.max_tokens and request.truncate:
                tokens = pairs.cut(query, document, self.max_tokens, request.instruction)
            if not tokens:
                raise InvalidRequest(self.field(request, place), "is empty")
            if len(tokens) > self.max_tokens:
                limit = f"has {len(tokens)} tokens with its query; {self._model.name} reads at most {self.max_tokens}"
                raise PromptTooLong(limit, field=self.field(request, place))
            tokenized.append(tokens)
        return tokenized

    def field(self, request: ScoreRequest, place: int) -> str:
        return f"documents[{place}]"
