"""Scores: evaluate documents in slots, and compute the scores of a reranker or a classifier.

A document is evaluated as a text to embed is (embeddings.py), with two differences. It is read together with its
query. Its vector is the output of the model's head, with or without the activation.
"""

from dataclasses import dataclass

import torch

from genbatch.actors.batcher.embeddings import PooledText, TextIntake, TextsRequest
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.messages import ScoreRequest
from genbatch.proto.validation import validate_score

NO_SCORES = "it scores no texts: ask a reranker or a classifier"


@dataclass(slots=True, kw_only=True, eq=False)
class ScoringRequest(TextsRequest[ScoreRequest]):
    """A request for the scores of documents."""

    @property
    def kind(self) -> str:
        return "scores"

    def vector(self, text: PooledText) -> torch.Tensor:
        return text.vector(activates=not self.wanted.raw_scores)


class ScoreIntake(TextIntake[ScoreRequest]):
    """Checks and tokenizes documents to score."""

    noun, request_type = "scores", ScoringRequest

    def check(self, wanted: ScoreRequest, *, is_validated: bool) -> int:
        pooling, pairs = self._model.pooling, self._model.pairs
        if pooling is None or pairs is None:
            raise InvalidRequest("model", NO_SCORES)
        if not is_validated:
            validate_score(wanted, self._options.limits)
        self.check_priority(wanted)
        if wanted.query is None and pairs.needs_query:
            raise InvalidRequest("query", f"is missing: {self._model.name} scores a document by a query")
        if wanted.instruction is not None and not pairs.takes_instruction:
            raise InvalidRequest("instruction", f"{self._model.name} has no place for one in what it reads")
        return min(len(wanted.documents), self._options.n_parallel)

    def size(self, wanted: ScoreRequest) -> int:
        return sum(len(query or "") + len(document) for query, document in wanted.pairs)

    def read(self, wanted: ScoreRequest) -> list[list[int]]:
        pairs = self._model.pairs
        assert pairs is not None
        found = []
        for place, (query, document) in enumerate(wanted.pairs):
            if wanted.max_document_tokens is not None:
                document = pairs.beginning(document, wanted.max_document_tokens)
            tokens = pairs.tokens(query, document, wanted.instruction)
            if len(tokens) > self.max_tokens and wanted.truncate:
                tokens = pairs.cut(query, document, self.max_tokens, wanted.instruction)
            if not tokens:
                raise InvalidRequest(self.field(wanted, place), "is empty")
            if len(tokens) > self.max_tokens:
                limit = f"has {len(tokens)} tokens with its query, {self._model.name} reads {self.max_tokens} of a text"
                raise PromptTooLong(limit, field=self.field(wanted, place))
            found.append(tokens)
        return found

    def field(self, wanted: ScoreRequest, place: int) -> str:
        return f"documents[{place}]"
