"""Measures the GPU path in one call: correctness first, then decode and a mixed load against transformers.

    python tests/benchmarks/gpu.py                 # on a machine with a GPU, under 9 minutes, no network
    python tests/benchmarks/gpu.py --dry-run       # the same path over a tiny model, under Triton's interpreter

Models have the shapes of Qwen3-0.6B, Qwen3-1.7B and Llama-3.1-8B and random weights. A figure that could not be taken
before the time ran out, or whose peer failed, is printed as what happened instead.
"""

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from genbatch.nif.attention import ATTENTION_NAME, register_attention
from genbatch.nif.batch import Entry, Logits
from genbatch.nif.context import Context
from genbatch.nif.cuda_graphs import GraphOptions
from genbatch.nif.model import Model
from genbatch.nif.model_layout import layer_groups
from genbatch.nif.sampler import Sampled, SamplerState
from genbatch.nif.sampling_params import SamplingParams
from genbatch.nif.self_check import check_paged_path, probe_layers
from genbatch.nif.triton_runner import TritonRunner

_QWEN3 = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-0.6b": lambda: Qwen3Config(hidden_size=1024, intermediate_size=3072, **_QWEN3),
    "qwen3-1.7b": lambda: Qwen3Config(hidden_size=2048, intermediate_size=6144, **_QWEN3),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
}
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
    max_position_embeddings=64,
)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        batches: decode batch sizes.
        context: positions each sequence holds when its decoding is timed.
        steps: decode steps timed.
        requests: of the mixed load W1.
        lengths: shortest and longest of W1's prompts and of its answers.
        n_batch: most tokens of one step.
        budget_s: no case starts later than this after the start.
        peer_limit_s: after which transformers' mixed load is given up.
    """

    batches: Sequence[int] = (1, 16, 64, 256)
    context: int = 1024
    steps: int = 64
    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)
    n_batch: int = 8192
    budget_s: float = 400.0
    peer_limit_s: float = 90.0


DRY_PLAN = Plan(batches=(1, 2), context=5, steps=2, requests=2, lengths=(2, 4), n_batch=8, budget_s=120.0)


@dataclass
class Report:
    """What was measured, row by row, and what was not."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, case: str, figure: str, note: str = "") -> None:
        self.rows.append((case, figure, note))
        print(f"  {case}: {figure} {note}", flush=True)

    def table(self) -> str:
        """The rows as a Markdown table."""
        rows = [("case", "figure", "note"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(lines)


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


def bytes_per_step(model: Model, batch_size: int, context: int) -> int:
    """Bytes that a decode step must read: every weight once, and every sequence's keys and values."""
    hf: Any = model.hf
    weights = sum(parameter.nbytes for parameter in hf.parameters())
    if hf.lm_head.weight is not hf.model.embed_tokens.weight:
        weights -= hf.model.embed_tokens.weight.nbytes  # of which a step reads batch_size rows
    per_position = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.layers)
    return weights + batch_size * context * per_position * model.dtype.itemsize


def build_model(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """A model of this shape with random weights."""
    register_attention()
    torch.manual_seed(0)
    with torch.device(device):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    hf.eval().requires_grad_(False)
    groups = layer_groups(name, config)
    layers, vocab_size = probe_layers(name, hf, groups)
    unused: Any = None  # prompts are token ids
    return Model(
        name=name,
        hf=hf,
        config=config,
        tokenizer=unused,
        dtype=dtype,
        device=device,
        groups=groups,
        layers=layers,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        max_position=config.max_position_embeddings,
    )


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy on the device reads and writes together."""
    size = (1 << 16) if DRY_RUN else (4 << 30)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / median(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_context(model: Model, plan: Plan, num_sequences: int, positions: int, q_interval: int) -> Context:
    """A context whose sequences can each hold so many positions; its graphs are captured before anything is timed."""
    graphs = None
    if model.device.type == "cuda":
        graphs = GraphOptions(
            q_padding_interval_size=q_interval,
            kv_padding_interval_size=2048,  # no sequence outgrows it: one graph a batch size
            max_batch_size=num_sequences,
        )
    block_size = 4 if DRY_RUN else 16
    return Context(
        model,
        TritonRunner(model, graphs=graphs),
        n_ctx=num_sequences * (positions + block_size),
        n_parallel=num_sequences,
        block_size=block_size,
        n_batch=plan.n_batch,
        allow_block_sharing=False,
    )


def decode_rate(model: Model, plan: Plan, batch_size: int) -> tuple[float, float]:
    """Decode tokens a second, draws and host work included, and the median host time of launching a forward."""
    context = open_context(model, plan, batch_size, plan.context + plan.steps + 1, q_interval=batch_size)
    draw = random.Random(batch_size)
    start_length = plan.context - plan.steps // 2  # so that the mean length is plan.context
    for seq_id in range(batch_size):
        context.prefill([draw.randrange(model.vocab_size) for _ in range(start_length)], seq_id, 0)
    states = [SamplerState(SamplingParams(seed=seq_id), ()) for seq_id in range(batch_size)]
    tokens = [1] * batch_size
    launches = time_forwards(context)
    times = []
    for step in range(plan.steps):
        begin = time.perf_counter()
        entries = [Entry(seq_id, (token,), start_length + step) for seq_id, token in enumerate(tokens)]
        _, drawn = context.step(entries, states)
        tokens = [result.token_id for result in drawn if isinstance(result, Sampled)]
        assert len(tokens) == batch_size, "a row held no number to draw from"
        times.append(time.perf_counter() - begin)
    context.close()
    warm = times[plan.steps // 4 :]
    return batch_size * len(warm) / sum(warm), median(launches[plan.steps // 4 :])


def time_forwards(context: Context) -> list[float]:
    """Seconds that each call of the runner's forward takes to return, filled in as the context is used."""
    launches: list[float] = []
    forward = context.runner.forward

    def timed(batch: Any) -> torch.Tensor:
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


def peer_generate_batch(model: Model, plan: Plan, requests: Sequence[Request]) -> float:
    """Answer tokens a second of transformers' continuous batching over the same requests, as it configures itself."""
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # On a CPU it would take nearly all memory for its cache.
    sizes = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=16)} if DRY_RUN else {}
    manager = hf.init_continuous_batching(generation_config=config, **sizes)
    manager.start()
    try:
        begin = time.perf_counter()
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.max_tokens, eos_token_id=-1)
        produced = done = 0
        while done < len(requests):
            if time.perf_counter() - begin > plan.peer_limit_s:
                raise RuntimeError(f"{done} of {len(requests)} requests done after {plan.peer_limit_s:.0f} s")
            result = manager.get_result(timeout=5)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                done += 1
                produced += len(result.generated_tokens)
        elapsed = time.perf_counter() - begin
    finally:
        manager.stop(block=True)
        hf.set_attn_implementation(ATTENTION_NAME)
    return produced / elapsed


def peer_static_cache(model: Model, plan: Plan, batch_size: int) -> float:
    """Answer tokens a second of `generate` with a static cache, prefill included."""
    hf: Any = model.hf
    hf.set_attn_implementation("sdpa")
    ids = torch.randint(model.vocab_size, (batch_size, plan.context), device=model.device)
    options = {
        "max_new_tokens": plan.steps,
        "min_new_tokens": plan.steps,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": "static",
    }
    try:
        for _ in range(2):  # the first compiles and allocates
            synchronize(model.device)
            begin = time.perf_counter()
            hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
            synchronize(model.device)
            elapsed = time.perf_counter() - begin
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    return batch_size * plan.steps / elapsed


def run_tests() -> str:
    """Every kernel test on the GPU and the tests marked gpu; what pytest says last."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/nif/kernels", "tests/nif/test_gpu.py"],
        cwd=root,
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]


def cases(plan: Plan, models: Sequence[str], bandwidth: float, report: Report) -> Iterator[None]:
    """Takes the figures, one a step of the iterator, the cheap and telling ones first."""
    device, dtype = target()
    for name in models:
        model = build_model(name, TINY if DRY_RUN else SHAPES[name](), device, dtype)
        check_paged_path(name, model)
        for batch_size in plan.batches:
            rate, launch = decode_rate(model, plan, batch_size)
            roofline = batch_size * bandwidth / bytes_per_step(model, batch_size, plan.context)
            note = f"{rate / roofline:.0%} of roofline {roofline:,.0f}, forward returns after {launch * 1e6:.0f} us"
            report.add(f"{name} decode B={batch_size} context {plan.context}", f"{rate:,.0f} tok/s", note)
            yield
        if name == models[0]:
            requests = mixed_load(plan, model.vocab_size)
            ours = run_mixed_load(model, plan, requests)
            report.add(f"{name} W1", f"{ours:,.0f} tok/s")
            yield
            theirs = peer(report, f"{name} W1 generate_batch", partial(peer_generate_batch, model, plan, requests))
            if theirs is not None:
                report.add(f"{name} W1, ratio to generate_batch", f"{ours / theirs:.2f}")
            yield
        for batch_size in plan.batches[:2]:
            case = f"{name} generate static cache, prefill included, B={batch_size}"
            peer(report, case, partial(peer_static_cache, model, plan, batch_size))
            yield
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def peer(report: Report, case: str, measure: Callable[[], float]) -> float | None:
    """A peer's figure; a peer that fails is reported, not fatal."""
    try:
        rate = measure()
    except Exception as fault:
        report.add(case, "failed", f"{type(fault).__name__}: {str(fault)[:120]}")
        return None
    report.add(case, f"{rate:,.0f} tok/s")
    return rate


def target() -> tuple[torch.device, torch.dtype]:
    return (torch.device("cpu"), torch.float32) if DRY_RUN else (torch.device("cuda", 0), torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, under Triton's interpreter")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--skip-tests", action="store_true", help="measure without running the tests first")
    arguments = parser.parse_args()
    if not DRY_RUN and not torch.cuda.is_available():
        sys.exit("no CUDA device; --dry-run tries the script without one")
    plan = DRY_PLAN if DRY_RUN else Plan()
    models = ["tiny"] if DRY_RUN else arguments.models
    started, report = time.monotonic(), Report()
    device, _ = target()
    print(
        f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU, interpreted: figures mean nothing'}"
    )
    if not DRY_RUN and not arguments.skip_tests:
        report.add("tests", run_tests())
    bandwidth = measured_bandwidth(device)
    report.add("copy bandwidth", f"{bandwidth / 1e12:.3f} TB/s", "read and written together")
    for _ in cases(plan, models, bandwidth, report):
        if time.monotonic() - started > plan.budget_s:
            report.add("the rest", "not measured", f"the {plan.budget_s:.0f} s were over")
            break
    print(report.table())


if __name__ == "__main__":
    main()
