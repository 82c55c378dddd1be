"""Routers: which replica a request goes to.

    router = build_router("prefix")
    replica = router.route(request, roster)      # pure: asks the same twice, gets the same twice
    router.learn(replica.name, request.blocks)   # what that replica now holds, or has reported to hold

    request.blocks --> PrefixMap --> replicas that hold the prompt's beginning --+
                                                                                 +--> least work in front of the answer
    request.number --> sample of the roster -------------------------------------+

A router sees no text. A gateway names the pieces of a prompt with `content_blocks`, which needs no tokenizer; the
tenant is part of each name, so a tenant's request never follows another tenant's prompt.

Past `SCAN` replicas a router looks at `SAMPLE` of them, drawn by the request's number. That is the power of a few
choices: nearly as even as looking at all, at a cost that does not grow with the fleet, and gateways that all have
the same old news of one idle replica do not all run there.

How many replicas there should be is a pure function, too: of what waits and what is open.
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

# Bytes of text, or token ids, that one name stands for. About the same amount of prompt.
BLOCK_BYTES = 256
BLOCK_TOKENS = 64
# Blocks of a prompt that are named: 8,192 tokens. Whoever shares that much has said enough.
MAX_BLOCKS = 128
# Replicas that are all looked at, and how many of more.
SCAN = 32
SAMPLE = 8
# What a sequence that decodes counts for, in tokens that wait: it holds a slot and slows every step.
OPEN_TOKENS = 32
# More than any prefix saves: where a request would be refused is the last place to send it.
FULL = 1 << 40
# Names that a PrefixMap holds: some 100 MB with their holders, 16 million tokens of different prompts.
MAX_NAMES = 262_144
# Replicas remembered for a name. A prefix that more of them hold is everywhere anyway.
MAX_HOLDERS = 8


class RouterError(Exception):
    """A router cannot be built, or there is nobody to route to; the message says why."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a router sees of a request.

    Args:
        number: counts the requests of a gateway.
        blocks: names of the prompt's pieces from its beginning, see `content_blocks`.
        prompt_tokens: of the prompt, about.
        block_tokens: tokens that one name stands for, about.
    """

    number: int
    blocks: tuple[int, ...] = ()
    prompt_tokens: int = 1
    block_tokens: int = BLOCK_TOKENS


@dataclass(slots=True)
class ReplicaView:
    """What is known of a replica: its last report, and what was sent there since.

    Args:
        name: its name in the fleet, never used again for another one.
        tokens_waiting: prompt tokens there that nobody has computed yet.
        num_open: requests there.
        room: requests that it still takes; a full one is asked only when all are.
        takes_requests: not while it starts or drains.
    """

    name: str
    tokens_waiting: int = 0
    num_open: int = 0
    room: int = 1
    takes_requests: bool = True

    @property
    def load(self) -> int:
        """Work in front of a request that is sent there now, in prompt tokens."""
        load = self.tokens_waiting + OPEN_TOKENS * self.num_open
        return load if self.room > 0 else load + FULL


class Roster(Sequence[ReplicaView]):
    """The replicas that take requests, by place and by name."""

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
        """The replica of this name, None if it takes no requests."""
        return self._by_name.get(name)

    def sample(self, number: int) -> Sequence[ReplicaView]:
        """All replicas, or of more than `SCAN` some that `number` draws."""
        count = len(self._replicas)
        if count <= SCAN:
            return self._replicas
        state, drawn = number, []
        for _ in range(SAMPLE):
            state, place = _drawn(state, count)
            drawn.append(self._replicas[place])
        return drawn


class Router(ABC):
    """Subclass it, and name the class as "module:Class"; it is built without arguments."""

    @abstractmethod
    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """The replica that is to serve the request; changes nothing.

        Raises:
            RouterError: no replica takes requests.
        """

    def learn(self, name: str, blocks: Sequence[int]) -> None:
        """A replica holds these pieces of a prompt, or will have soon. A router that has no use for it forgets it."""
        del name, blocks


class RoundRobin(Router):
    """One after the other, whatever they have to do."""

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """See Router."""
        _need_replicas(replicas)
        return replicas[request.number % len(replicas)]


class LeastTokens(Router):
    """The replica with the least work in front, of all or of a few that are drawn."""

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        """See Router."""
        _need_replicas(replicas)
        return _least(replicas.sample(request.number), request.number)


class PrefixAffinity(Router):
    """The replica that answers first: a prompt's beginning that it holds is work that it does not have.

    The load bound is in the sum: a replica that holds the prefix wins by no more work than the prefix saves, so a hot
    prefix spreads to a second replica as soon as it would be quicker there, and then both hold it.

    Args:
        saved_weight: tokens of work in front that a token held is worth. More than 1 makes a request wait a little for
            the sake of the others, whose turn comes sooner as the fleet computes less.
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
    """Which replicas hold which pieces of prompts, about: the least lately used names are forgotten first.

    A replica may have given up what stands here, may hold more, and may be gone: whoever asks knows who is there. Each
    costs a prefill, never an answer.

    Args:
        max_names: most names held.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self.max_names = max_names
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, name: str, blocks: Sequence[int]) -> None:
        """`name` holds these blocks; it is the freshest holder of each."""
        holders_of = self._holders
        # From the end, so that a prompt's beginning, which more requests share, is forgotten last.
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
        """Per replica that holds the beginning of these blocks, how many of them."""
        found: dict[str, int] = {}
        for place, block in enumerate(blocks, start=1):
            holders = self._holders.get(block)
            if holders is None:
                break
            for name in holders:
                found[name] = place
        return found


ROUTERS: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_tokens": LeastTokens, "prefix": PrefixAffinity}


def build_router(name: str) -> Router:
    """The router of this name: one of `ROUTERS`, or "module:Class".

    Raises:
        RouterError: the name leads nowhere, or to something that is no router, or is not built without arguments.
    """
    if name in ROUTERS:
        return ROUTERS[name]()
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise RouterError(f'router {name!r}: neither one of {", ".join(map(repr, ROUTERS))} nor "module:Class"')
    try:
        named = getattr(import_module(module_name), class_name, None)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise RouterError(f"router {name!r}: module {module_name!r} cannot be imported: {error}") from error
    if not (inspect.isclass(named) and issubclass(named, Router)) or inspect.isabstract(named):
        raise RouterError(f"router {name!r}: {class_name} of {module_name!r} is no subclass of Router with a route()")
    try:
        built: Router = named()
    except TypeError as error:
        raise RouterError(f"router {name!r}: {class_name} cannot be built without arguments: {error}") from error
    return built


def content_blocks(request: GenerateRequest, tenant: str) -> RouteRequest:
    """What a router sees of a request; number 0, which the gateway replaces.

    The names are of bytes, or of token ids where the prompt is those, and each stands for all before it, too. Equal
    text gives equal tokens, so replicas that hold a named piece hold its KV, up to the last piece.
    """
    if request.token_ids is None:
        kind, content, size = ("text" if request.messages is None else "messages"), _text(request), BLOCK_BYTES
    else:
        # Ids beyond 32 bits are refused later; here they only have to have a name.
        content = b"".join((token & 0xFFFFFFFF).to_bytes(4, "little") for token in request.token_ids)
        kind, size = "ids", 4 * BLOCK_TOKENS
    names = []
    # The kind, the tenant and the adapter are the parent of the first piece.
    owner = tenant if request.model is None else f"{tenant} {request.model}"
    parent = blake2b(f"{kind} {owner}".encode(), digest_size=8).digest()
    for start in range(0, min(len(content), MAX_BLOCKS * size) - size + 1, size):
        parent = blake2b(content[start : start + size], digest_size=8, key=parent).digest()
        names.append(int.from_bytes(parent, "little"))
    return RouteRequest(0, tuple(names), max(1, len(content) * BLOCK_TOKENS // size))


def _text(request: GenerateRequest) -> bytes:
    if request.prompt is not None:
        return request.prompt.encode(errors="surrogatepass")
    # Each part with its length, so that no two lists of messages are one text.
    parts = [
        text.encode(errors="surrogatepass")
        for message in request.messages or ()
        for text in (message.role, message.content)
    ]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _least(replicas: Sequence[ReplicaView], number: int) -> ReplicaView:
    """The least loaded; equal ones take turns."""
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
    """The next state and a place below `count`: splitmix64, which a request's number seeds well."""
    state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return state, (mixed ^ (mixed >> 31)) % count


def _need_replicas(replicas: Roster) -> None:
    if not len(replicas):
        raise RouterError("no replica takes requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """When a fleet grows and shrinks.

    Args:
        min_replicas, max_replicas: bounds; a minimum of 0 lets an idle fleet go, and the first request waits for one.
        tokens_per_replica: prompt tokens that may wait for each replica; what is more wants another one.
        idle_s: seconds for which fewer replicas must have sufficed before one is let go.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    tokens_per_replica: int = 4096
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises:
        RouterError: a bound is out of range.
        """
        if not 0 <= self.min_replicas <= self.max_replicas or not self.max_replicas:
            raise RouterError(
                f"replicas: from {self.min_replicas} to {self.max_replicas} is no range that holds one replica"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """What a fleet has to do.

    Args:
        replicas: those there, starting ones included.
        slots: of one replica.
        open: requests in replicas.
        tokens_waiting: prompt tokens that nobody has computed.
        without_replica: requests that no replica has.
    """

    replicas: int
    slots: int
    open: int
    tokens_waiting: int
    without_replica: int


def wanted_replicas(rule: ScaleRule, load: FleetLoad) -> int:
    """How many replicas this load wants, within the rule's bounds.

    One for as many open requests as three quarters of its slots, and one for as many tokens as may wait for it: the
    first keeps decodes quick, the second first tokens.
    """
    by_slots = -(-4 * load.open // (3 * load.slots))
    by_tokens = -(-load.tokens_waiting // rule.tokens_per_replica)
    wanted = max(by_slots, by_tokens, 1 if load.without_replica else 0)
    return min(rule.max_replicas, max(rule.min_replicas, wanted))
