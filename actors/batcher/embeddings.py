"""Embeddings: a request's texts on their way through the slots, and the vectors that become of them.

    request.embedding = intake.begin(wanted)              # checked; what it takes is known
    intake.start(request, intake.read(wanted), longest)   # its texts are tokenized
    sequence = request.next_text(now)                     # the next one that is to wait for a slot

A text is a sequence that draws nothing: it ends with its last prompt token. A request may have thousands of them. No
more than the service has slots wait or run at a time, and each goes behind what waits already, so that a long list is
no longer in anybody's way than a few requests would be.
"""

from collections.abc import Callable, Iterator

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.output import Output, OutputRules
from genbatch.actors.batcher.requests import Embedding, PooledText, Request, Sequence
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.draw import SamplingParams
from genbatch.nif.sampling.sampler import SamplerState
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.messages import EmbedRequest, GenerateRequest
from genbatch.proto.validation import validate_embed

NO_EMBEDDINGS = (
    "there are no embeddings: this model was trained to continue text, and its hidden states are no measure of "
    "what a text means; use a model that was trained for embeddings"
)
NO_TEXT = "gives embeddings and does not continue text: ask a model that does"
# What embeddings may take of the queue, so that a flood of them leaves room for what is generated.
QUEUE_SHARE = 0.5


class EmbedIntake:
    """Checks and tokenizes what embeddings are asked of, and makes its sequences.

    Args:
        model: the loaded model.
        options: the Batcher's.
        max_positions: most positions of one sequence.
        ids: numbers the sequences.
    """

    def __init__(self, model: Model, options: BatcherOptions, max_positions: int, ids: Iterator[int]) -> None:
        self._model = model
        self._options = options
        self._ids = ids
        self._max_positions = max_positions

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text."""
        pooling = self._model.pooling
        if pooling is None or pooling.max_tokens is None:
            return self._max_positions
        return min(self._max_positions, pooling.max_tokens)

    def begin(self, wanted: EmbedRequest) -> Embedding:
        """The work that a request is.

        Raises:
            InvalidRequest: whatever can be told without tokenizing.
        """
        pooling, vocab_size = self._model.pooling, self._model.vocab_size
        if pooling is None:
            raise InvalidRequest("input", NO_EMBEDDINGS)
        validate_embed(wanted, self._options.limits)
        if wanted.priority and not self._options.priority_ageing_s:
            raise InvalidRequest("priority", "this service serves everyone alike (priority_ageing_s is 0)")
        if wanted.dimensions not in (None, pooling.size, *pooling.shorter):
            others = f", and {_sizes(pooling.shorter)}" if pooling.shorter else "; it was not trained for others"
            rule = f"{wanted.dimensions} is not possible: {self._model.name} gives {pooling.size}{others}"
            raise InvalidRequest("dimensions", rule)
        for place, text in enumerate(wanted.texts):
            if not isinstance(text, str) and max(text) >= vocab_size:
                at = next(at for at, token_id in enumerate(text) if token_id >= vocab_size)
                path = f"{_field(wanted, place)}[{at}]"
                raise InvalidRequest(path, f"token id {text[at]} is outside 0..{vocab_size - 1}")
        return Embedding(wanted, min(len(wanted.texts), self._options.n_parallel))

    def size(self, wanted: EmbedRequest) -> int:
        """How much there is to tokenize, in characters."""
        return sum(len(text) for text in wanted.texts if isinstance(text, str))

    def read(self, wanted: EmbedRequest) -> list[list[int]]:
        """The token ids of each text; safe to run on another thread.

        Raises:
            InvalidRequest: a text has no tokens.
            PromptTooLong: a text has more than the model reads.
        """
        pooling, encode = self._model.pooling, self._model.tokenizer.encode
        assert pooling is not None
        found = []
        for place, text in enumerate(wanted.texts):
            tokens = encode(pooling.text(text)) if isinstance(text, str) else text
            if not tokens:
                raise InvalidRequest(_field(wanted, place), "is empty")
            if len(tokens) > self.max_tokens:
                limit = f"has {len(tokens)} tokens, {self._model.name} reads {self.max_tokens} of a text"
                raise PromptTooLong(limit, field=_field(wanted, place))
            found.append(tokens)
        return found

    def start(self, request: Request, texts: list[list[int]], longest: Callable[..., int]) -> None:
        """Lets a request's texts become sequences.

        Args:
            longest: see Intake.longest.

        Raises:
            PromptTooLong: the KV cache has no room for a text.
        """
        embedding, pooling = request.embedding, self._model.pooling
        assert embedding is not None and pooling is not None
        longest_text = max(texts, key=len)
        # The last token of what `longest` speaks of is drawn and never evaluated; here nothing is drawn.
        room = longest(longest_text, 1, len(longest_text) + 1, shares=False) - 1
        if room < len(longest_text):
            place = texts.index(longest_text)
            limit = f"has {len(longest_text)} tokens, the KV cache has room for {max(0, room)} of one text"
            raise PromptTooLong(limit, field=_field(embedding.wanted, place))
        backend, ageing_s = self._model.tokenizer.backend, self._options.priority_ageing_s
        # Nothing is drawn and nothing put out: one of each is there for all texts.
        sampler = SamplerState(SamplingParams(seed=0), ())
        output = Output(backend, (), OutputRules(max_tokens=1))
        key = prefix_key(request.wanted.tenant)

        def make(place: int, tokens: list[int], now: float) -> Sequence:
            number = next(self._ids)
            return Sequence(
                request_id=number,
                arrival=number,
                num_prompt_tokens=len(tokens),
                max_new_tokens=0,
                priority=request.wanted.priority,
                turn=now + request.wanted.priority * ageing_s,
                account=request.account if self._options.fair_share else "",
                tokens=tokens,
                request=request,
                cache_key=key,
                scores_prompt=pooling.needs_every_state,
                sampler=sampler,
                output=output,
                pooled=PooledText(place, pooling),
            )

        embedding.start(texts, make)


def books(embedding: Embedding) -> GenerateRequest:
    """The request as those see it who count, charge and order requests and ask for nothing else."""
    wanted = embedding.wanted
    return GenerateRequest(
        n=embedding.width, priority=wanted.priority, deadline_s=wanted.deadline_s, tenant=wanted.tenant, max_tokens=0
    )


def _field(wanted: EmbedRequest, place: int) -> str:
    """The path of a text."""
    alone = isinstance(wanted.input, str) or isinstance(wanted.input[0], int)
    return "input" if alone else f"input[{place}]"


def _sizes(shorter: frozenset[int]) -> str:
    if len(shorter) == max(shorter):
        return f"1 to {max(shorter)}"
    return ", ".join(map(str, sorted(shorter)))
