"""A step: its costs, learned from the steps that were made, its budgets, and its plan with the scheduler's choices.

    times = StepTimeModel()
    times.took(StepWork(decodes=1, keys=300), 0.004)      # a step has ended
    times.time.seconds(StepWork(decodes=8, keys=2400))    # the time that a step of eight will take

A step costs a base, something for each sequence that decodes and for each key it reads, and something for each prompt,
for each of its tokens, and for each key that these tokens read. A drafted token costs a row, too:

    seconds = base + decode * decodes + key * keys + prompt * prompts + prefill * tokens + prefill_key * keys of prompts
              + draft * drafted

The token budget of a step, the price of a draft and the simulated fleet of `genbatch plan` all use this one model.
`genbatch plan` fits the costs to a benchmark at once (clients/plan/step_time.py). No cost is negative.

`max_batch_tokens` bounds the size of a step. While sequences decode, PromptBudget also bounds its time: the seconds in
which the step may evaluate prompts. See ADRs/0040-a-step-has-a-time.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from math import inf, sqrt
from operator import mul
from typing import TypeVar

from genbatch.actors.scheduling.request import LlmRequest, Phase, RequestList


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step, or the sum over several steps.

    Args:
        steps: number of forwards.
        decodes: number of sequences that get one token each.
        keys: number of positions that these sequences read, in all.
        prompts: number of prompts with a part in the step.
        prefill: number of tokens in these parts.
        prefill_keys: number of positions that these tokens read, in all.
        drafted: number of drafted tokens to verify.
    """

    steps: float = 1
    decodes: float = 0
    keys: float = 0.0
    prompts: float = 0
    prefill: float = 0
    prefill_keys: float = 0.0
    drafted: float = 0

    def row(self) -> list[float]:
        """Return the amounts in the order of `COSTS`."""
        return [self.steps, self.decodes, self.keys, self.prompts, self.prefill, self.prefill_keys, self.drafted]


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """A step that was run to learn what it costs, with its seconds."""

    work: StepWork
    seconds: float


# The fields of StepTime, in the order of StepWork's amounts.
COSTS = ("base", "decode", "key", "prompt", "prefill", "prefill_key", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds that each part of a step's work costs; StepTimeModel learns them."""

    base: float
    decode: float
    key: float
    prefill: float
    prefill_key: float
    prompt: float = 0.0
    draft: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that this work takes."""
        return (
            self.base * work.steps
            + self.decode * work.decodes
            + self.key * work.keys
            + self.prompt * work.prompts
            + self.prefill * work.prefill
            + self.prefill_key * work.prefill_keys
            + self.draft * work.drafted
        )


# The prior: assumed costs before the first step, as shares of that step's seconds. A row of weights is read
# once a step, so most of a small step is its base. A key is a 10,000th of the weights of a small model, and less of a
# large one. The tokens of a prompt share the reading of a key.
_PRIOR = (0.85, 0.08, 1e-4, 0.05, 0.08, 3e-5, 0.08)
# The standard deviations of the prior: of each cost alone, of the costs of a row (decoded, prefilled or drafted)
# together, and of all costs together.
_PRIOR_ERROR, _ROW_ERROR, _PACE_ERROR = 1.0, 4.0, 2.0
_ROWS = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0)
# Process noise, as standard deviations per step: of the machine's pace, which changes all costs together, and of each
# cost alone. The pace lets the model follow a machine that slows down, and the drift lets it forget old steps slowly.
# With more noise of the pace, a long prompt would look like a slower machine, since each chunk reads more keys.
_PACE, _DRIFT = 0.02, 0.005
# The least cost that scales a cost's drift and error. A first step that took too long brings other costs down to nearly
# nothing, and without this bound they would stay there.
_LEAST_SCALE = 0.1
# Measurement noise, as a standard deviation relative to a step's time: its first value, the bounds of the learned
# value, and the weight of the newest step.
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NEWEST = 0.05, 0.01, 0.2, 0.05
# An innovation above this many standard deviations is an outlier, and is cut to it.
_OUTLIER = 2.5
# The share by which an outlier adds to the covariance of its costs. If it is the first step of a change, the next steps
# then count for more.
_OUTLIER_SHARE = 0.5
# The largest standard deviation of a cost that was not measured for long.
_MOST_ERROR = 4.0
# The least value of a cost, as a share of the prior: a cost can grow again from there.
_LEAST = 1e-3


class StepTimeModel:
    """Learns the costs from step to step with a Kalman filter.

    One thread calls `took`; any thread may read `time`.

    The covariance says how uncertain each cost is. A step corrects the uncertain costs of its work, and leaves the
    others: thousands of steps without a prompt do not make the filter forget the cost of a prompt. The machine's pace
    is part of every cost, so slower decodes raise the expected cost of prompts at once.

    The vectors have seven elements: plain Python takes 19 us a step with them, and numpy 16 us.
    """

    def __init__(self) -> None:
        self.time: StepTime | None = None  # None until the first step
        self._units = [0.0] * len(COSTS)  # the prior in seconds: the unit of each cost
        self._costs = [1.0] * len(COSTS)
        self._covariance: list[list[float]] = []  # of the costs
        self._noise = _NOISE**2  # the variance of a step's time, relative to its square

    def took(self, work: StepWork, seconds: float) -> None:
        """Learn from a step and its seconds; a step of no time is ignored."""
        if seconds <= 0:
            return
        row = work.row()
        if self.time is None:
            unit = seconds / _dot(_PRIOR, row)
            self._units = [share * unit for share in _PRIOR]
            self._covariance = [[_ROW_ERROR**2 * a * b + _PACE_ERROR**2 for b in _ROWS] for a in _ROWS]
            for index, line in enumerate(self._covariance):
                line[index] += _PRIOR_ERROR**2
        self._learn([*map(mul, row, self._units)], seconds)
        self.time = StepTime(**dict(zip(COSTS, map(mul, self._costs, self._units), strict=True)))

    def _learn(self, row: list[float], seconds: float) -> None:
        costs = self._costs
        covariance = _plus_outer(self._covariance, _PACE**2, costs)
        scales = [max(cost, _LEAST_SCALE) for cost in costs]
        for index, scale in enumerate(scales):
            covariance[index][index] += (_DRIFT * scale) ** 2
        covariance = _capped(covariance, [_MOST_ERROR * scale for scale in scales])
        expected = _dot(row, costs)
        projected = [_dot(line, row) for line in covariance]
        variance = max(_dot(row, projected), 0.0) + self._noise * expected**2
        innovation = seconds - expected
        most = _OUTLIER * sqrt(variance)
        gain = min(max(innovation, -most), most) / variance
        self._costs = [max(cost + gain * along, _LEAST) for cost, along in zip(costs, projected, strict=True)]
        is_outlier = abs(innovation) >= most
        self._covariance = _plus_outer(covariance, (_OUTLIER_SHARE if is_outlier else -1.0) / variance, projected)
        newest = min(max((innovation / expected) ** 2, _LEAST_NOISE**2), _MOST_NOISE**2)
        self._noise += _NEWEST * (newest - self._noise)


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    product: float = sum(map(mul, left, right))
    return product


def _plus_outer(matrix: list[list[float]], factor: float, vector: list[float]) -> list[list[float]]:
    """Return matrix + factor * outer(vector, vector)."""
    rows = zip(matrix, [factor * element for element in vector], strict=True)
    return [[value + a * b for value, b in zip(line, vector, strict=True)] for line, a in rows]


def _capped(covariance: list[list[float]], most: list[float]) -> list[list[float]]:
    """Bound the standard deviations of costs that are not measured, which grow with every step."""
    variances = [line[index] for index, line in enumerate(covariance)]
    excess = [max(sqrt(variance) / limit, 1.0) for variance, limit in zip(variances, most, strict=True)]
    if max(excess) == 1.0:
        return covariance
    rows = zip(covariance, excess, strict=True)
    return [[value / (a * b) for value, b in zip(line, excess, strict=True)] for line, a in rows]


# The first prompt of a step gets at least this many tokens, however little time the step has: prompts never starve.
LEAST_PROMPT_TOKENS = 8
# The longest step, prompts included, in terms of a step in which all sequences decode. The gap between two tokens may
# grow to 2.5 times its usual length, and one step in ten takes a fifth to a quarter longer than expected.
STEP_SHARE = 2.0


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """The time in which a step may evaluate prompts, and the costs of prompts; all in seconds.

    Args:
        seconds: for all prompts of the step together.
        prompt: the cost of each prompt, however few of its tokens are evaluated.
        token: the cost of each of its tokens.
        key: the cost of each position that such a token reads.
    """

    seconds: float
    prompt: float
    token: float
    key: float

    def num_tokens(self, seconds: float, num_computed: int) -> int:
        """Return how many tokens of a prompt fit into `seconds`, after `num_computed` computed tokens."""
        left = seconds - self.prompt
        if left <= 0:
            return 0
        first = self.token + self.key * num_computed
        # Token number n costs first + key * n. This form of the root loses no digits when a key costs nearly nothing.
        return int(2 * left / (first + sqrt(first * first + 2 * self.key * left)))

    def cost(self, num_tokens: int, num_computed: int) -> float:
        """Return the seconds for `num_tokens` tokens of a prompt."""
        return self.prompt + num_tokens * (self.token + self.key * (num_computed + num_tokens / 2))


def prompt_budget(time: StepTime | None, decodes: StepWork, num_prompts: int, target_s: float) -> PromptBudget | None:
    """Return the time for prompts in a step beside decoding sequences; None for no bound.

    A step may take `target_s`, or `STEP_SHARE` times as long as a step in which all sequences decode, if that is
    longer. The prompts get the time that the decodes leave. All sequences are the decoding ones and the prompts. So
    seven prompts beside one decode get as much time as one prompt beside seven decodes. A full service thus does not
    spend its steps on few decodes.

    Args:
        time: the learned costs of steps, if any.
        decodes: the step without prompts.
        num_prompts: prompts with a slot, or with a free slot to take.
        target_s: the target; 0 for no target.
    """
    if time is None or not decodes.decodes or not target_s:
        return None
    all_decode = replace(decodes, decodes=decodes.decodes + num_prompts)
    step_s = max(target_s, STEP_SHARE * time.seconds(all_decode))
    return PromptBudget(step_s - time.seconds(decodes), time.prompt, max(time.prefill, 1e-9), time.prefill_key)


@dataclass(slots=True)
class StepLimits:
    """The bounds of a step: the configured ones, and the time for prompts, which the Batcher sets before each plan.

    Args:
        max_batch_tokens: token budget: query tokens of one step, decodes and prefill chunks together.
        block_size: positions in a KV block.
        cache_budget: blocks that the requests of one step may read, with a shared block counted for each reader. With
            None only the pool bounds it, since a step reads only existing blocks.
        enable_chunked_context: whether a context that fits the token budget may be split over steps. A context longer
            than `max_batch_tokens` is split in any case, since it could never run whole.
        prompt_budget: the time for prompts in the next step; with None only the other budgets bound them.
    """

    max_batch_tokens: int
    block_size: int
    cache_budget: int | None = None
    enable_chunked_context: bool = True
    prompt_budget: PromptBudget | None = None

    def blocks_read(self, num_positions: int) -> int:
        """Return the blocks that attention over `num_positions` reads."""
        return -(-num_positions // self.block_size)

    def can_ever_run(self, request: LlmRequest) -> bool:
        """Return whether the budgets allow the request at its full length, alone in a step."""
        if request.width > self.max_batch_tokens:
            return False
        blocks = self.blocks_read(request.max_positions) * request.width
        return self.cache_budget is None or blocks <= self.cache_budget


@dataclass(slots=True)
class StepPlan:
    """The requests of a step in the order they were added; each `add_…` stops at the end of a budget."""

    limits: StepLimits
    tokens_left: int = field(init=False)
    blocks_left: int | None = field(init=False)
    seconds_left: float = field(init=False)  # for prompts
    context_requests: RequestList = field(default_factory=list)
    generation_requests: RequestList = field(default_factory=list)
    chunk_sizes: dict[int, int] = field(default_factory=dict)
    never_fitting: RequestList = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens_left = self.limits.max_batch_tokens
        self.blocks_left = self.limits.cache_budget
        budget = self.limits.prompt_budget
        self.seconds_left = inf if budget is None else budget.seconds

    def add_decodes(self, requests: RequestList) -> bool:
        """Give each request one token per beam; return whether every request got them.

        A request that exceeds a budget is skipped, since a smaller one after it may still fit.
        """
        if self.blocks_left is None and sum([request.width for request in requests]) <= self.tokens_left:
            self.generation_requests += requests
            self.tokens_left -= sum([request.width for request in requests])
            return True
        taken = self._decodes_within_budgets(requests)
        self.generation_requests += taken
        return len(taken) == len(requests)

    def add_contexts(self, requests: Iterable[LlmRequest]) -> bool:
        """Give each request as much of its context as fits; return whether every context is complete.

        No request overtakes one that does not fit, except one that can never run, which is set aside.
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
            if self.limits.prompt_budget is not None:
                self.seconds_left -= self.limits.prompt_budget.cost(num_tokens, request.num_computed)
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
        splits = self.limits.enable_chunked_context or remaining > self.limits.max_batch_tokens
        room = min(room, self._tokens_in_time(request, splits=splits))
        if remaining <= room:
            return remaining
        return room if splits else 0

    def _tokens_in_time(self, request: LlmRequest, *, splits: bool) -> int:
        """Return the tokens that fit the time for prompts. The first prompt always gets some, or all if it is not
        split.
        """
        budget, most = self.limits.prompt_budget, self.limits.max_batch_tokens
        if budget is None:
            return most
        num_tokens = budget.num_tokens(self.seconds_left, request.num_computed)
        if self.context_requests:
            return num_tokens
        return max(num_tokens, LEAST_PROMPT_TOKENS if splits else most)


PlainPlan = tuple[RequestList, RequestList, RequestList]  # context, generation, paused


class SchedulerError(Exception):
    """A scheduler cannot be built, or returned an invalid plan; the message names the fault."""


@dataclass(frozen=True, slots=True)
class CapacityOutput:
    """A CapacityScheduler's answer; unpacks as (fitting_requests, paused_requests).

    Args:
        fitting_requests: the requests with reserved memory in this step.
        paused_requests: the requests that lose their blocks now; they wait and resume by themselves.
        never_fitting: requests that no step could ever hold; they are refused, since waiting would not help.
    """

    fitting_requests: RequestList
    paused_requests: RequestList
    never_fitting: RequestList = field(default_factory=list)

    def __iter__(self) -> Iterator[RequestList]:
        yield self.fitting_requests
        yield self.paused_requests


@dataclass(frozen=True, slots=True)
class MicroBatchOutput:
    """A MicroBatchScheduler's answer; unpacks as (context_requests, generation_requests)."""

    context_requests: RequestList
    generation_requests: RequestList
    chunk_sizes: Mapping[int, int] = field(default_factory=dict)
    never_fitting: RequestList = field(default_factory=list)

    def as_plan(self, paused_requests: RequestList, never_fitting: RequestList) -> "SchedulerOutput":
        """Return the whole plan, with the capacity scheduler's decisions."""
        return SchedulerOutput(
            context_requests=self.context_requests,
            generation_requests=self.generation_requests,
            paused_requests=paused_requests,
            chunk_sizes=self.chunk_sizes,
            never_fitting=[*never_fitting, *self.never_fitting],
        )

    def __iter__(self) -> Iterator[RequestList]:
        yield self.context_requests
        yield self.generation_requests


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step; unpacks as (context_requests, generation_requests, paused_requests).

    Args:
        context_requests: the requests that compute a chunk of their context, in order.
        generation_requests: the requests that compute one token.
        paused_requests: as in CapacityOutput; they are released before the step runs.
        chunk_sizes: the tokens that each context request computes, by request id.
        never_fitting: as in CapacityOutput.
    """

    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList
    chunk_sizes: Mapping[int, int] = field(default_factory=dict)
    never_fitting: RequestList = field(default_factory=list)

    def __iter__(self) -> Iterator[RequestList]:
        yield self.context_requests
        yield self.generation_requests
        yield self.paused_requests

    @property
    def num_scheduled(self) -> int:
        """The number of requests in the step."""
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def num_context_tokens(self) -> int:
        """The tokens of all chunks together."""
        return sum(self.chunk_sizes.values())


PlanPart = TypeVar("PlanPart", CapacityOutput, MicroBatchOutput, SchedulerOutput)


def as_output(kind: type[PlanPart], answer: object) -> PlanPart:
    """Return a scheduler's answer as this type; the answer may be the tuple of plain lists that the type unpacks to.

    Raises:
        SchedulerError: the answer is of another type.
    """
    if isinstance(answer, kind):
        return answer
    count = len([each for each in fields(kind) if each.default_factory is MISSING])
    if isinstance(answer, tuple) and len(answer) == count and all(isinstance(part, list) for part in answer):
        return kind(*answer)
    raise SchedulerError(f"a scheduler returned {answer!r:.200}, neither {kind.__name__} nor {count} lists")


def normalize_output(
    output: SchedulerOutput | PlainPlan,
    active_requests: Sequence[LlmRequest],
    inflight_request_ids: Set[int],
    limits: StepLimits,
) -> SchedulerOutput:
    """Check a plan and return it; a plan without chunk sizes gets them, up to the token budget, in the order given.

    A plan without chunk sizes loses the context requests that exceed a budget.

    Raises:
        SchedulerError: not a plan; a request twice, not active, in flight or in the wrong phase; a chunk
            that is missing or larger than the context; a budget exceeded.
    """
    plan = as_output(SchedulerOutput, output)
    _check_membership(plan, active_requests, inflight_request_ids)
    _check_phases(plan)
    if plan.context_requests and not plan.chunk_sizes:
        return _with_chunk_sizes(plan, limits)
    _check_chunks(plan)
    _check_budgets(plan, limits)
    return plan


def _check_membership(plan: SchedulerOutput, active: Sequence[LlmRequest], inflight: Set[int]) -> None:
    chosen = [*plan.context_requests, *plan.generation_requests, *plan.paused_requests, *plan.never_fitting]
    distinct = set(chosen)
    if len(distinct) < len(chosen):
        twice = next(request for request in chosen if chosen.count(request) > 1)
        raise SchedulerError(f"request {twice.request_id} is in the plan twice")
    foreign = distinct.difference(active)
    if foreign:
        raise SchedulerError(f"not among the active requests: {_names(foreign)}")
    if inflight:
        flying = [request for request in chosen if request.request_id in inflight]
        if flying:
            raise SchedulerError(f"already in flight: {_names(flying)}")


def _check_phases(plan: SchedulerOutput) -> None:
    # Bind the names once: this code runs for every request of every step.
    pending, prefilling, decoding = Phase.PENDING, Phase.PREFILLING, Phase.DECODING
    misplaced = [r for r in plan.generation_requests if r.phase is not decoding]
    if misplaced:
        raise SchedulerError(f"planned as generation but not decoding: {_names(misplaced)}")
    misplaced = [r for r in plan.context_requests if r.phase is not pending and r.phase is not prefilling]
    if misplaced:
        raise SchedulerError(f"planned as context but not pending or prefilling: {_names(misplaced)}")
    misplaced = [r for r in plan.paused_requests if r.phase is not prefilling and r.phase is not decoding]
    if misplaced:
        raise SchedulerError(f"paused but not running: {_names(misplaced)}")


def _with_chunk_sizes(plan: SchedulerOutput, limits: StepLimits) -> SchedulerOutput:
    step = StepPlan(limits)
    if not step.add_decodes(plan.generation_requests):
        raise SchedulerError(f"{len(plan.generation_requests)} generation requests exceed the step's budgets")
    step.add_contexts(plan.context_requests)
    filled = MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)
    return filled.as_plan(plan.paused_requests, plan.never_fitting)


def _check_chunks(plan: SchedulerOutput) -> None:
    sizes = plan.chunk_sizes
    for request in plan.context_requests:
        size = sizes.get(request.request_id, 0)
        if not 1 <= size <= request.context_remaining:
            raise SchedulerError(
                f"request {request.request_id} has a chunk of {size} tokens; "
                f"{request.context_remaining} of its context are left, and a chunk has at least one"
            )
    if len(sizes) > len(plan.context_requests):
        extra = sorted(sizes.keys() - {request.request_id for request in plan.context_requests})
        raise SchedulerError(f"chunk sizes for requests that are not in the context list: {extra[:8]}")


def _check_budgets(plan: SchedulerOutput, limits: StepLimits) -> None:
    num_tokens = plan.num_context_tokens + sum([request.width for request in plan.generation_requests])
    if num_tokens > limits.max_batch_tokens:
        raise SchedulerError(f"the plan has {num_tokens} tokens, and max_batch_tokens is {limits.max_batch_tokens}")
    if limits.cache_budget is None:
        return
    blocks = sum(limits.blocks_read(request.num_computed + 1) * request.width for request in plan.generation_requests)
    blocks += sum(
        limits.blocks_read(request.num_computed + plan.chunk_sizes[request.request_id])
        for request in plan.context_requests
    )
    if blocks > limits.cache_budget:
        raise SchedulerError(f"the plan reads {blocks} blocks, and cache_budget is {limits.cache_budget}")


def _names(requests: Sequence[LlmRequest] | Set[LlmRequest]) -> str:
    ids = sorted(request.request_id for request in requests)
    return ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")


class BatchingType(Enum):
    """The batch manager's modelType."""

    # A batch runs in lockstep until all requests are complete: see LockstepScheduler. There is no padding, and a
    # complete request is answered at once. Its slot stays empty until the batch ends, at no cost.
    V1 = "V1"
    INFLIGHT_BATCHING = "InflightBatching"  # joins and leaves at every step; separate forwards for prefill and decode
    INFLIGHT_FUSED_BATCHING = "InflightFusedBatching"  # the same, prefill and decode in one forward


def forwards(batching_type: BatchingType, plan: SchedulerOutput) -> list[SchedulerOutput]:
    """Return the plan's forwards in order: one, or contexts and decodes separately where they are not fused.

    Paused and never fitting requests stay with the first forward. A plan without work is still one forward.
    """
    if batching_type is BatchingType.INFLIGHT_FUSED_BATCHING:
        return [plan]
    if not plan.context_requests or not plan.generation_requests:
        return [plan]
    return [
        SchedulerOutput(
            context_requests=plan.context_requests,
            generation_requests=[],
            paused_requests=plan.paused_requests,
            chunk_sizes=plan.chunk_sizes,
            never_fitting=plan.never_fitting,
        ),
        SchedulerOutput([], plan.generation_requests, []),
    ]
