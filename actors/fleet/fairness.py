"""Fairness over a fleet: what its clients had of all replicas together, and whose turn it is while there is none.

    owed = accounts.tell("alice", "r1")      # goes along with her request: what r1 does not know yet of what she had
    accounts.book("alice", "r1", tokens)     # its answer is there
    accounts.take_back("alice", "r1", owed)  # or r1 never had it

Each replica orders its waiting requests by what their clients had (FairShare). What a client had elsewhere it cannot
know, so a gateway says with each request what its client had by way of this gateway at other replicas since it last
said so. A replica that is told by all gateways knows what the client had of the whole fleet: gateways need not talk
to one another, and nobody asks for anything.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import trio

from genbatch.actors.batcher.messages import LOCALHOST
from genbatch.actors.scheduling.fair_share import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare, most_waiting
from genbatch.proto.errors import QueueFull
from genbatch.proto.validation import MAX_PAYER_LENGTH

# Clients whose counts are kept; those unheard of for longest are forgotten, and begin anew.
MAX_ACCOUNTS = 4096
# Share of the places in the line that one client may fill, of those that others leave.
MAX_SHARE = 0.5


def weighted(prompt_tokens: int, output_tokens: int) -> float:
    """What a request counts for."""
    return PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens


def account_in_fleet(gateway: str, account: str) -> str:
    """The name of a gateway's account at every replica: tenants and machines are the same at all gateways."""
    if account.startswith(("tenant:", "host:")) and account != LOCALHOST:
        return account[-MAX_PAYER_LENGTH:]
    return f"{gateway}/{account}"[-MAX_PAYER_LENGTH:]


@dataclass(slots=True)
class _Account:
    total: float = 0.0  # weighted tokens, of all replicas
    known: dict[str, float] = field(default_factory=dict)  # by replica, how many of them it knows of


class Accounts:
    """What each client had, by way of this gateway.

    Args:
        max_accounts: how many are kept.
    """

    def __init__(self, max_accounts: int = MAX_ACCOUNTS) -> None:
        self.max_accounts = max_accounts
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def tell(self, name: str, replica: str) -> float:
        """What the replica does not know of yet; from now on it does."""
        account = self._of(name)
        owed = account.total - account.known.get(replica, 0.0)
        account.known[replica] = account.total
        return owed

    def take_back(self, name: str, replica: str, owed: float) -> None:
        """The replica was not told after all."""
        account = self._of(name)
        account.known[replica] = account.known.get(replica, 0.0) - owed

    def book(self, name: str, replica: str, tokens: float) -> None:
        """The client had these of a replica, which counts them itself."""
        account = self._of(name)
        account.total += tokens
        account.known[replica] = account.known.get(replica, 0.0) + tokens

    def forget_replica(self, replica: str) -> None:
        """It is gone, and what it knew with it."""
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
        account: whose.
        tokens: of its prompt, about.
        turn: orders one client's own requests: the priority, then the arrival.
    """

    account: str
    tokens: int
    turn: tuple[int, int]
    called: trio.Event = field(default_factory=trio.Event)


class Line:
    """Requests for which there is no replica; the clients take turns, and nobody who comes later overtakes it.

    Args:
        limit: how many may wait.
        retry_ms: what a refused one is told.
    """

    def __init__(self, limit: int, retry_ms: int) -> None:
        self.limit, self.retry_ms = limit, retry_ms
        self._waiting: list[Waiter] = []
        self._num_called = 0  # and not on their way yet
        self._fair = FairShare()

    def __len__(self) -> int:
        return len(self._waiting) + self._num_called

    async def wait(self, one: Waiter, expires_at: float) -> bool:
        """Waits to be called; False if the time passes before.

        Args:
            expires_at: on trio's clock; may be infinite.

        Raises:
            QueueFull: enough wait, or enough of this client's.
        """
        self._check(one.account)
        one.called = trio.Event()
        self._waiting.append(one)
        self._fair.enter(one.account)
        try:
            with trio.move_on_at(expires_at) if math.isfinite(expires_at) else trio.CancelScope():
                await one.called.wait()
            return one.called.is_set()
        finally:
            self._fair.leave(one.account, output_tokens=0)
            if one.called.is_set():
                self._num_called -= 1
            else:
                self._waiting.remove(one)

    def call(self, room: int) -> None:
        """Lets so many go, in turn."""
        room -= self._num_called
        if room <= 0 or not self._waiting:
            return
        self._waiting.sort(key=lambda one: one.turn)
        for one in self._fair.in_turn(self._waiting, _account, _tokens, {})[:room]:
            self._waiting.remove(one)
            self._fair.charge(one.account, prompt_tokens=one.tokens)
            self._num_called += 1
            one.called.set()

    def _check(self, account: str) -> None:
        mine = sum(one.account == account for one in self._waiting)
        count = len(self._waiting)
        if count >= self.limit:
            raise QueueFull("no replica is there, and enough requests wait for one", retry_after_ms=self.retry_ms)
        most = most_waiting(self.limit, count - mine, MAX_SHARE)
        if mine and mine + 1 > most:  # a client's only request needs a place and no share
            raise QueueFull(
                f"no replica is there, {mine} requests of this client wait for one, and {most:g} may: the other places "
                "are for other clients",
                retry_after_ms=self.retry_ms,
            )


def _account(one: Waiter) -> str:
    return one.account


def _tokens(one: Waiter) -> int:
    return one.tokens
