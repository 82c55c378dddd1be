"""CountedBlocks: an exact KV memory that counts instead of storing, and a loop that runs schedulers on it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import RequestScheduler, SchedulerOutput, normalize_output
from genbatch.actors.scheduling.step_plan import StepLimits


class CountedBlocks:
    """Implements KVResources: blocks are allocated as positions are computed, none is shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks
        self._held: dict[int, int] = {}

    def get_max_resource_count(self) -> int:
        return self.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return -(-request.max_positions // self.block_size)

    def blocks_held(self, request: LlmRequest) -> int:
        return self._held.get(request.request_id, 0)

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> int:
        return -(-(request.num_computed + num_tokens) // self.block_size) - self.blocks_held(request)

    def allocate(self, request: LlmRequest, num_tokens: int) -> None:
        num_blocks = self.blocks_for_step(request, num_tokens)
        assert num_blocks <= self.free_blocks, "the plan overran the pool"
        self.free_blocks -= num_blocks
        self._held[request.request_id] = self.blocks_held(request) + num_blocks

    def release(self, request: LlmRequest) -> None:
        self.free_blocks += self._held.pop(request.request_id, 0)


def request(request_id: int, prompt: int = 8, max_new: int = 4, **fields: object) -> LlmRequest:
    """A request whose arrival is its id."""
    return LlmRequest(
        request_id=request_id, num_prompt_tokens=prompt, max_new_tokens=max_new, arrival=request_id, **fields
    )


def decoding(request_id: int, positions: int = 8, max_new: int = 100) -> LlmRequest:
    """A request that holds `positions` and has drawn its first token."""
    fields = {"phase": Phase.DECODING, "num_computed": positions, "num_generated": 1}
    return request(request_id, positions, max_new, **fields)


def prefilling(request_id: int, prompt: int, computed: int, max_new: int = 4) -> LlmRequest:
    """A request in the middle of its prompt."""
    return request(request_id, prompt, max_new, phase=Phase.PREFILLING, num_computed=computed)


@dataclass
class Loop:
    """What the Batcher does with a scheduler, without model and actor: every plan is checked and applied."""

    scheduler: RequestScheduler
    kv: CountedBlocks
    limits: StepLimits
    running: list[LlmRequest] = field(default_factory=list)
    waiting: list[LlmRequest] = field(default_factory=list)
    finished: list[LlmRequest] = field(default_factory=list)
    refused: list[LlmRequest] = field(default_factory=list)
    plans: list[SchedulerOutput] = field(default_factory=list)
    peak_blocks: dict[int, int] = field(default_factory=dict)

    def add(self, requests: Iterable[LlmRequest]) -> None:
        self.waiting = sorted([*self.waiting, *requests], key=lambda r: r.waiting_key)

    def tick(self) -> SchedulerOutput:
        active = [*self.running, *self.waiting]
        plan = normalize_output(self.scheduler.schedule_request(active, set()), active, set(), self.limits)
        for paused in plan.paused_requests:
            self.kv.release(paused)
            paused.pause()
            self.running.remove(paused)
            self.add([paused])
        for refused in plan.never_fitting:
            self.kv.release(refused)
            refused.move(Phase.FINISHED)
            (self.running if refused in self.running else self.waiting).remove(refused)
            self.refused.append(refused)
        for started in plan.context_requests:
            if started.phase is Phase.PENDING:
                started.move(Phase.PREFILLING)
                self.waiting.remove(started)
                self.running.append(started)
        for scheduled in [*plan.context_requests, *plan.generation_requests]:
            self._compute(scheduled, plan.chunk_sizes.get(scheduled.request_id, 1))
        self.plans.append(plan)
        return plan

    def _compute(self, scheduled: LlmRequest, num_tokens: int) -> None:
        self.kv.allocate(scheduled, num_tokens)
        scheduled.num_computed += num_tokens
        self.peak_blocks[scheduled.request_id] = self.kv.blocks_held(scheduled)
        if scheduled.context_remaining:
            return
        if scheduled.phase is Phase.PREFILLING:
            scheduled.move(Phase.DECODING)
        scheduled.num_generated += 1
        if scheduled.num_generated == scheduled.max_new_tokens:
            scheduled.move(Phase.FINISHED)
            self.kv.release(scheduled)
            self.running.remove(scheduled)
            self.finished.append(scheduled)

    def run(self, max_ticks: int = 10_000, each_tick: Callable[[SchedulerOutput], None] | None = None) -> None:
        """Ticks until nothing is left; a scheduler that stops making progress is an error."""
        for _ in range(max_ticks):
            if not self.running and not self.waiting:
                assert self.kv.free_blocks == self.kv.num_blocks
                return
            plan = self.tick()
            assert plan.num_scheduled or plan.paused_requests or plan.never_fitting, "an empty plan"
            if each_tick:
                each_tick(plan)
        raise AssertionError(f"not done after {max_ticks} ticks")
