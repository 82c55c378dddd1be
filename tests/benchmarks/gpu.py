"""Measures the GPU path in one call: correctness first, then decode and a mixed load against transformers.

    python tests/benchmarks/gpu.py                 # on a machine with a GPU, under 9 minutes, no network
    python tests/benchmarks/gpu.py --dry-run       # the same path over a tiny model, under Triton's interpreter

Models have the shapes of Qwen3-0.6B, Qwen3-1.7B and Llama-3.1-8B and random weights. A figure that could not be taken
before the time ran out, or whose peer failed, is printed as what happened instead.
"""

# Triton reads TRITON_INTERPRET when it is first imported, so the variable is set between the imports.
# ruff: noqa: E402

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
# The checkout's own code, whether or not anything is installed.
sys.path[:0] = [str(ROOT / ".ns"), str(Path(__file__).parent)]

import torch
from gpu_loads import (
    DRY_PLAN,
    Plan,
    begin_decodes,
    decode_rate,
    mixed_load,
    overlapped_decode_rate,
    run_mixed_load,
)
from gpu_models import SHAPES, TINY, build_model, bytes_per_step
from gpu_peers import peer_generate_batch, peer_static_cache, synchronize

from genbatch.nif.models.self_check import check_paged_path


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


def run_tests() -> str:
    """Every kernel test on the GPU and the tests marked gpu; what pytest says last."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/nif/kernels", "tests/nif/test_gpu.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT / ".ns")},
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
            context = begin_decodes(model, plan, batch_size)
            rate, launch = decode_rate(context, plan, batch_size)
            roofline = batch_size * bandwidth / bytes_per_step(model, batch_size, plan.context)
            note = f"{rate / roofline:.0%} of roofline {roofline:,.0f}, forward returns after {launch * 1e6:.0f} us"
            report.add(f"{name} decode B={batch_size} context {plan.context}", f"{rate:,.0f} tok/s", note)
            rate, host = overlapped_decode_rate(context, plan, batch_size)
            context.close()
            note = f"{rate / roofline:.0%} of roofline, the host works {host * 1e6:.0f} us a step"
            case = f"{name} decode B={batch_size} context {plan.context}, steps overlapped"
            report.add(case, f"{rate:,.0f} tok/s", note)
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
