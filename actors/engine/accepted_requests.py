"""AcceptedRequests: every request that a gateway has accepted, until its one final message, over all engine restarts.

    request = accepted.accept(generate_request, now)
    for request in accepted.due():                     # send them to the engine
    if accepted.add(request, token): ...               # give the token to the caller
    accepted.drop(request)                             # the request has ended
    for request, error in accepted.lose(now):          # the engine died: these requests end, the others are due again

This file uses no socket, clock or event loop. Its user reports events and carries out the results.

    WAITING --due--> SENT --next token--> BEGUN --final--> gone
       ^               |                    |
       +---------- the engine died ---------+

A request outlives its engine: its tokens are kept here, and the next engine continues after the last token. Requests on
an engine that died are suspects, since any of them may be the cause. Suspects are sent one at a time. The next suspect
follows when the last has given a new token or ended. A suspect is poison if its engine dies before that: it ends with
engine_lost. The same error ends a request after MAX_DEATHS engines, and one with delivered tokens at its deadline.

A kill from outside is not the work of a request. All requests of that engine are pardoned and sent at once. Each
request is pardoned once, in case its work had caused the kill after all.
"""

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from genbatch.proto.errors import DeadlineExceeded, EngineLost, GenbatchError, MalformedMessage, Unavailable
from genbatch.proto.messages import DrawnTokens, EmbedRequest, GenerateRequest, ScoreRequest, Token, TokenRecord

# Poison is refused for POISON_S seconds, and the latest MAX_POISONS kinds of poison are remembered.
POISON_S = 300.0
MAX_POISONS = 256
# Seconds that the engine has to end a request past its deadline, before the gateway ends it.
DEADLINE_GRACE_S = 1.0
# The retry hint while the engine is down: about a small model's load time.
RETRY_MS = 2000
# Engine deaths after which a request ends. A request with progress on each engine is not shown to be the cause.
MAX_DEATHS = 4


# The requests for an engine. This file uses only their deadline, the number of their answers, and a fingerprint.
EngineRequest: TypeAlias = GenerateRequest | EmbedRequest | ScoreRequest


class Stage(enum.Enum):
    """The stage of an open request."""

    WAITING = "waiting"  # to be sent, for the first time or again
    SENT = "sent"  # sent to the current engine, without a token so far
    BEGUN = "begun"  # the current engine has sent a token


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    """One accepted request.

    Args:
        id: its number, by its arrival.
        request: the request as the caller sent it.
        caller: the object by which the user of this file answers the caller.
        expires_at: when its deadline passes; None for no deadline.
        is_streamed: whether its tokens are delivered as they come.
        wait_s: seconds of each wait for an engine, for a request without a deadline; None for no bound.
        seed: the seed on every engine, for a request without a seed of its own.
        brought: the tokens that its caller has of a lost stream, by choice.
        msgid: the number of its call at the current engine.
    """

    id: int
    request: EngineRequest
    caller: Any
    expires_at: float | None
    is_streamed: bool
    wait_s: float | None = None
    seed: int = 0
    brought: tuple[DrawnTokens, ...] = ()
    msgid: int = 0
    give_up_at: float | None = None  # when its wait for an engine ends
    phase: Stage = Stage.WAITING
    deaths: int = 0  # deaths of engines with this request
    is_suspect: bool = False  # whether it may have caused the last death
    is_pardoned: bool = False  # whether its first death was a kill from outside
    records: dict[int, TokenRecord] = field(default_factory=dict)  # by choice

    @property
    def num_delivered(self) -> int:
        """The number of tokens that its caller has."""
        return sum(len(self.record_of(choice)) for choice in range(self.request.n)) if self.is_streamed else 0

    def record_of(self, choice: int) -> TokenRecord:
        """Return the record of a choice's tokens."""
        record = self.records.get(choice)
        if record is None:
            scored = isinstance(self.request, GenerateRequest) and self.request.logprobs is not None
            drawn = self.brought[choice] if self.brought else None
            record = self.records[choice] = TokenRecord(scored=scored, drawn=drawn)
        return record

    def drawn(self) -> tuple[DrawnTokens, ...]:
        """Return the tokens of its choices for the next engine; an empty tuple for a new request."""
        if not self.deaths:
            return self.brought
        return tuple(self.record_of(choice).drawn() for choice in range(self.request.n))

    def too_late(self, reason: str) -> GenbatchError:
        """Return the error of a request that reached its deadline without an engine."""
        delivered = self.num_delivered
        return EngineLost(reason, delivered) if delivered else DeadlineExceeded(reason)

    def wait(self, now: float) -> None:
        """Begin to wait for an engine."""
        self.phase = Stage.WAITING
        self.give_up_at = None if self.wait_s is None else now + self.wait_s

    def is_overdue(self, now: float) -> bool:
        """Return whether its deadline has passed, or its wait for an engine was too long."""
        waits = self.phase is Stage.WAITING
        if waits and self.give_up_at is not None and now >= self.give_up_at:
            return True
        return self.expires_at is not None and now >= self.expires_at + (0.0 if waits else DEADLINE_GRACE_S)


class AcceptedRequests:
    """See the module's docstring.

    Args:
        max_waiting: sequences that may wait while no engine is connected; more are refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_engines = 0  # so far
        self.is_up = False
        self.counts = {"accepted": 0, "finals": 0, "replayed": 0, "lost": 0}
        self._max_waiting = max_waiting
        self._entries: dict[int, AcceptedRequest] = {}
        self._due: dict[int, AcceptedRequest] = {}  # waiting requests that are not suspects, in order
        self._suspects: dict[int, AcceptedRequest] = {}  # waiting suspects
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
        request: EngineRequest,
        now: float,
        *,
        caller: Any = None,
        is_streamed: bool = False,
        wait_s: float | None = None,
    ) -> AcceptedRequest:
        """Accept a request and make it due. `wait_s` applies to a request without a deadline of its own.

        Raises:
            Unavailable: no engine is connected, and too many sequences wait for one.
            EngineLost: the request is poison.
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
        """Return the requests to send to the engine now; each counts as sent."""
        if not self.is_up:
            return []
        sent = list(self._due.values())
        self._due.clear()
        # guard: suspects one at a time
        if self._suspects and not any(
            entry.is_suspect and entry.phase is Stage.SENT for entry in self._entries.values()
        ):
            sent.append(self._suspects.pop(next(iter(self._suspects))))
        for entry in sent:
            entry.phase = Stage.SENT
        return sent

    def drop(self, entry: AcceptedRequest) -> bool:
        """Remove a request after its caller has left or was answered; return whether the engine must be told."""
        # guard: one final
        if self._entries.pop(entry.id, None) is None:
            return False
        self._due.pop(entry.id, None)
        self._suspects.pop(entry.id, None)
        self.counts["finals"] += 1
        return entry.phase is not Stage.WAITING

    def expired(self, now: float) -> list[AcceptedRequest]:
        """Return the overdue requests that the engine has not ended; `drop` them and answer their callers."""
        return [entry for entry in self._entries.values() if entry.is_overdue(now)]

    # The engine

    def engine_up(self, *, was_killed: bool = False) -> None:
        """Note a new engine.

        Args:
            was_killed: whether the last engine was killed from outside the service.
        """
        assert not self.is_up, "the last engine has not been lost"
        self.is_up = True
        self.num_engines += 1
        if was_killed:
            self._pardon()

    def add(self, entry: AcceptedRequest, token: Token) -> bool:
        """Keep the next token of an open request; return whether the caller reads it.

        Raises:
            MalformedMessage: the next engine could not go on after such a token.
        """
        record = entry.record_of(token.choice)
        if record.scored and token.logprob is None:
            raise MalformedMessage(f"token {token.index} comes without a log-prob")
        record.add(token)
        entry.phase = Stage.BEGUN
        return entry.is_streamed

    def lose(self, now: float) -> list[tuple[AcceptedRequest, GenbatchError]]:
        """Note that the engine died; return the requests that end now, with their errors. The others are due again."""
        self.is_up = False
        sent = [entry for entry in self._entries.values() if entry.phase is not Stage.WAITING]
        # The likeliest causes come first: the latest requests without a token.
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
            entry.is_suspect = True
            self._suspects[entry.id] = entry
            self.counts["replayed"] += 1
        self.counts["lost"] += len(ended)
        self.counts["finals"] += len(ended)
        return ended

    def check_integrity(self) -> None:
        """Assert that each accepted request is open or has had its final message, and that each waiting one is due."""
        assert self.counts["accepted"] == self.counts["finals"] + len(self._entries), self.counts
        due = self._due.keys() | self._suspects.keys()
        waiting = {entry.id for entry in self._entries.values() if entry.phase is Stage.WAITING}
        assert waiting == due, waiting ^ due
        assert self.is_up or len(waiting) == len(self._entries), "sent to no engine"

    def _pardon(self) -> None:
        """Make the suspects due together. Those with tokens held slots, so they come first, and then the oldest."""
        pardoned = {}
        for id_, entry in sorted(self._suspects.items(), key=lambda item: (not item[1].records, item[0])):
            # guard: pardoned once
            if not entry.is_pardoned:
                entry.is_suspect, entry.is_pardoned = False, True
                pardoned[id_] = self._suspects.pop(id_)
        self._due = pardoned | self._due

    def _num_sequences(self) -> int:
        return sum([entry.request.n for entry in self._entries.values()])

    def _verdict(self, entry: AcceptedRequest, now: float, *, alone: bool) -> GenbatchError | None:
        """Return the error of a request after its engine died; None if it is replayed."""
        is_cause = entry.is_suspect and entry.phase is Stage.SENT
        # guard: replay no cause of two deaths
        if is_cause or entry.deaths - entry.is_pardoned >= MAX_DEATHS:
            if alone or is_cause:
                self._poisons[_fingerprint(entry.request)] = now + POISON_S
                while len(self._poisons) > MAX_POISONS:
                    self._poisons.popitem(last=False)
            return EngineLost(f"{entry.deaths} engines died while they worked on this request", entry.num_delivered)
        # guard: replay only within the deadline
        if entry.expires_at is not None and now >= entry.expires_at:
            return entry.too_late("the deadline passed, and the engine died")
        return None

    def _check_poison(self, request: EngineRequest, now: float) -> None:
        while self._poisons and next(iter(self._poisons.values())) <= now:
            self._poisons.popitem(last=False)
        if self._poisons:
            forgiven_at = self._poisons.get(_fingerprint(request))
            # guard: poison
            if forgiven_at is not None:
                retry_ms = round(1000 * (forgiven_at - now))
                raise EngineLost(
                    "the engine died twice while it worked on a request like this one", 0, retry_after_ms=retry_ms
                )


def _fingerprint(request: EngineRequest) -> bytes:
    """Return the same digest for requests of one tenant with the same effect on an engine."""
    plain = msgspec.structs.replace(request, deadline_s=None, priority=0)
    if isinstance(plain, GenerateRequest):  # clients draw a seed for a request without one
        plain = msgspec.structs.replace(plain, seed=None)
    return hashlib.sha256(msgspec.msgpack.encode(plain)).digest()
