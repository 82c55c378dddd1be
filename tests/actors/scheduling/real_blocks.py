"""RealBlocks: the Batcher's own view of a real KV cache, and a loop that runs schedulers on it without a model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from genbatch.actors.batcher.planner import KVView
from genbatch.actors.batcher.requests import Slotted
from genbatch.actors.batcher.slots import HeldPrompts
from genbatch.actors.scheduling.plan import StepLimits
from genbatch.actors.scheduling.request import Blocks, LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import RequestScheduler, SchedulerOutput, normalize_output
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import LayerGroup

NUM_SLOTS = 64


class RealBlocks(KVView):
    """What schedulers see in the service, over pools of these sizes; positions are computed without a model."""

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        windows: Sequence[int | None] = (None,),
        max_batch_tokens: int = 16,
    ) -> None:
        counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
        self.kv = KVCache(
            [LayerGroup((layer,), window) for layer, window in enumerate(windows)],
            num_blocks=counts,
            block_size=block_size,
            num_sequences=NUM_SLOTS,
            allow_block_sharing=False,
        )
        super().__init__(self.kv, HeldPrompts([], 1), StepLimits(max_batch_tokens, block_size))
        self._slots = list(range(NUM_SLOTS))

    def allocate(self, request: LlmRequest, num_tokens: int) -> None:
        """Computes positions, or raises OutOfBlocks."""
        assert isinstance(request, Slotted)
        if request.seq_id is None:
            request.seq_id = self._slots.pop()
        self.kv.reserve([(request.seq_id, [1] * num_tokens, request.num_computed)]).commit()

    def release(self, request: LlmRequest) -> None:
        assert isinstance(request, Slotted)
        if request.seq_id is not None:
            self.kv.seq_rm(request.seq_id)
            self._slots.append(request.seq_id)
            request.seq_id = None


def request(request_id: int, prompt: int = 8, max_new: int = 4, **fields: object) -> LlmRequest:
    """A request whose arrival is its id."""
    return Slotted(
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
    kv: RealBlocks
    limits: StepLimits
    running: list[LlmRequest] = field(default_factory=list)
    waiting: list[LlmRequest] = field(default_factory=list)
    finished: list[LlmRequest] = field(default_factory=list)
    refused: list[LlmRequest] = field(default_factory=list)
    plans: list[SchedulerOutput] = field(default_factory=list)
    peak_blocks: dict[int, Blocks] = field(default_factory=dict)

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
