"""FairShare: order clients by the tokens that each account has had (a virtual token counter, arXiv 2401.00588).

    fair.enter("a")                                  # one of its requests is at work
    first, *_ = fair.in_turn(waiting, ...)           # a request of the account that had least
    fair.charge("a", prompt_tokens=30)
    fair.leave("a", output_tokens=100)

A queue keeps room for new clients: each client may fill a share of the places that the others leave (most_waiting, the
dynamic thresholds of shared-memory switches). One client may fill half of the queue, two a third each, and so on.

In a fleet several replicas serve an account. `owe` books the tokens that it had elsewhere, so that each replica's order
counts the tokens of all replicas.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import TypeVar

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
    """The counters of all clients with requests at work, and of some inactive clients."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._requests: dict[str, int] = {}  # of clients at work
        self._last_left = 0.0  # counter of the client that left last

    def served(self, client: str) -> float:
        """Return the weighted tokens that were booked for a client."""
        return self._served.get(client, 0.0)

    def enter(self, client: str) -> None:
        """Book that one of the client's requests is at work."""
        if client not in self._requests:
            least = min((self._served[other] for other in self._requests), default=self._last_left)
            # guard: lift of who comes back
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
            running_output: generated tokens of requests at work that are not booked yet, by client.
        """
        lines: dict[str, deque[T]] = {}
        for one in waiting:
            lines.setdefault(client_of(one), deque()).append(one)
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
            one = lines[client].popleft()
            order.append(one)
            if lines[client]:
                heapq.heapreplace(heap, (served + PROMPT_WEIGHT * prompt_tokens_of(one), place, client))
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


def ahead_in_turn(waiting_of: Mapping[str, int], client: str, wanted: int) -> int:
    """Return the number of turns before the last of `wanted` more requests of a client, if clients alternate."""
    mine = waiting_of.get(client, 0)
    others = sum([min(count, mine + wanted) for other, count in waiting_of.items() if other != client])
    return mine + wanted - 1 + others


def slots_share(num_slots: int, num_clients: int) -> int:
    """Return the slots that each client may hold while all clients have work."""
    return max(1, num_slots // max(1, num_clients))
