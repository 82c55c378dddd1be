"""Callers that each send a new prompt when their answer has ended, beside a machine of known costs and no clock.

    run = closed_loop(machine, callers=8, target_s=0.012)
    max(run.gaps), run.tokens_per_s

A caller's next prompt arrives some milliseconds after its answer, so that of callers that end together one is there
first. The steps are planned by the real scheduler with the real budget, and the costs are learned from the steps.
"""

import heapq
from dataclasses import dataclass, field
from random import Random

from genbatch.actors.scheduling.plan import StepLimits, StepTime, StepTimeModel, StepWork, prompt_budget
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import FIFOScheduler, SchedulerOutput, normalize_output
from tests.actors.scheduling.real_blocks import request

PROMPT_TOKENS, OUTPUT_TOKENS, ANSWERS_EACH = 110, 64, 6
LATEST_ARRIVAL_S = 0.03


def decode_work(decodes: list[LlmRequest]) -> StepWork:
    return StepWork(decodes=len(decodes), keys=sum(one.num_computed + 1 for one in decodes))


def prompt_work(plan: SchedulerOutput) -> StepWork:
    sizes = [(plan.chunk_sizes[one.request_id], one.num_computed) for one in plan.context_requests]
    return StepWork(
        steps=0,
        prompts=len(sizes),
        prefill=sum(size for size, _ in sizes),
        prefill_keys=sum(size * (computed + size / 2) for size, computed in sizes),
    )


@dataclass
class ClosedLoop:
    machine: StepTime
    callers: int
    target_s: float
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)  # seconds from the arrival
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._draw = Random(1)
        self._limits = StepLimits(max_batch_tokens=512, block_size=16)
        self._scheduler = FIFOScheduler(self._limits)
        self._times = StepTimeModel()
        for work in (StepWork(decodes=1, keys=1), StepWork(prompts=1, prefill=32, prefill_keys=512)):
            self._times.took(work, self.machine.seconds(work))  # as a Batcher learns at load
        self._active: list[LlmRequest] = []
        self._coming: list[tuple[float, int]] = []
        self._arrived: dict[int, float] = {}
        self._last_token: dict[int, float] = {}
        self._num_sent = 0
        for _ in range(self.callers):
            self._send()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.now

    def run(self) -> "ClosedLoop":
        while self._active or self._coming:
            if not self._active:
                self.now = max(self.now, self._coming[0][0])
            self._take_arrivals()
            self._step()
        return self

    def _send(self) -> None:
        if self._num_sent < self.callers * ANSWERS_EACH:
            heapq.heappush(self._coming, (self.now + self._draw.uniform(0, LATEST_ARRIVAL_S), self._num_sent))
            self._num_sent += 1

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            at, number = heapq.heappop(self._coming)
            self._arrived[number] = at
            self._active.append(request(number, PROMPT_TOKENS, OUTPUT_TOKENS))

    def _step(self) -> None:
        active = self._active
        decodes = [one for one in active if one.phase is Phase.DECODING]
        num_prompts = len(active) - len(decodes)
        work = decode_work(decodes)
        self._limits.prompt_budget = prompt_budget(self._times.time, work, num_prompts, self.target_s)
        plan = self._scheduler.schedule(active, frozenset()).as_plan([], [])
        plan = normalize_output(plan, active, frozenset(), self._limits)
        assert len(plan.generation_requests) == len(decodes), "a stream waits for a prompt"
        seconds = self.machine.seconds(work) + self.machine.seconds(prompt_work(plan))
        self.now += seconds
        for one in plan.generation_requests:
            one.num_computed += 1
            self._draw_token(one)
        for one in plan.context_requests:
            if one.phase is Phase.PENDING:
                one.move(Phase.PREFILLING)
            one.num_computed += plan.chunk_sizes[one.request_id]
            if not one.context_remaining:
                one.move(Phase.DECODING)
                self._draw_token(one)

    def _draw_token(self, one: LlmRequest) -> None:
        number = one.request_id
        one.num_generated += 1
        self.num_tokens += 1
        if number in self._last_token:
            self.gaps.append(self.now - self._last_token[number])
        else:
            self.first_tokens.append(self.now - self._arrived[number])
        self._last_token[number] = self.now
        if one.num_generated == OUTPUT_TOKENS:
            self._active.remove(one)
            self._send()


def closed_loop(machine: StepTime, *, callers: int, target_s: float) -> ClosedLoop:
    """The whole run of so many callers."""
    return ClosedLoop(machine, callers, target_s).run()
