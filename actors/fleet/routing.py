"""Routers: choose the replica for a request.

    router = build_router("prefix")
    replica = router.route(request, roster)      # pure: equal arguments give the same replica
    router.learn(replica.name, request.blocks)   # the blocks that this replica now holds, or reports to hold

    request.blocks --> PrefixMap --> replicas that hold the prompt's beginning --+
                                                                                 +--> least work in front of the answer
    request.number --> sample of the roster -------------------------------------+

A router sees no text. A gateway names the pieces of a prompt with `content_blocks`, which needs no tokenizer. The
tenant is part of each name, so a tenant's request never follows another tenant's prompt.

With more than `SCAN` replicas, a router looks at `SAMPLE` of them, drawn by the request's number. A few choices
balance nearly as well as all, and their cost does not grow with the fleet. It also keeps gateways with the same
outdated report of an idle replica from all choosing that replica.

`wanted_replicas` computes the size of a fleet from the waiting and the open requests.
"""

import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from typing import overload

from genbatch.proto.messages import GenerateRequest

# Bytes of text, or token ids, per name: about the same length of prompt.
BLOCK_BYTES = 256
BLOCK_TOKENS = 64
# The most named blocks of a prompt: 8,192 tokens. A longer shared prefix does not change the choice.
MAX_BLOCKS = 128
# A router looks at all of up to SCAN replicas, and at SAMPLE of more.
SCAN = 32
SAMPLE = 8
# The load of a decoding sequence, in waiting tokens: it holds a slot and slows every step.
OPEN_TOKENS = 32
# More than any prefix saves, so that a replica that would refuse the request is the last choice.
FULL = 1 << 40
# The most names in a PrefixMap: some 100 MB with their holders, for 16 million tokens of different prompts.
MAX_NAMES = 262_144
# Replicas remembered per name. A prefix with more holders is present nearly everywhere.
MAX_HOLDERS = 8


class RouterError(Exception):
    """A router cannot be built, or no replica takes requests; the message has the reason."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The parts of a request that a router sees.

    Args:
        number: counts the requests of a gateway.
        blocks: names of the prompt's pieces from its beginning, see `content_blocks`.
        prompt_tokens: approximate tokens of the prompt.
        block_tokens: approximate tokens per name.
    """

    number: int
    blocks: tuple[int, ...] = ()
    prompt_tokens: int = 1
    block_tokens: int = BLOCK_TOKENS


@dataclass(slots=True)
class ReplicaView:
    """A replica's last report, and the requests sent there since.

    Args:
        name: its name in the fleet, never reused for another replica.
        tokens_waiting: its prompt tokens that are not evaluated yet.
        num_open: its open requests.
        room: requests that it still takes; a full replica is chosen only when all are full.
        takes_requests: false while it starts or drains.
    """

    name: str
    tokens_waiting: int = 0
    num_open: int = 0
    room: int = 1
    takes_requests: bool = True

    @property
    def load(self) -> int:
        """The work in front of a new request at this replica, in prompt tokens."""
        load = self.tokens_waiting + OPEN_TOKENS * self.num_open
        return load if self.room > 0 else load + FULL


class Roster(Sequence[ReplicaView]):
    """The replicas that take requests, by index and by name."""

    def __init__(self, replicas: Iterable[ReplicaView] = ()) -> None:
        self._replicas = [replica for replica in replicas if replica.takes_requests]
        self._by_name = {replica.name: replica for replica in self._replicas}

    def __len__(self) -> int:
        return len(self._replicas)

    @overload
    def __getitem__(self, place: int) -> ReplicaView: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[ReplicaView]: ...
    def __getitem__(self, place: int | slice) -> ReplicaView | Sequence[ReplicaView]:
        return self._replicas[place]

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas)

    def get(self, name: str) -> ReplicaView | None:
        """Return the replica of this name; None if it takes no requests."""
        return self._by_name.get(name)

    def sample(self, number: int) -> Sequence[ReplicaView]:
        """Return all replicas, or a sample drawn by `number` from more than `SCAN`."""
        count = len(self._replicas)
        if count <= SCAN:
            return self._replicas
        state, drawn = number, []
        for _ in range(SAMPLE):
            state, place = _drawn(state, count)
            drawn.append(self._replicas[place])
        return drawn


class Router(ABC):
    """Chooses replicas; subclass it and name the class as "module:Class". It is built without arguments."""

    @abstractmethod
    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """Return the replica that will serve the request; this method changes nothing.

        Raises:
            RouterError: no replica takes requests.
        """

    def learn(self, name: str, blocks: Sequence[int]) -> None:
        """Learn that a replica holds these pieces of a prompt, or will hold them soon. The default ignores it."""
        del name, blocks


class RoundRobin(Router):
    """Each replica in turn, regardless of its load."""

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """See Router."""
        _need_replicas(replicas)
        return replicas[request.number % len(replicas)]


class LeastTokens(Router):
    """The replica with the least work in front, of all or of a sample."""

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """See Router."""
        _need_replicas(replicas)
        return _least(replicas.sample(request.number), request.number)


class PrefixAffinity(Router):
    """The replica with the soonest answer: a prefix that a replica holds is work that it saves.

    The sum bounds the load. A replica with the prefix wins only while it has less extra work than the prefix saves. So
    a hot prefix spreads to a second replica as soon as that one is faster, and then both hold it.

    Args:
        saved_weight: tokens of work in front per saved token. Above 1, a request waits a little longer so that the
            fleet computes less, and other requests start sooner.
        max_names: names held in the map.
    """

    def __init__(self, saved_weight: float = 1.5, max_names: int = MAX_NAMES) -> None:
        self.saved_weight = saved_weight
        self.map = PrefixMap(max_names)

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """See Router."""
        _need_replicas(replicas)
        best = _least(replicas.sample(request.number), request.number)
        cost: float = best.load
        depths = self.map.depths(request.blocks)
        if best.name in depths:
            cost -= self._saved(request, depths[best.name])
        for name, depth in depths.items():
            replica = replicas.get(name)
            if replica is not None:
                its_cost = replica.load - self._saved(request, depth)
                if its_cost < cost:
                    best, cost = replica, its_cost
        return best

    def learn(self, name: str, blocks: Sequence[int]) -> None:
        """See Router."""
        self.map.learn(name, blocks)

    def _saved(self, request: RouteRequest, depth: int) -> float:
        return self.saved_weight * min(depth * request.block_tokens, request.prompt_tokens - 1)


class PrefixMap:
    """An approximate map from pieces of prompts to the replicas that hold them, with least-recently-used eviction.

    A replica may have evicted a piece, may hold more pieces, or may have left: the caller checks which replicas exist.
        A
    wrong entry costs a prefill, and never an answer.

    Args:
        max_names: most names held.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self.max_names = max_names
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, name: str, blocks: Sequence[int]) -> None:
        """Note that `name` holds these blocks, as the most recent holder of each."""
        holders_of = self._holders
        # Go from the end, so that a prompt's beginning, which more requests share, is evicted last.
        for block in reversed(blocks):
            holders = holders_of.get(block)
            if holders is None:
                holders_of[block] = {name: None}
                continue
            holders_of.move_to_end(block)
            holders.pop(name, None)
            holders[name] = None
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(holders_of) > self.max_names:
            holders_of.popitem(last=False)

    def depths(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return for each replica the number of leading blocks that it holds."""
        depths: dict[str, int] = {}
        for place, block in enumerate(blocks, start=1):
            holders = self._holders.get(block)
            if holders is None:
                break
            for name in holders:
                depths[name] = place
        return depths


ROUTERS: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_tokens": LeastTokens, "prefix": PrefixAffinity}


def build_router(name: str) -> Router:
    """Return the router of this name: one of `ROUTERS`, or "module:Class".

    Raises:
        RouterError: the name leads to no router class, or the class cannot be built without arguments.
    """
    if name in ROUTERS:
        return ROUTERS[name]()
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise RouterError(f'router {name!r}: neither one of {", ".join(map(repr, ROUTERS))} nor "module:Class"')
    try:
        named = getattr(import_module(module_name), class_name, None)
    except Exception as error:  # a user's module may raise anything
        raise RouterError(f"router {name!r}: module {module_name!r} cannot be imported: {error}") from error
    if not (inspect.isclass(named) and issubclass(named, Router)) or inspect.isabstract(named):
        raise RouterError(f"router {name!r}: {class_name} of {module_name!r} is no subclass of Router with a route()")
    try:
        built: Router = named()
    except TypeError as error:
        raise RouterError(f"router {name!r}: {class_name} cannot be built without arguments: {error}") from error
    return built


def content_blocks(request: GenerateRequest, tenant: str) -> RouteRequest:
    """Return the parts of a request that a router sees, with number 0, which the gateway replaces.

    The names are hashes of bytes, or of token ids for a prompt of token ids. Each name covers all pieces before it,
    too. Equal text gives equal tokens, so a replica that holds a named piece holds its KV, up to the last piece.
    """
    if request.token_ids is None:
        kind, content, size = ("text" if request.messages is None else "messages"), _text(request), BLOCK_BYTES
    else:
        # A later check refuses ids beyond 32 bits; here such an id needs a name only.
        content = b"".join((token & 0xFFFFFFFF).to_bytes(4, "little") for token in request.token_ids)
        kind, size = "ids", 4 * BLOCK_TOKENS
    names = []
    # The kind, the tenant and the adapter seed the hash of the first piece.
    owner = tenant if request.model is None else f"{tenant} {request.model}"
    parent = blake2b(f"{kind} {owner}".encode(), digest_size=8).digest()
    for start in range(0, min(len(content), MAX_BLOCKS * size) - size + 1, size):
        parent = blake2b(content[start : start + size], digest_size=8, key=parent).digest()
        names.append(int.from_bytes(parent, "little"))
    return RouteRequest(0, tuple(names), max(1, len(content) * BLOCK_TOKENS // size))


def _text(request: GenerateRequest) -> bytes:
    if request.prompt is not None:
        return request.prompt.encode(errors="surrogatepass")
    # Prefix each part with its length, so that different lists of messages never give the same text.
    parts = [
        text.encode(errors="surrogatepass")
        for message in request.messages or ()
        for text in (message.role, message.content)
    ]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _least(replicas: Sequence[ReplicaView], number: int) -> ReplicaView:
    """Return the least loaded replica; equally loaded ones take turns."""
    first = number % len(replicas)
    best = replicas[first]
    least = best.load
    for place in range(1, len(replicas)):
        replica = replicas[(first + place) % len(replicas)]
        load = replica.load
        if load < least:
            best, least = replica, load
    return best


def _drawn(state: int, count: int) -> tuple[int, int]:
    """Return the next state and an index below `count`, by splitmix64, which a request's number seeds well."""
    state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return state, (mixed ^ (mixed >> 31)) % count


def _need_replicas(replicas: Roster) -> None:
    if not len(replicas):
        raise RouterError("no replica takes requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """The rule by which a fleet grows and shrinks.

    Args:
        min_replicas, max_replicas: bounds; with a minimum of 0 an idle fleet stops, and the next request waits for a
            start.
        tokens_per_replica: prompt tokens that may wait for each replica; more tokens need another replica.
        idle_s: seconds for which fewer replicas must have sufficed before one is stopped.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    tokens_per_replica: int = 4096
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            RouterError: a bound is out of range.
        """
        if not 0 <= self.min_replicas <= self.max_replicas or not self.max_replicas:
            raise RouterError(
                f"replicas: {self.min_replicas} to {self.max_replicas} is not a range with at least one replica"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load of a fleet.

    Args:
        replicas: the number of replicas, including starting ones.
        slots: the slots of one replica.
        open: requests in replicas.
        tokens_waiting: prompt tokens that are not evaluated yet.
        without_replica: requests without a replica.
    """

    replicas: int
    slots: int
    open: int
    tokens_waiting: int
    without_replica: int


def wanted_replicas(rule: ScaleRule, load: FleetLoad) -> int:
    """Return the number of replicas for this load, within the rule's bounds.

    One replica serves as many open requests as three quarters of its slots, which keeps decodes fast. It serves as many
    waiting tokens as the rule allows, which keeps first tokens fast.
    """
    by_slots = -(-4 * load.open // (3 * load.slots))
    by_tokens = -(-load.tokens_waiting // rule.tokens_per_replica)
    count = max(by_slots, by_tokens, 1 if load.without_replica else 0)
    return min(rule.max_replicas, max(rule.min_replicas, count))
