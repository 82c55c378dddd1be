"""Simulates a trace on a fleet: the real routers and step schedulers run against a fitted step time.

    run = run_fleet(trace, step_time, SimulatedFleet(replicas=8, router="prefix"))
    print(percentile(run.ttft_s, 50))

      arrivals --> gateway (router, its view of loads) --> replica: queue -> slots -> steps -> prefix cache
                        ^                                     |
                        +------- reports, every report_s -----+

The clock jumps from event to event. Steps with decodes only are summed in closed form up to the next end or arrival.
So the cost of a run grows with its requests and not with their tokens. For the same reason the loop is a heap and no
process library: if an arrival cuts a run of steps short, the run's single entry is pushed again.

The simulation has bounded queues, slots, chunked prefill by the named scheduler, KV positions, an LRU prefix cache,
stale reports, and several gateways that do not communicate. It has no pauses (a request is admitted when all its
positions fit), no swapping, no failures and no networks.

The result is a row for each size of the fleet, as a table and as a plot.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.table import Table

from genbatch.actors.batcher.options import CPU_TARGET_MS
from genbatch.actors.fleet.routing import ReplicaView, Roster, Router, RouteRequest, build_router
from genbatch.actors.scheduling.plan import StepLimits, StepTime, StepWork, prompt_budget
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import STEP_ORDERS, MicroBatchScheduler
from genbatch.clients.plan.traces import Trace, TraceError, TraceRequest
from genbatch.nif.errors import how_to_install


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleet:
    """The options of a simulated fleet.

    Args:
        router: see `build_router`.
        scheduler: "fifo" or "prefill_first".
        n_parallel, n_ctx, max_batch_tokens, target_inter_token_latency_ms: each replica's Batcher options.
        max_queue: most waiting sequences of a replica; None means 4 per slot. Further requests are refused.
        batch_timeout_s: the time that an idle replica waits before it starts, `batch_quiet` of the Batcher.
        gateways: number of gateways, each with its own router; requests go to them in turn.
        report_s: seconds between two reports of a replica; 0 means that every gateway is always up to date.
        tell_prefixes: whether the reports list a replica's prefixes; otherwise a gateway knows only the prefixes
            that it has sent to the replica itself.
    """

    replicas: int
    router: str = "prefix"
    scheduler: str = "fifo"
    n_parallel: int = 8
    n_ctx: int = 8192
    max_batch_tokens: int = 512
    target_inter_token_latency_ms: float = CPU_TARGET_MS
    max_queue: int | None = None
    batch_timeout_s: float = 0.002
    gateways: int = 1
    report_s: float = 0.25
    tell_prefixes: bool = False


@dataclass(slots=True)
class FleetRun:
    """The result of a simulated trace.

    Args:
        ttft_s, tpot_s: latencies of each answered request; TPOT is NaN with one token.
        gaps: (seconds, count) of the gaps between consecutive tokens.
        refused: number of refused requests.
        prompt_tokens, cached_tokens, output_tokens: tokens of the answered requests.
        duration_s: seconds until the last request ended.
        busy_s: busy seconds of all replicas together.
        most_of_one: the largest share of all requests on one replica, times the number of replicas.
        route_us: routing time per request, in microseconds of the simulating machine.
    """

    replicas: int
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    busy_s: float = 0.0
    most_of_one: float = 0.0
    route_us: float = 0.0


def run_fleet(trace: Trace, step_time: StepTime, options: SimulatedFleet) -> FleetRun:
    """Run the trace to its end.

    Raises:
        TraceError: a request is longer than a replica's context.
        RouterError: no router has this name.
    """
    longest = max(request.prompt + request.output for request in trace.requests)
    if longest > options.n_ctx:
        raise TraceError(f"n_ctx: {options.n_ctx} positions are too few for a request of {longest} in the trace")
    return _Fleet(trace, step_time, options).run()


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence(LlmRequest):
    """A request in a replica."""

    asked: TraceRequest
    sent_at: float
    first_at: float = 0.0
    private: int = 0  # reserved positions outside named blocks
    pinned: int = 0  # number of its blocks that it holds in the cache


class _Blocks:
    """A replica's positions: private ones, and named blocks that are in use or can be evicted."""

    def __init__(self, n_ctx: int, block_tokens: int) -> None:
        self.n_ctx, self.block_tokens = n_ctx, block_tokens
        self.private = 0
        self._in_use: dict[int, int] = {}
        self._spare: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Return the length of the prefix hit: the number of leading blocks that are cached."""
        for place, block in enumerate(blocks):
            if block not in self._in_use and block not in self._spare:
                return place
        return len(blocks)

    def admit(self, sequence: _Sequence, hits: int) -> bool:
        """Reserve all positions that the sequence will need; returns False if they do not fit."""
        blocks = sequence.asked.blocks
        private = sequence.asked.prompt + sequence.asked.output - hits * self.block_tokens
        woken = sum(1 for block in blocks[:hits] if block in self._spare)
        if private + self.private + (len(self._in_use) + woken) * self.block_tokens > self.n_ctx:
            return False
        sequence.private, sequence.pinned = private, hits
        self.private += private
        for block in blocks[:hits]:
            self._pin(block)
        self._evict()
        return True

    def computed(self, sequence: _Sequence) -> None:
        """Cache the prompt's blocks that are computed by now."""
        blocks = sequence.asked.blocks
        for block in blocks[sequence.pinned : sequence.num_computed // self.block_tokens]:
            self._pin(block)
            sequence.pinned += 1
            sequence.private -= self.block_tokens
            self.private -= self.block_tokens
        self._evict()

    def release(self, sequence: _Sequence) -> None:
        """Release an ended sequence. Its named blocks stay cached until eviction; prefixes are evicted last."""
        self.private -= sequence.private
        for block in reversed(sequence.asked.answered):
            if block not in self._in_use:
                self._spare[block] = None
        for block in reversed(sequence.asked.blocks[: sequence.pinned]):
            count = self._in_use[block] - 1
            if count:
                self._in_use[block] = count
            else:
                del self._in_use[block]
                self._spare[block] = None
                self._spare.move_to_end(block)
        self._evict()

    def _pin(self, block: int) -> None:
        self._spare.pop(block, None)
        self._in_use[block] = self._in_use.get(block, 0) + 1

    def _evict(self) -> None:
        while self._spare and self.private + (len(self._in_use) + len(self._spare)) * self.block_tokens > self.n_ctx:
            self._spare.popitem(last=False)


class _Replica:
    """One replica: its queue, its running sequences, and the step or run of steps under way."""

    def __init__(
        self, place: int, scheduler: MicroBatchScheduler, limits: StepLimits, blocks: _Blocks, max_running: int
    ) -> None:
        self.place = place
        self.scheduler, self.limits, self.blocks, self.max_running = scheduler, limits, blocks, max_running
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self.tokens_waiting = 0
        self.num_requests = 0
        self.version = 0  # the version of its heap entry; older entries are void
        self.plan: _Step | _DecodeRun | None = None

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.running)

    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_running

    def admit(self) -> None:
        """Admit sequences from the queue in order while slots and positions are free."""
        while self.can_admit():
            sequence = self.waiting[0]
            hits = self.blocks.match(sequence.asked.blocks)
            # The last token of a prompt is always evaluated.
            cached = min(hits * self.blocks.block_tokens, sequence.num_prompt_tokens - 1)
            if not self.blocks.admit(sequence, hits):
                return
            self.waiting.popleft()
            self.tokens_waiting -= cached - sequence.num_cached  # the hit may have changed since the arrival
            sequence.num_cached = sequence.num_computed = cached
            self.running.append(sequence)


@dataclass(slots=True)
class _Step:
    """One step that evaluates prompts."""

    begun_at: float
    seconds: float
    decodes: Sequence[LlmRequest]
    contexts: Sequence[LlmRequest]
    chunks: "dict[int, int]"


@dataclass(slots=True)
class _DecodeRun:
    """A run of steps in which every running sequence decodes."""

    begun_at: float
    steps: int
    first_s: float
    growth_s: float  # from one step to the next

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_at(self, now: float) -> int:
        """Return the number of steps that have begun by `now`, at least one."""
        elapsed = now - self.begun_at
        half = self.first_s - self.growth_s / 2
        if self.growth_s <= 0:
            done = elapsed / self.first_s if self.first_s > 0 else 0.0
        else:
            done = (math.sqrt(half * half + 2 * self.growth_s * max(0.0, elapsed)) - half) / self.growth_s
        return max(1, min(self.steps, math.ceil(done)))


class _Fleet:
    def __init__(self, trace: Trace, step_time: StepTime, options: SimulatedFleet) -> None:
        self.trace, self.time, self.options = trace, step_time, options
        if options.scheduler not in STEP_ORDERS:
            raise TraceError(f"scheduler: {options.scheduler!r} is none of {', '.join(STEP_ORDERS)}")
        order = STEP_ORDERS[options.scheduler]
        self.target_s = options.target_inter_token_latency_ms / 1000 if options.scheduler == "fifo" else 0.0
        self.replicas = []
        for place in range(options.replicas):
            limits, blocks = StepLimits(options.max_batch_tokens, 16), _Blocks(options.n_ctx, trace.block_tokens)
            self.replicas.append(_Replica(place, order(limits), limits, blocks, options.n_parallel))
        waiting = 4 * options.n_parallel if options.max_queue is None else options.max_queue
        self.capacity = waiting + options.n_parallel
        self.routers: list[Router] = [build_router(options.router) for _ in range(options.gateways)]
        self.views = [
            [ReplicaView(f"{place}", room=self.capacity) for place in range(options.replicas)] for _ in self.routers
        ]
        self.rosters = [Roster(views) for views in self.views]
        self.changed: set[int] = set()
        self.news: list[tuple[int, str, Sequence[int]]] = []  # gateway, replica, blocks of the routed prompt
        self.next_report = 0.0
        self.events: list[tuple[float, int, int]] = []
        self.result = FleetRun(options.replicas)

    def run(self) -> FleetRun:
        result, events = self.result, self.events
        for number, asked in enumerate(self.trace.requests):
            while events and events[0][0] <= asked.at:
                self._next_event()
            self._report(asked.at)
            self._arrive(number, asked)
        while events:
            self._next_event()
        count = len(self.trace.requests)
        result.route_us = 1e6 * result.route_us / count
        result.most_of_one = max(replica.num_requests for replica in self.replicas) * len(self.replicas) / count
        return result

    def _next_event(self) -> None:
        at, version, place = heapq.heappop(self.events)
        replica = self.replicas[place]
        if replica.version == version:
            self._end(replica, at)
            self._begin(replica, at)

    # Arrivals

    def _report(self, now: float) -> None:
        if now < self.next_report:
            return
        for place in self.changed:
            replica = self.replicas[place]
            for views in self.views:
                view = views[place]
                view.tokens_waiting, view.num_open = replica.tokens_waiting, replica.num_open
                view.room = self.capacity - replica.num_open
        self.changed.clear()
        for origin, name, blocks in self.news:
            for gateway, router in enumerate(self.routers):
                if gateway != origin:
                    router.learn(name, blocks)
        self.news.clear()
        if self.options.report_s:
            self.next_report = now - now % self.options.report_s + self.options.report_s

    def _arrive(self, number: int, asked: TraceRequest) -> None:
        gateway = number % len(self.routers)
        request = RouteRequest(number, asked.blocks, asked.prompt, self.trace.block_tokens)
        begun_at = perf_counter()
        view = self.routers[gateway].route(request, self.rosters[gateway])
        self.routers[gateway].learn(view.name, asked.blocks + asked.answered)
        if self.options.tell_prefixes:
            self.news.append((gateway, view.name, asked.blocks + asked.answered))
        self.result.route_us += perf_counter() - begun_at
        replica = self.replicas[int(view.name)]
        self.changed.add(replica.place)
        replica.num_requests += 1
        if replica.num_open >= self.capacity:
            self.result.refused += 1
            return
        sequence = _Sequence(
            request_id=number,
            num_prompt_tokens=asked.prompt,
            max_new_tokens=asked.output,
            arrival=number,
            asked=asked,
            sent_at=asked.at,
        )
        hits = replica.blocks.match(asked.blocks)
        sequence.num_cached = min(hits * self.trace.block_tokens, asked.prompt - 1)
        replica.tokens_waiting += asked.prompt - sequence.num_cached
        view.tokens_waiting += asked.prompt - sequence.num_cached
        view.num_open += 1
        view.room -= 1
        replica.waiting.append(sequence)
        if replica.plan is None:
            if not replica.running and len(replica.waiting) == 1:
                # An idle replica waits for more requests; an empty step models the wait.
                self._put(replica, asked.at, _Step(asked.at, self.options.batch_timeout_s, (), (), {}))
        elif isinstance(replica.plan, _DecodeRun) and replica.can_admit():
            plan = replica.plan
            steps = plan.steps_at(asked.at)
            if steps < plan.steps:
                plan.steps = steps
                self._put(replica, plan.begun_at, plan)

    # Steps

    def _put(self, replica: _Replica, begun_at: float, plan: "_Step | _DecodeRun") -> None:
        replica.plan = plan
        replica.version += 1
        seconds = plan.seconds if isinstance(plan, _Step) else plan.seconds(plan.steps)
        heapq.heappush(self.events, (begun_at + seconds, replica.version, replica.place))

    def _begin(self, replica: _Replica, now: float) -> None:
        replica.admit()
        running = replica.running
        if not running:
            assert not replica.waiting, "an empty replica has room for every request"
            return
        if all(sequence.phase is Phase.DECODING for sequence in running):
            count = len(running)
            first = self.time.seconds(_decode_work(running))
            steps = min(sequence.max_new_tokens - sequence.num_generated for sequence in running)
            self._put(replica, now, _DecodeRun(now, steps, first, self.time.key * count))
            return
        contexts, decodes, chunks = self._plan(replica)
        work = replace(
            _decode_work(decodes),
            prompts=len(contexts),
            prefill=sum(chunks.values()),
            prefill_keys=sum(
                chunks[request.request_id] * (request.num_computed + chunks[request.request_id] / 2)
                for request in contexts
            ),
        )
        self._put(replica, now, _Step(now, self.time.seconds(work), decodes, contexts, chunks))

    def _plan(self, replica: _Replica) -> tuple[Sequence[LlmRequest], Sequence[LlmRequest], dict[int, int]]:
        decoding = [request for request in replica.running if request.phase is Phase.DECODING]
        replica.limits.prompt_budget = prompt_budget(
            self.time, _decode_work(decoding), len(replica.running) - len(decoding), self.target_s
        )
        plan = replica.scheduler.schedule(list(replica.running), frozenset())
        assert not isinstance(plan, tuple)
        return plan.context_requests, plan.generation_requests, dict(plan.chunk_sizes)

    def _end(self, replica: _Replica, now: float) -> None:
        plan, replica.plan = replica.plan, None
        self.changed.add(replica.place)
        if isinstance(plan, _DecodeRun):
            self.result.busy_s += now - plan.begun_at
            count = len(replica.running)
            self.result.gaps.append(((now - plan.begun_at) / plan.steps, plan.steps * count))
            for sequence in replica.running:
                sequence.num_generated += plan.steps
                sequence.num_computed += plan.steps
        else:
            assert plan is not None
            if plan.decodes or plan.contexts:
                self.result.busy_s += plan.seconds
            if plan.decodes:
                self.result.gaps.append((plan.seconds, len(plan.decodes)))
            for request in plan.decodes:
                request.num_generated += 1
                request.num_computed += 1
            for request in plan.contexts:
                self._computed(replica, request, plan.chunks[request.request_id], now)
        if any(sequence.num_generated >= sequence.max_new_tokens for sequence in replica.running):
            ended = [request for request in replica.running if request.num_generated >= request.max_new_tokens]
            replica.running = [request for request in replica.running if request.num_generated < request.max_new_tokens]
            for sequence in ended:
                self._finish(replica, sequence, now)

    def _computed(self, replica: _Replica, request: LlmRequest, chunk: int, now: float) -> None:
        assert isinstance(request, _Sequence)
        if request.phase is Phase.PENDING:
            request.move(Phase.PREFILLING)
        request.num_computed += chunk
        replica.tokens_waiting -= chunk
        replica.blocks.computed(request)
        if request.context_remaining == 0:
            request.move(Phase.DECODING)
            request.num_generated = 1
            request.first_at = now

    def _finish(self, replica: _Replica, sequence: _Sequence, now: float) -> None:
        sequence.move(Phase.FINISHED)
        replica.blocks.release(sequence)
        result = self.result
        result.ttft_s.append(sequence.first_at - sequence.sent_at)
        rest = sequence.num_generated - 1
        result.tpot_s.append((now - sequence.first_at) / rest if rest else math.nan)
        result.prompt_tokens += sequence.num_prompt_tokens
        result.cached_tokens += sequence.num_cached
        result.output_tokens += sequence.num_generated
        result.duration_s = max(result.duration_s, now)


def _decode_work(decodes: Sequence[LlmRequest]) -> StepWork:
    return StepWork(decodes=len(decodes), keys=sum(sequence.num_computed + 1 for sequence in decodes))


class PlotError(Exception):
    """A plot cannot be drawn; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The figures of a trace on a fleet of one size; latencies are (p50, p99) in milliseconds."""

    replicas: int
    completed: int
    refused: int
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    good: float  # share of all requests answered within the target
    goodput: float  # requests per second answered within the target
    output_tok_s: float
    hit_rate: float  # share of the prompt tokens that were prefix hits
    busy: float  # share of the replicas' time
    most_of_one: float  # requests of the busiest replica, as a multiple of an even share
    route_us: float
    cost_hour: float
    cost_million: float  # cost of a million output tokens

    @classmethod
    def of(cls, run: FleetRun, limits_s: Mapping[str, float], cost_hour: float) -> "PlanRow":
        """Compute the figures of a run.

        Args:
            limits_s: the targets for "ttft" and "tpot" in seconds.
            cost_hour: the cost of one replica per hour.
        """
        ttft, tpot = np.array(run.ttft_s), np.array(run.tpot_s)
        # A single token has no TPOT, so it cannot miss the TPOT target.
        kept = (ttft <= limits_s.get("ttft", math.inf)) & ~(tpot > limits_s.get("tpot", math.inf))
        count = len(ttft) + run.refused
        cost = cost_hour * run.replicas
        return cls(
            replicas=run.replicas,
            completed=len(ttft),
            refused=run.refused,
            ttft_ms=_spread(ttft),
            tpot_ms=_spread(tpot[~np.isnan(tpot)]),
            itl_ms=_weighted_spread(run.gaps),
            good=float(kept.sum()) / count,
            goodput=float(kept.sum()) / run.duration_s,
            output_tok_s=run.output_tokens / run.duration_s,
            hit_rate=run.cached_tokens / run.prompt_tokens,
            busy=run.busy_s / (run.duration_s * run.replicas),
            most_of_one=run.most_of_one,
            route_us=run.route_us,
            cost_hour=cost,
            cost_million=cost * run.duration_s / 3600 / run.output_tokens * 1e6,
        )


def plan_table(rows: Sequence[PlanRow], *, target_share: float, with_cost: bool) -> Table:
    """Format a row for each size; the smallest size that meets the target is marked."""
    table = Table(header_style="bold", caption="latencies in ms: p50 / p99")
    columns = ["replicas", "refused", "TTFT", "TPOT", "ITL", "good", "goodput/s", "tok/s", "hits", "busy", "max/even"]
    for title in [*columns, *(["cost/h", "cost/Mtok"] if with_cost else [])]:
        table.add_column(title, justify="right", no_wrap=True)
    chosen = smallest(rows, target_share)
    for row in rows:
        cells = [
            f"{row.replicas:,d}",
            f"{row.refused:,d}",
            *(f"{low:,.0f} / {high:,.0f}" for low, high in (row.ttft_ms, row.tpot_ms, row.itl_ms)),
            f"{100 * row.good:.1f}%",
            f"{row.goodput:,.1f}",
            f"{row.output_tok_s:,.0f}",
            f"{100 * row.hit_rate:.0f}%",
            f"{100 * row.busy:.0f}%",
            f"{row.most_of_one:.2f}",
        ]
        if with_cost:
            cells += [f"{row.cost_hour:,.2f}", f"{row.cost_million:,.2f}"]
        table.add_row(*cells, style="bold green" if row is chosen else None)
    return table


def smallest(rows: Sequence[PlanRow], target_share: float) -> PlanRow | None:
    """Return the smallest fleet in which at least `target_share` of all requests meet the target; None without one."""
    return min((row for row in rows if row.good >= target_share), key=lambda row: row.replicas, default=None)


def plot_plan(rows: Sequence[PlanRow], path: Path, *, title: str, target_share: float) -> None:
    """Plot TTFT, TPOT and the share of good requests over the number of replicas.

    Raises:
        PlotError: matplotlib is not installed, or cannot write a file of this kind.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"plot: needs matplotlib; {how_to_install('plot')}") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    sizes = [row.replicas for row in rows]
    for name, values in (("TTFT", [row.ttft_ms for row in rows]), ("TPOT", [row.tpot_ms for row in rows])):
        [line] = above.plot(sizes, [p50 for p50, _ in values], marker="o", label=f"{name} p50")
        above.plot(sizes, [p99 for _, p99 in values], marker="o", ls="--", c=line.get_color(), label=f"{name} p99")
    above.set(title=title, ylabel="ms", xscale="log", yscale="log")
    above.legend()
    below.plot(sizes, [100 * row.good for row in rows], marker="o", label="requests within the target")
    below.plot(sizes, [100 * row.hit_rate for row in rows], marker="s", label="prompt tokens from the cache")
    below.plot(sizes, [100 * row.busy for row in rows], marker="^", label="replicas' time used")
    below.axhline(100 * target_share, ls=":", c="grey")
    below.set(xlabel="replicas", ylabel="%")
    below.legend()
    for axes in (above, below):
        axes.grid(visible=True, which="both", alpha=0.2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"plot: {path}: {error}") from error


def _spread(seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    if not len(seconds):
        return math.nan, math.nan
    low, high = np.percentile(seconds, [50, 99])
    return 1e3 * float(low), 1e3 * float(high)


def _weighted_spread(gaps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    if not gaps:
        return math.nan, math.nan
    values, counts = (np.array(column) for column in zip(*gaps, strict=True))
    order = values.argsort()
    places = counts[order].cumsum()
    low, high = (order[np.searchsorted(places, share * places[-1])] for share in (0.5, 0.99))
    return 1e3 * float(values[low]), 1e3 * float(values[high])
