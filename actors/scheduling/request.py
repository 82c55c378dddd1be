"""A scheduler's view of requests with their lifecycle, of the KV memory in blocks of each pool, and of clients' turns.

FairShare orders clients by the tokens that each account has had (a virtual token counter, arXiv 2401.00588):

    fair.enter("a")                                  # one of its requests is open
    first, *_ = fair.in_turn(waiting, ...)           # a request of the account that had least
    fair.charge("a", prompt_tokens=30)
    fair.leave("a", output_tokens=100)

A queue keeps room for new clients: each client may fill a share of the places that the others leave (most_waiting, the
dynamic thresholds of shared-memory switches). One client may fill half of the queue, two a third each, and so on.

In a fleet several replicas serve an account. `owe` books the tokens that it had elsewhere, so that each replica's order
counts the tokens of all replicas.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar, Union


class Phase(Enum):
    """The phase of a request; only `LlmRequest.move` changes it."""

    PENDING = "pending"  # waits for admission, holds no KV blocks
    PREFILLING = "prefilling"  # admitted, with a part of its context not computed yet
    DECODING = "decoding"  # one token a step
    FINISHED = "finished"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PREFILLING, Phase.FINISHED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.PENDING, Phase.FINISHED}),
    Phase.DECODING: frozenset({Phase.PENDING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class LlmRequestState(Enum):
    """TensorRT-LLM's view of a request; schedulers compare the values, so their order matters."""

    CONTEXT_INIT = 1
    GENERATION_IN_PROGRESS = 2
    GENERATION_TO_COMPLETE = 3  # its next token is the last one that max_new_tokens allows
    GENERATION_COMPLETE = 4


class IllegalTransition(Exception):
    """A request was moved to a phase that does not follow its own."""

    def __init__(self, request_id: int, old: Phase, new: Phase) -> None:
        super().__init__(f"request {request_id} cannot go from {old.name} to {new.name}")
        self.request_id = request_id
        self.old = old
        self.new = new


@dataclass(slots=True, kw_only=True, eq=False)
class LlmRequest:
    """One sequence as a scheduler sees it: lengths in tokens, never the tokens themselves.

    Two requests are equal only if they are the same object, so sets of them cost no field comparisons.

    Args:
        request_id: internal identity, never reused within a process.
        num_prompt_tokens: length of the prompt, at least 1.
        max_new_tokens: the most tokens to generate; 0 for a prompt that is only evaluated.
        arrival: monotonic counter of arrivals.
        priority: the lower value is served first; ties go by arrival.
        turn: precedes priority: the lower value is served first. Ageing combines both into one number.
        num_computed: positions with KV (llama.cpp's n_past); while PENDING, the positions that it will share when it
            is admitted.
        num_generated: tokens sampled so far; the last of them has no KV until the next step.
        num_cached: of num_computed, the tokens that were shared and not prefilled.
        num_pauses: the number of times that it lost its KV.
        account: the account to charge, so that a client with many requests is paused first; "" where all are alike.
        width: sequences that it decodes in parallel, as many tokens per step: the beams of a beam search.
    """

    request_id: int
    num_prompt_tokens: int
    max_new_tokens: int
    arrival: int
    priority: int = 0
    turn: float = 0.0
    phase: Phase = Phase.PENDING
    num_computed: int = 0
    num_generated: int = 0
    num_cached: int = 0
    num_pauses: int = 0
    account: str = ""
    width: int = 1

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of the text generated so far."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def context_remaining(self) -> int:
        """The tokens without KV: the rest of the context, or 1 while decoding.

        A paused request holds no KV, so its generated tokens count as context again.
        """
        return self.num_prompt_tokens + self.num_generated - self.num_computed

    @property
    def max_positions(self) -> int:
        """The positions at full length: the last token to generate never needs its KV."""
        return self.num_prompt_tokens + max(self.max_new_tokens, 1) - 1

    @property
    def waiting_key(self) -> tuple[float, int, int]:
        """The sort key of the waiting list."""
        return self.turn, self.priority, self.arrival

    @property
    def state(self) -> LlmRequestState:
        """The phase in TensorRT-LLM's terms."""
        if self.phase is Phase.DECODING:
            if self.num_generated + 1 >= self.max_new_tokens:
                return LlmRequestState.GENERATION_TO_COMPLETE
            return LlmRequestState.GENERATION_IN_PROGRESS
        if self.phase is Phase.FINISHED:
            return LlmRequestState.GENERATION_COMPLETE
        return LlmRequestState.CONTEXT_INIT

    def move(self, phase: Phase) -> None:
        """Enter `phase`.

        Raises:
            IllegalTransition: `phase` does not follow the current phase; nothing was changed.
        """
        if phase not in TRANSITIONS[self.phase]:
            raise IllegalTransition(self.request_id, self.phase, phase)
        self.phase = phase

    def pause(self) -> None:
        """Return to PENDING without KV; the caller releases the blocks and puts the request into the waiting list.

        Raises:
            IllegalTransition: the request is neither prefilling nor decoding; nothing was changed.
        """
        self.move(Phase.PENDING)
        self.num_computed = 0
        self.num_cached = 0
        self.num_pauses += 1


RequestList = list[LlmRequest]


def split_by_phase(
    requests: Iterable[LlmRequest], inflight_request_ids: Set[int] = frozenset()
) -> tuple[RequestList, RequestList, RequestList]:
    """Return the decoding, prefilling and pending requests that are not in flight, each in the order given."""
    decoding: RequestList = []
    prefilling: RequestList = []
    pending: RequestList = []
    lists = {Phase.DECODING: decoding, Phase.PREFILLING: prefilling, Phase.PENDING: pending}
    for request in requests:
        chosen = lists.get(request.phase)
        if chosen is not None and request.request_id not in inflight_request_ids:
            chosen.append(request)
    return decoding, prefilling, pending


Count = Union["Blocks", int]  # a plain number is the count in every pool


class Blocks:
    """A count for each pool; most models have one pool, and models with several attention windows have more.

    `<=` and `>=` hold if they hold in every pool, `<` and `>` if they hold in any. So `needed <= available` means that
    it fits, and `needed > available` that it does not. A share of the counts, `0.2 * blocks`, is rounded up.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: Iterable[int]) -> None:
        self.counts = tuple(counts)

    def __add__(self, other: Count) -> "Blocks":
        return Blocks(a + b for a, b in zip(self.counts, self._of(other), strict=True))

    __radd__ = __add__

    def __sub__(self, other: Count) -> "Blocks":
        return Blocks(a - b for a, b in zip(self.counts, self._of(other), strict=True))

    def __rsub__(self, other: int) -> "Blocks":
        return Blocks(other - count for count in self.counts)

    def __mul__(self, share: float) -> "Blocks":
        return Blocks(math.ceil(count * share) for count in self.counts)

    __rmul__ = __mul__

    def __le__(self, other: Count) -> bool:
        return all(a <= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __ge__(self, other: Count) -> bool:
        return all(a >= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __lt__(self, other: Count) -> bool:
        return any(a < b for a, b in zip(self.counts, self._of(other), strict=True))

    def __gt__(self, other: Count) -> bool:
        return any(a > b for a, b in zip(self.counts, self._of(other), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks | int) and self.counts == self._of(other)

    def __hash__(self) -> int:
        return hash(self.counts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)

    def __repr__(self) -> str:
        return f"Blocks({', '.join(map(str, self.counts))})"

    def at_most(self, other: "Blocks") -> "Blocks":
        """Return the smaller count of each pool."""
        return Blocks(map(min, self.counts, other.counts))

    def _of(self, other: Count) -> tuple[int, ...]:
        return other.counts if isinstance(other, Blocks) else (other,) * len(self.counts)


def total(needs: Iterable[Blocks], nothing: Blocks) -> Blocks:
    """Return the sum. Most needs of a step are the object `nothing` itself, which is skipped."""
    summed = nothing
    for need in needs:
        if need is not nothing:
            summed = summed + need
    return summed


class KVResources(Protocol):
    """The `kv_cache_manager` argument of schedulers; its methods change nothing.

    Schedulers add up needs and compare the sum with the available blocks. The sums need not be exact: the Batcher runs
    as much of a plan as fits, by the allocator's own arithmetic.
    """

    @property
    def block_size(self) -> int:
        """The positions in a block."""
        ...

    @property
    def num_blocks(self) -> Blocks:
        """The blocks of each pool."""
        ...

    @property
    def free_blocks(self) -> Blocks:
        """The blocks that are available now, including those of cached prefixes and of idle held prompts."""
        ...

    @property
    def no_blocks(self) -> Blocks:
        """Zero blocks in each pool."""
        ...

    def get_max_resource_count(self) -> Blocks:
        """Return the blocks that requests may hold in all: all blocks that no configured prompt pins."""
        ...

    def get_needed_resource_to_completion(self, request: LlmRequest) -> Blocks:
        """Return the most blocks that the request holds on its way to `max_positions`, including its current ones.

        Blocks shared with a configured prompt are not counted. The result exceeds `get_max_resource_count()` only if
        the request does not fit even alone.
        """
        ...

    def blocks_held(self, request: LlmRequest) -> Blocks:
        """Return the blocks that become free if this request alone is released."""
        ...

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> Blocks:
        """Return the most blocks that leave `free_blocks` until `num_tokens` more tokens of the request are computed.

        For a pending request this includes the free blocks of a cached prefix that it will reuse.
        """
        ...


# The account of all clients that connect over TCP from the gateway's own machine.
LOCALHOST = "host:localhost"


def tenant_account(tenant: str) -> str:
    """Return the account of a tenant."""
    return f"tenant:{tenant}"


def charged_account(client: str, tenant: str, *, embeds: bool = False) -> str:
    """Return the account that a request is charged to.

    The client's gateway has chosen the account: the tenant of its key or token, or an address that the client cannot
    multiply (ADR 43). A tenant that a client merely names gives it no share. In-process requests have no account, but
    each tenant that they name has one. Embeddings are charged to a separate account. So embeddings and generation take
    turns even when one client asks for both.
    """
    account = client or (tenant_account(tenant) if tenant else "")
    return f"{account} (embeddings)" if embeds and account else account


# A generated token costs a forward, a prompt token only a share of one (the paper's weights).
PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# The most inactive clients with a counter. Forgetting a client with a low counter costs that client nothing.
MAX_AWAY = 1024
# The most weighted tokens by which tokens from other replicas may put an account behind: some seconds of a replica. A
# larger debt is forgiven, as with inactive clients.
MAX_OWED = 16384.0

T = TypeVar("T")


class FairShare:
    """The counters of all clients with open requests, and of some inactive clients."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._requests: dict[str, int] = {}  # of clients with open requests
        self._last_left = 0.0  # counter of the client that left last

    def served(self, client: str) -> float:
        """Return the weighted tokens that were booked for a client."""
        return self._served.get(client, 0.0)

    def enter(self, client: str) -> None:
        """Book a new open request of the client."""
        if client not in self._requests:
            least = min((self._served[other] for other in self._requests), default=self._last_left)
            # guard: counter of a returning client
            self._served[client] = max(self.served(client), least)
        self._requests[client] = self._requests.get(client, 0) + 1

    def owe(self, client: str, tokens: float) -> None:
        """Book weighted tokens that a client had elsewhere, before its request enters."""
        least = min((self._served[other] for other in self._requests if other != client), default=self._last_left)
        before = self.served(client)
        self._served[client] = max(before, min(before + tokens, least + MAX_OWED))

    def charge(self, client: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Book tokens of a client."""
        self._served[client] += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def leave(self, client: str, *, output_tokens: int) -> None:
        """Book the end of one of the client's requests, and its generated tokens."""
        self.charge(client, output_tokens=output_tokens)
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
            self._last_left = self._served[client]
            self._forget_some()

    def in_turn(
        self,
        waiting: ListOf[T],
        client_of: Callable[[T], str],
        prompt_tokens_of: Callable[[T], int],
        running_output: Mapping[str, int],
    ) -> list[T]:
        """Return the waiting requests in the order in which to serve them.

        Args:
            waiting: in the order in which one client's own requests are served.
            client_of: returns the client of a request.
            prompt_tokens_of: returns the charge at the start of a request, so that a client's second request comes
                after other clients' first ones.
            running_output: generated tokens of open requests that are not booked yet, by client.
        """
        lines: dict[str, deque[T]] = {}
        for item in waiting:
            lines.setdefault(client_of(item), deque()).append(item)
        if len(lines) < 2:
            return list(waiting)
        heap = [
            (self.served(client) + OUTPUT_WEIGHT * running_output.get(client, 0), place, client)
            for place, client in enumerate(lines)
        ]
        heapq.heapify(heap)
        order: list[T] = []
        while heap:
            served, place, client = heap[0]
            item = lines[client].popleft()
            order.append(item)
            if lines[client]:
                heapq.heapreplace(heap, (served + PROMPT_WEIGHT * prompt_tokens_of(item), place, client))
            else:
                heapq.heappop(heap)
        return order

    def _forget_some(self) -> None:
        away = [client for client in self._served if client not in self._requests]
        if len(away) > 2 * MAX_AWAY:
            away.sort(key=self.served)
            for client in away[:MAX_AWAY]:
                del self._served[client]


def most_waiting(size: int, others: int, share: float) -> float:
    """Return how many of one client's requests may wait in a queue: at least one, while there is a free place.

    Args:
        size: places of the queue.
        others: the number of other clients' requests in the queue.
        share: share of the places that the others leave.
    """
    left = max(0, size - others)
    return max(share * left, min(1, left))


def ahead_in_turn(waiting_of: Mapping[str, int], client: str, num_new: int) -> int:
    """Return the number of turns before the last of `num_new` more requests of a client, if clients alternate."""
    mine = waiting_of.get(client, 0)
    others = sum([min(count, mine + num_new) for other, count in waiting_of.items() if other != client])
    return mine + num_new - 1 + others


def slots_share(num_slots: int, num_clients: int) -> int:
    """Return the slots that each client may hold while all clients have work."""
    return max(1, num_slots // max(1, num_clients))
