"""The loads of the GPU benchmark, and our own figures over them."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from genbatch.nif.context import Context
from genbatch.nif.engine_options import MOST_CAPTURED_TOKENS, GraphOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Entry, Logits, Rows
from genbatch.nif.runners.triton_runner import Precision, TritonRunner
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        batches: decode batch sizes.
        prompts: lengths whose time to the first token is measured.
        context: positions each sequence holds when its decoding is timed.
        steps: decode steps timed.
        requests: of the mixed load W1.
        lengths: shortest and longest of W1's prompts and of its answers.
        n_batch: most tokens of one step.
        block_size: positions a KV block holds.
        budget_s: no case starts later than this after the start.
        peer_limit_s: after which transformers' mixed load is given up.
    """

    batches: Sequence[int] = (1, 16, 64, 256)
    prompts: Sequence[int] = (128, 2048, 8192)
    context: int = 1024
    steps: int = 64
    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)
    n_batch: int = 8192
    block_size: int = 16
    budget_s: float = 400.0
    peer_limit_s: float = 90.0


DRY_PLAN = Plan(
    batches=(1, 2),
    prompts=(3, 20),
    context=5,
    steps=2,
    requests=2,
    lengths=(2, 4),
    n_batch=8,
    block_size=4,
    budget_s=120.0,
)


@dataclass(frozen=True)
class Request:
    """A scripted request: nothing ends it early."""

    prompt: list[int]
    max_tokens: int


def mixed_load(plan: Plan, vocab_size: int) -> list[Request]:
    """W1: prompt and answer lengths uniform, a fixed seed."""
    draw = random.Random(20260101)
    requests = []
    for _ in range(plan.requests):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*plan.lengths))]
        requests.append(Request(prompt, draw.randint(*plan.lengths)))
    return requests


def open_context(
    model: Model, plan: Plan, num_sequences: int, positions: int, q_interval: int, **formats: str
) -> Context:
    """A context whose sequences can each hold so many positions; its graphs are captured before anything is timed."""
    graphs = None
    if model.device.type == "cuda":
        graphs = GraphOptions(
            q_padding_interval_size=q_interval,
            max_batch_size=num_sequences,
            max_prompt_tokens=min(plan.n_batch, MOST_CAPTURED_TOKENS),
        )
    return Context(
        model,
        TritonRunner(model, graphs=graphs, longest=positions + plan.block_size, precision=Precision(**formats)),
        n_ctx=num_sequences * (positions + plan.block_size),
        n_parallel=num_sequences,
        block_size=plan.block_size,
        n_batch=plan.n_batch,
        allow_block_sharing=False,
    )


def begin_decodes(model: Model, plan: Plan, batch_size: int, **formats: str) -> Context:
    """A context with so many sequences, after their prompts. `formats` are the arguments of `Precision`."""
    context = open_context(model, plan, batch_size, plan.context + plan.steps + 1, batch_size, **formats)
    draw = random.Random(batch_size)
    for seq_id in range(batch_size):
        context.prefill([draw.randrange(model.vocab_size) for _ in range(start_length(plan))], seq_id, 0)
    return context


def first_token_s(model: Model, plan: Plan, length: int) -> float:
    """Median seconds from a prompt of so many tokens, alone, to its first token: chunks, draw and host work."""
    context = open_context(model, plan, 1, length, q_interval=1)
    draw, times = random.Random(length), []
    for attempt in range(4):
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(length))
        state = SamplerState(SamplingParams(seed=attempt), prompt)
        begin = time.perf_counter()
        for start in range(0, length, plan.n_batch):
            chunk = prompt[start : start + plan.n_batch]
            is_last = start + plan.n_batch >= length
            entry = Entry(0, chunk, start, Logits.LAST if is_last else Logits.NONE)
            _, drawn = context.step([entry], [state if is_last else None])
        [result] = drawn
        assert isinstance(result, Sampled), "the row held no number to draw from"
        times.append(time.perf_counter() - begin)
        context.seq_rm(0)
    context.close()
    return median(times[1:])


def start_length(plan: Plan) -> int:
    """Positions held before the first step, so that the mean is the plan's."""
    return plan.context - plan.steps // 2


def decode_rate(context: Context, plan: Plan, batch_size: int) -> tuple[float, float]:
    """Decode tokens a second, draws and host work included, and the median host time of launching a forward."""
    states = [SamplerState(SamplingParams(seed=seq_id), ()) for seq_id in range(batch_size)]
    tokens = [1] * batch_size
    launches = time_forwards(context)
    times = []
    for step in range(plan.steps):
        begin = time.perf_counter()
        entries = [Entry(seq_id, (token,), start_length(plan) + step) for seq_id, token in enumerate(tokens)]
        _, drawn = context.step(entries, states)
        tokens = [result.token_id for result in drawn if isinstance(result, Sampled)]
        assert len(tokens) == batch_size, "a row held no number to draw from"
        times.append(time.perf_counter() - begin)
    warm = times[plan.steps // 4 :]
    return batch_size * len(warm) / sum(warm), median(launches[plan.steps // 4 :])


def overlapped_decode_rate(context: Context, plan: Plan, batch_size: int) -> tuple[float, float]:
    """As `decode_rate` over the same positions, each step launched before the one before is read.

    The second figure is the median time that the host works in a step, without its wait for the tokens.
    """
    for seq_id in range(batch_size):
        context.seq_rm(seq_id, start_length(plan))
    entries = [Entry(seq_id, (1,), start_length(plan)) for seq_id in range(batch_size)]
    states = [SamplerState(SamplingParams(seed=seq_id), ()) for seq_id in range(batch_size)]
    waits = time_waits(context)
    run = context.decode_run(entries, states, max_steps=plan.steps)
    times = []
    for _ in range(plan.steps):
        begin = time.perf_counter()
        drawn = run.step()
        times.append(time.perf_counter() - begin)
        assert all(isinstance(result, Sampled) for result in drawn), "a row held no number to draw from"
    run.close()
    first = plan.steps // 4
    host = median(whole - wait for whole, wait in zip(times[first:-1], waits[first:-1], strict=True))
    return batch_size * len(times[first:]) / sum(times[first:]), host


def time_waits(context: Context) -> list[float]:
    """Seconds that each wait for a launched step's tokens takes, filled in as the context is used."""
    waits: list[float] = []
    runner = context.runner
    assert isinstance(runner, TritonRunner)
    launch = runner.launch

    def timed(*arguments: Any) -> Any:
        launched = launch(*arguments)
        wait = launched.wait

        def timed_wait() -> list[int | None]:
            begin = time.perf_counter()
            tokens = wait()
            waits.append(time.perf_counter() - begin)
            return tokens

        launched.wait = timed_wait  # type: ignore[method-assign]
        return launched

    runner.launch = timed  # type: ignore[method-assign]
    return waits


def time_forwards(context: Context) -> list[float]:
    """Seconds that each call of the runner's forward takes to return, filled in as the context is used."""
    launches: list[float] = []
    forward = context.runner.forward

    def timed(batch: Any) -> Rows:
        begin = time.perf_counter()
        logits = forward(batch)
        launches.append(time.perf_counter() - begin)
        return logits

    context.runner.forward = timed  # type: ignore[method-assign]
    return launches


@dataclass
class Running:
    """A request of W1 that holds a sequence."""

    request: Request
    seq_id: int
    n_past: int = 0
    answer: list[int] = field(default_factory=list)

    def next_entry(self, room: int) -> Entry:
        """Its next decode, or as much of its prompt as there is room for."""
        if self.answer:
            return Entry(self.seq_id, (self.answer[-1],), self.n_past)
        chunk = self.request.prompt[self.n_past : self.n_past + room]
        last = self.n_past + len(chunk) == len(self.request.prompt)
        return Entry(self.seq_id, chunk, self.n_past, Logits.LAST if last else Logits.NONE)


def run_mixed_load(model: Model, plan: Plan, requests: Sequence[Request]) -> float:
    """Answer tokens a second over W1: all decodes in every step, prompts in the room that is left."""
    context = open_context(model, plan, len(requests), 2 * plan.lengths[1], q_interval=16)
    greedy = SamplerState(SamplingParams(seed=0), ())
    running = [Running(request, seq_id) for seq_id, request in enumerate(requests)]
    begin = time.perf_counter()
    while running:
        room = plan.n_batch
        stepping, entries = [], []
        for one in sorted(running, key=lambda one: not one.answer):
            if room == 0:
                break
            entry = one.next_entry(room)
            room -= len(entry.tokens)
            stepping.append(one)
            entries.append(entry)
        _, drawn = context.step(entries, [greedy if entry.logits is Logits.LAST else None for entry in entries])
        for one, entry, result in zip(stepping, entries, drawn, strict=True):
            one.n_past += len(entry.tokens)
            if isinstance(result, Sampled):
                one.answer.append(result.token_id)
            if len(one.answer) == one.request.max_tokens:
                context.seq_rm(one.seq_id)
                running.remove(one)
    elapsed = time.perf_counter() - begin
    context.close()
    return sum(request.max_tokens for request in requests) / elapsed
