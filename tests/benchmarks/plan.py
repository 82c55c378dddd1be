"""CPU time of planning and checking one tick: `python tests/benchmarks/plan.py [ROUNDS]` prints a table."""

import statistics
import sys
import time

from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import SchedulerOptions, SchedulerPolicy, build_scheduler, normalize_output

RUNNING, WAITING, BLOCK_SIZE, NUM_BLOCKS = 256, 1000, 16, 20_000


class Blocks:
    """KV memory of which every running request holds 32 blocks."""

    block_size = BLOCK_SIZE
    num_blocks = NUM_BLOCKS
    free_blocks = NUM_BLOCKS - 32 * RUNNING

    def get_max_resource_count(self) -> int:
        return NUM_BLOCKS

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return -(-request.max_positions // BLOCK_SIZE)

    def blocks_held(self, request: LlmRequest) -> int:
        return 0 if request.phase is Phase.PENDING else 32

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> int:
        return -(-(request.num_computed + num_tokens) // BLOCK_SIZE) - self.blocks_held(request)


def requests(num_decoding: int) -> list[LlmRequest]:
    """256 running requests, `num_decoding` of them decoding, and 1,000 waiting ones."""
    active = []
    for number in range(RUNNING + WAITING):
        request = LlmRequest(request_id=number, num_prompt_tokens=500, max_new_tokens=200, arrival=number)
        if number < num_decoding:
            request.phase, request.num_computed, request.num_generated = Phase.DECODING, 500, 1
        elif number < RUNNING:
            request.phase, request.num_computed = Phase.PREFILLING, 498
        active.append(request)
    return active


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"{RUNNING} running, {WAITING} waiting; microseconds a tick, median and 99th percentile of {rounds}")
    for policy in SchedulerPolicy:
        for name in ("fifo", "prefill_first"):
            for slots in (RUNNING, RUNNING + 64):
                for cache_budget in (None, NUM_BLOCKS):
                    options = SchedulerOptions(
                        scheduler=name,
                        policy=policy,
                        max_num_requests=slots,
                        max_batch_tokens=2048,
                        cache_budget=cache_budget,
                    )
                    scheduler, active = build_scheduler(options, Blocks()), requests(num_decoding=248)
                    limits, times = options.limits(BLOCK_SIZE), []
                    for _ in range(rounds):
                        start = time.thread_time()
                        plan = normalize_output(scheduler.schedule_request(active, set()), active, set(), limits)
                        times.append(1e6 * (time.thread_time() - start))
                    median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
                    print(
                        f"{policy.name:20} {name:14} slots {slots} cache budget {cache_budget!s:6}"
                        f"{median:7.0f} {p99:7.0f}   {len(plan.generation_requests)} decodes, "
                        f"{plan.num_context_tokens} context tokens"
                    )


if __name__ == "__main__":
    main()
