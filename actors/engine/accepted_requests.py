"""AcceptedRequests: every request that a gateway has accepted, until its one final, whatever becomes of the engine.

    request = accepted.accept(wanted, now)
    for request in accepted.due():                     # send them to the engine
    for request, token in accepted.tokens(epoch, rows)   # give them to the callers
    request = accepted.final(epoch, request_id)        # the one final of each; None where it had one
    for request, error in accepted.lose(now):          # the engine died: these end, the others are due again

Knows neither sockets, clocks nor event loops: whoever drives it says what happened and does what it returns.

    WAITING --due--> SENT --next token--> BEGUN --final--> gone
       ^               |                    |
       +---------- the engine died ---------+

A request outlives its engine: its tokens are kept here, and the next engine goes on after the last of them.
Requests that had an engine which died are suspects: any of them may be the cause. Suspects are sent one at a time, the
next when the last has given a new token or ended. A suspect whose engine dies before that is poison: it ends with
engine_lost. So does a request that has had MAX_DEATHS engines, and one with delivered tokens when its deadline passes.
"""

import enum
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from genbatch.actors.batcher.messages import DrawnTokens
from genbatch.actors.engine.engine_wire import LinkError, TokenRow
from genbatch.proto.errors import DeadlineExceeded, EngineLost, GenbatchError, Unavailable
from genbatch.proto.messages import EmbedRequest, GenerateRequest, ScoreRequest, Token

# Poison is refused for so many seconds, and so many of its kinds are remembered.
POISON_S = 300.0
MAX_POISONS = 256
# Seconds that an engine has to end a request whose deadline has passed, before the gateway does.
DEADLINE_GRACE_S = 1.0
# What a refused caller is told while the engine is down: about a small model's load time.
RETRY_MS = 2000
# Engines that a request may have had when they died. One that gets on each time has not been shown to be the cause.
MAX_DEATHS = 4


# What of both is asked here: a deadline, and what makes two of them the same.
Wanted: TypeAlias = GenerateRequest | EmbedRequest | ScoreRequest


class Stage(enum.Enum):
    """Where an open request is."""

    WAITING = "waiting"  # to be sent, for the first time or again
    SENT = "sent"  # to the engine of this epoch, which has not shown a token of it
    BEGUN = "begun"  # it has


class TokenRecord:
    """What a choice has drawn, kept until its request has ended.

    Args:
        scored: whether the request asks for log-probs.
    """

    __slots__ = ("_call_ids", "_logprobs", "_scored", "_token_ids")

    def __init__(self, *, scored: bool) -> None:
        self._scored = scored
        self._token_ids = array("I")
        self._logprobs: list[tuple[float, dict[int, float]]] = []
        self._call_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, row: TokenRow) -> None:
        """Keeps the next token."""
        if self._scored:
            if row.logprob is None:
                raise LinkError(f"request {row.id}: a token without a log-prob")
            self._logprobs.append((row.logprob, row.top))
        self._token_ids.append(row.token_id)
        self._call_ids += [piece.id for piece in row.tool_calls if piece.id is not None]

    def drawn(self) -> DrawnTokens:
        """All of it, for the next engine."""
        return DrawnTokens(self._token_ids.tolist(), self._logprobs, self._call_ids)


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    """One accepted request.

    Args:
        id: its number on the link.
        request: as it was asked.
        caller: whoever drives this keeps here whom to answer.
        expires_at: when its deadline passes; None is never.
        is_streamed: whether its tokens are delivered as they come.
        wait_s: seconds that it may wait for an engine each time it waits, where it has no deadline; None is for ever.
        seed: what every engine draws by, where the request names no seed.
    """

    id: int
    request: Wanted
    caller: Any
    expires_at: float | None
    is_streamed: bool
    wait_s: float | None = None
    seed: int = 0
    give_up_at: float | None = None  # if it still waits then
    phase: Stage = Stage.WAITING
    deaths: int = 0  # of engines that had it
    records: dict[int, TokenRecord] = field(default_factory=dict)  # by choice

    @property
    def num_delivered(self) -> int:
        """Tokens that its caller has."""
        return sum(map(len, self.records.values())) if self.is_streamed else 0

    def record_of(self, choice: int) -> TokenRecord:
        """What a choice has drawn."""
        record = self.records.get(choice)
        if record is None:
            scored = isinstance(self.request, GenerateRequest) and self.request.logprobs is not None
            record = self.records[choice] = TokenRecord(scored=scored)
        return record

    def drawn(self) -> tuple[DrawnTokens, ...]:
        """What its choices have drawn; nothing where no engine has had it."""
        if not self.deaths:
            return ()
        return tuple(self.record_of(choice).drawn() for choice in range(self.request.n))

    def too_late(self, reason: str) -> GenbatchError:
        """The error of a request that reached its deadline while no engine was there."""
        delivered = self.num_delivered
        return EngineLost(reason, delivered) if delivered else DeadlineExceeded(reason)

    def wait(self, now: float) -> None:
        """From now on it waits for an engine."""
        self.phase = Stage.WAITING
        self.give_up_at = None if self.wait_s is None else now + self.wait_s

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed, or it has waited too long for an engine."""
        waits = self.phase is Stage.WAITING
        if waits and self.give_up_at is not None and now >= self.give_up_at:
            return True
        return self.expires_at is not None and now >= self.expires_at + (0.0 if waits else DEADLINE_GRACE_S)


class AcceptedRequests:
    """See the module's docstring.

    Args:
        max_waiting: sequences whose requests may wait while no engine is there; more are refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self.epoch = 0  # counts the engines; what one says after its end is dropped
        self.is_up = False
        self.counts = {"accepted": 0, "finals": 0, "replayed": 0, "lost": 0, "stale": 0}
        self._max_waiting = max_waiting
        self._entries: dict[int, AcceptedRequest] = {}
        self._due: dict[int, AcceptedRequest] = {}  # those that wait and are no suspects, in order
        self._suspects: dict[int, AcceptedRequest] = {}  # those that wait and are
        self._poisons: OrderedDict[bytes, float] = OrderedDict()  # when each is forgiven
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: AcceptedRequest) -> bool:
        return entry.id in self._entries

    def __iter__(self) -> Iterator[AcceptedRequest]:
        return iter(list(self._entries.values()))

    # Requests

    def accept(
        self,
        request: Wanted,
        now: float,
        *,
        caller: Any = None,
        is_streamed: bool = False,
        wait_s: float | None = None,
    ) -> AcceptedRequest:
        """Takes a request; it is due. `wait_s` counts where it has no deadline of its own.

        Raises:
            Unavailable: no engine is there, and enough wait for one.
            EngineLost: it is poison.
        """
        # guard: requests that wait for an engine
        if not self.is_up and self._num_sequences() + request.n > self._max_waiting:
            raise Unavailable("the engine is being restarted", retry_after_ms=RETRY_MS)
        self._check_poison(request, now)
        self._last_id += 1
        expires_at = None if request.deadline_s is None else now + request.deadline_s
        wait_s = wait_s if expires_at is None else None
        entry = AcceptedRequest(self._last_id, request, caller, expires_at, is_streamed, wait_s)
        entry.wait(now)
        self._entries[entry.id] = entry
        self._due[entry.id] = entry
        self.counts["accepted"] += 1
        return entry

    def due(self) -> list[AcceptedRequest]:
        """What is to be sent to the engine now; each counts as sent."""
        if not self.is_up:
            return []
        sent = list(self._due.values())
        self._due.clear()
        # guard: suspects one at a time
        if self._suspects and not any(entry.deaths and entry.phase is Stage.SENT for entry in self._entries.values()):
            sent.append(self._suspects.pop(next(iter(self._suspects))))
        for entry in sent:
            entry.phase = Stage.SENT
        return sent

    def drop(self, entry: AcceptedRequest) -> bool:
        """Its caller is gone, or was answered by the gateway; returns whether the engine is to be told."""
        # guard: one final
        if self._entries.pop(entry.id, None) is None:
            return False
        self._due.pop(entry.id, None)
        self._suspects.pop(entry.id, None)
        self.counts["finals"] += 1
        return entry.phase is not Stage.WAITING

    def expired(self, now: float) -> list[AcceptedRequest]:
        """Those whose deadline has passed without the engine having ended them; `drop` them and tell their callers."""
        return [entry for entry in self._entries.values() if entry.is_overdue(now)]

    # The engine

    def engine_up(self) -> int:
        """A new engine is there; returns its epoch."""
        assert not self.is_up, "the last engine has not been lost"
        self.is_up = True
        self.epoch += 1
        return self.epoch

    def tokens(self, epoch: int, rows: Iterable[TokenRow]) -> list[tuple[AcceptedRequest, Token]]:
        """The tokens to deliver: of this epoch, of requests that are open.

        Raises:
            LinkError: a token is missing, or comes twice.
        """
        # guard: epoch of tokens
        if epoch != self.epoch or not self.is_up:
            self.counts["stale"] += 1
            return []
        delivered = []
        entries = self._entries
        for row in rows:
            entry = entries.get(row.id)
            if entry is None:
                continue  # its caller left, and the engine does not know yet
            record = entry.record_of(row.choice)
            # guard: no gap in a stream
            if row.index != len(record) or entry.phase is Stage.WAITING:
                raise LinkError(f"request {row.id}: token {row.index} where {len(record)} was next")
            record.add(row)
            entry.phase = Stage.BEGUN
            if not entry.is_streamed:
                continue
            token = Token(
                text=row.text,
                token_id=row.token_id,
                index=row.index,
                logprob=row.logprob,
                choice=row.choice,
                top=row.top,
                reasoning=row.reasoning,
                tool_calls=row.tool_calls,
            )
            delivered.append((entry, token))
        return delivered

    def final(self, epoch: int, request_id: int) -> AcceptedRequest | None:
        """The entry that ends now; None where it has ended already, or an engine that is gone says so."""
        entry = self._open(epoch, request_id)
        if entry is not None:
            self.drop(entry)
        return entry

    def lose(self, now: float) -> list[tuple[AcceptedRequest, GenbatchError]]:
        """The engine has died: those that end now, and how; the others are due again."""
        self.is_up = False
        sent = [entry for entry in self._entries.values() if entry.phase is not Stage.WAITING]
        # The likeliest cause first: those that came last, and had not got as far as a token.
        sent.sort(key=lambda entry: (entry.phase is Stage.BEGUN, -entry.id))
        ended: list[tuple[AcceptedRequest, GenbatchError]] = []
        for entry in sent:
            entry.deaths += 1
            error = self._verdict(entry, now, alone=len(sent) == 1)
            if error is not None:
                del self._entries[entry.id]
                ended.append((entry, error))
                continue
            entry.wait(now)
            self._suspects[entry.id] = entry
            self.counts["replayed"] += 1
        self.counts["lost"] += len(ended)
        self.counts["finals"] += len(ended)
        return ended

    def check_integrity(self) -> None:
        """Every accepted request is open or has had its final, and every one that waits is due."""
        assert self.counts["accepted"] == self.counts["finals"] + len(self._entries), self.counts
        due = self._due.keys() | self._suspects.keys()
        waiting = {entry.id for entry in self._entries.values() if entry.phase is Stage.WAITING}
        assert waiting == due, waiting ^ due
        assert self.is_up or len(waiting) == len(self._entries), "sent to no engine"

    def _num_sequences(self) -> int:
        return sum([entry.request.n for entry in self._entries.values()])

    def _open(self, epoch: int, request_id: int) -> AcceptedRequest | None:
        # guard: epoch of finals
        if epoch != self.epoch or not self.is_up:
            self.counts["stale"] += 1
            return None
        return self._entries.get(request_id)

    def _verdict(self, entry: AcceptedRequest, now: float, *, alone: bool) -> GenbatchError | None:
        """How an entry that a dead engine had ends; None if it is replayed."""
        is_cause = entry.deaths > 1 and entry.phase is Stage.SENT
        # guard: replay no cause of two deaths
        if is_cause or entry.deaths >= MAX_DEATHS:
            if alone or is_cause:
                self._poisons[_fingerprint(entry.request)] = now + POISON_S
                while len(self._poisons) > MAX_POISONS:
                    self._poisons.popitem(last=False)
            return EngineLost(f"{entry.deaths} engines died while they worked on this request", entry.num_delivered)
        # guard: replay only within the deadline
        if entry.expires_at is not None and now >= entry.expires_at:
            return entry.too_late("the deadline passed, and the engine died")
        return None

    def _check_poison(self, request: Wanted, now: float) -> None:
        while self._poisons and next(iter(self._poisons.values())) <= now:
            self._poisons.popitem(last=False)
        if self._poisons:
            forgiven_at = self._poisons.get(_fingerprint(request))
            # guard: poison
            if forgiven_at is not None:
                retry_ms = round(1000 * (forgiven_at - now))
                raise EngineLost("the engine died twice while it worked on such a request", 0, retry_after_ms=retry_ms)


def _fingerprint(request: Wanted) -> bytes:
    """The same for requests that have the same effect on an engine, in the name of the same tenant."""
    plain = msgspec.structs.replace(request, deadline_s=None, priority=0)
    return hashlib.sha256(msgspec.msgpack.encode(plain)).digest()
