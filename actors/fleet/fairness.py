"""Fairness over a fleet: account for the tokens of clients over all replicas, and order requests without a replica.

    owed = accounts.tell("alice", "r1")      # sent with the request: tokens of alice that r1 does not know of yet
    accounts.book("alice", "r1", tokens)     # after the answer
    accounts.take_back("alice", "r1", owed)  # if r1 never got the request

Each replica orders its waiting requests by the tokens that their clients had (FairShare). A replica cannot know of
tokens from other replicas. So with each request the gateway sends the tokens that its client had elsewhere since the
last request. A replica that hears from all gateways knows the client's tokens of the whole fleet. Gateways need not
talk to one another, and replicas need not ask.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import trio

from genbatch.actors.scheduling.request import LOCALHOST, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare, most_waiting
from genbatch.proto.errors import QueueFull
from genbatch.proto.validation import MAX_PAYER_LENGTH

# The most clients with counts; the least recently active clients are forgotten, and start again at zero.
MAX_ACCOUNTS = 4096
# One client's share of the places in the line that the other clients leave free.
MAX_SHARE = 0.5


def weighted(prompt_tokens: int, output_tokens: int) -> float:
    """Return the weighted tokens of a request."""
    return PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens


def account_in_fleet(gateway: str, account: str) -> str:
    """Return a gateway account's name at every replica: tenants and machines have the same name at all gateways."""
    if account.startswith(("tenant:", "host:")) and account != LOCALHOST:
        return account[-MAX_PAYER_LENGTH:]
    return f"{gateway}/{account}"[-MAX_PAYER_LENGTH:]


@dataclass(slots=True)
class _Account:
    total: float = 0.0  # weighted tokens of all replicas
    known: dict[str, float] = field(default_factory=dict)  # by replica: the part of `total` that it knows of


class Accounts:
    """The tokens that each client had through this gateway.

    Args:
        max_accounts: the most clients to keep.
    """

    def __init__(self, max_accounts: int = MAX_ACCOUNTS) -> None:
        self.max_accounts = max_accounts
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def tell(self, name: str, replica: str) -> float:
        """Return the tokens that the replica does not know of yet, and count them as known."""
        account = self._of(name)
        owed = account.total - account.known.get(replica, 0.0)
        account.known[replica] = account.total
        return owed

    def take_back(self, name: str, replica: str, owed: float) -> None:
        """Count the tokens as unknown again, after the replica did not get them."""
        account = self._of(name)
        account.known[replica] = account.known.get(replica, 0.0) - owed

    def book(self, name: str, replica: str, tokens: float) -> None:
        """Book a client's tokens of a replica, which counts them itself, too."""
        account = self._of(name)
        account.total += tokens
        account.known[replica] = account.known.get(replica, 0.0) + tokens

    def forget_replica(self, replica: str) -> None:
        """Forget a replica that has left, with its knowledge."""
        for account in self._accounts.values():
            account.known.pop(replica, None)

    def _of(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
            while len(self._accounts) > self.max_accounts:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(name)
        return account


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the line.

    Args:
        account: the client's account.
        tokens: approximate tokens of its prompt.
        turn: orders one client's own requests: the priority, then the arrival.
    """

    account: str
    tokens: int
    turn: tuple[int, int]
    called: trio.Event = field(default_factory=trio.Event)


class Line:
    """Requests without a replica; the clients take turns, and no later request overtakes the line.

    Args:
        limit: the most waiting requests.
        retry_ms: the retry hint of a refusal.
    """

    def __init__(self, limit: int, retry_ms: int) -> None:
        self.limit, self.retry_ms = limit, retry_ms
        self._waiting: list[Waiter] = []
        self._num_called = 0  # called, and not placed yet
        self._fair = FairShare()

    def __len__(self) -> int:
        return len(self._waiting) + self._num_called

    async def wait(self, waiter: Waiter, expires_at: float) -> bool:
        """Wait for the turn; return False if `expires_at` passes first.

        Args:
            expires_at: on trio's clock; may be infinite.

        Raises:
            QueueFull: too many requests wait, or too many of this client.
        """
        self._check(waiter.account)
        waiter.called = trio.Event()
        self._waiting.append(waiter)
        self._fair.enter(waiter.account)
        try:
            with trio.move_on_at(expires_at) if math.isfinite(expires_at) else trio.CancelScope():
                await waiter.called.wait()
            return waiter.called.is_set()
        finally:
            self._fair.leave(waiter.account, output_tokens=0)
            if waiter.called.is_set():
                self._num_called -= 1
            else:
                self._waiting.remove(waiter)

    def call(self, room: int) -> None:
        """Let `room` requests go, in turn."""
        room -= self._num_called
        if room <= 0 or not self._waiting:
            return
        self._waiting.sort(key=lambda waiter: waiter.turn)
        for waiter in self._fair.in_turn(self._waiting, _account, _tokens, {})[:room]:
            self._waiting.remove(waiter)
            self._fair.charge(waiter.account, prompt_tokens=waiter.tokens)
            self._num_called += 1
            waiter.called.set()

    def _check(self, account: str) -> None:
        mine = sum(waiter.account == account for waiter in self._waiting)
        count = len(self._waiting)
        if count >= self.limit:
            raise QueueFull("no replica is available, and the queue for one is full", retry_after_ms=self.retry_ms)
        most = most_waiting(self.limit, count - mine, MAX_SHARE)
        if mine and mine + 1 > most:  # a client's only request needs a place and no share
            raise QueueFull(
                f"no replica is available, and this client has {mine} waiting requests; at most {most:g} may wait: "
                "the other places are for other clients",
                retry_after_ms=self.retry_ms,
            )


def _account(waiter: Waiter) -> str:
    return waiter.account


def _tokens(waiter: Waiter) -> int:
    return waiter.tokens
