"""One step being filled with work: who is in it, and what is left of its token and cache budgets."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from genbatch.actors.scheduling.llm_request import LlmRequest, Phase, RequestList


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step.

    Args:
        max_batch_tokens: token budget: query tokens of one step, decodes and prefill chunks together.
        block_size: positions in a KV block.
        cache_budget: blocks that the requests of one step may read, a shared block counted for each
            reader. None: only the pool bounds it, since a step reads no block that is not there.
        enable_chunked_context: whether a context that fits the token budget may be split over steps.
            One that is longer than `max_batch_tokens` is split either way: it could never run whole.
    """

    max_batch_tokens: int
    block_size: int
    cache_budget: int | None = None
    enable_chunked_context: bool = True

    def blocks_read(self, num_positions: int) -> int:
        """Blocks that attention over `num_positions` reads."""
        return -(-num_positions // self.block_size)

    def can_ever_run(self, request: LlmRequest) -> bool:
        """Whether the cache budget allows the request at its full length, alone in a step."""
        if request.width > self.max_batch_tokens:
            return False
        blocks = self.blocks_read(request.max_positions) * request.width
        return self.cache_budget is None or blocks <= self.cache_budget


@dataclass(slots=True)
class StepPlan:
    """Requests in the order they were added; each `add_…` stops where a budget ends."""

    limits: StepLimits
    tokens_left: int = field(init=False)
    blocks_left: int | None = field(init=False)
    context_requests: RequestList = field(default_factory=list)
    generation_requests: RequestList = field(default_factory=list)
    chunk_sizes: dict[int, int] = field(default_factory=dict)
    never_fitting: RequestList = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens_left = self.limits.max_batch_tokens
        self.blocks_left = self.limits.cache_budget

    def add_decodes(self, requests: RequestList) -> bool:
        """Gives each request one token a beam; returns whether all of them got it.

        One that takes too much of a budget is passed over, as a smaller one behind it may still fit.
        """
        if self.blocks_left is None and sum([request.width for request in requests]) <= self.tokens_left:
            self.generation_requests += requests
            self.tokens_left -= sum([request.width for request in requests])
            return True
        taken = self._decodes_within_budgets(requests)
        self.generation_requests += taken
        return len(taken) == len(requests)

    def add_contexts(self, requests: Iterable[LlmRequest]) -> bool:
        """Gives each request as much of its context as fits; returns whether all of them got the rest.

        Nobody overtakes a request that does not fit, except one that can never run: it is set aside.
        """
        for request in requests:
            if request.phase is Phase.PENDING and not self.limits.can_ever_run(request):
                self.never_fitting.append(request)
                continue
            num_tokens = self._chunk(request)
            if num_tokens == 0:
                return False
            self.context_requests.append(request)
            self.chunk_sizes[request.request_id] = num_tokens
            self.tokens_left -= num_tokens
            if self.blocks_left is not None:
                self.blocks_left -= self.limits.blocks_read(request.num_computed + num_tokens)
            if num_tokens < request.context_remaining:
                return False
        return True

    def _decodes_within_budgets(self, requests: RequestList) -> RequestList:
        taken: RequestList = []
        for request in requests:
            if self.tokens_left == 0:
                break
            blocks = self.limits.blocks_read(request.num_computed + 1) * request.width
            if request.width > self.tokens_left or (self.blocks_left is not None and blocks > self.blocks_left):
                continue
            self.tokens_left -= request.width
            if self.blocks_left is not None:
                self.blocks_left -= blocks
            taken.append(request)
        return taken

    def _chunk(self, request: LlmRequest) -> int:
        room = self.tokens_left
        if self.blocks_left is not None:
            room = min(room, max(0, self.blocks_left * self.limits.block_size - request.num_computed))
        remaining = request.context_remaining
        if remaining <= room:
            return remaining
        splits = self.limits.enable_chunked_context or remaining > self.limits.max_batch_tokens
        return room if splits else 0
