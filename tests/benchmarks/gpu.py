"""Tries and measures the GPU path in one call, in parts: what is there, tests, races, the table beside its peers.

    make gpu                                             # on a machine with a GPU, under ten minutes, no network
    python tests/benchmarks/gpu.py --parts tests races   # some parts
    python tests/benchmarks/gpu.py --dry-run             # all parts over a tiny model, under Triton's interpreter

    machine     driver, torch, compute capability                       seconds
    tests       every kernel test and every test marked gpu, on it      two minutes
    races       steps held up with torch.cuda._sleep; compute-sanitizer two minutes, where it is installed
    table       decode at B = 1, 16, 64, 256, TTFT, a mixed load, peers  five minutes

What was found is in one file, written anew after each part: --result FILE; by default gpu.json beside the others.
Models have the shapes of Qwen3-0.6B, Qwen3-1.7B and Llama-3.1-8B and random weights. A figure that could not be taken
before the time ran out, or whose peer failed, is printed as what happened instead.
"""

# Triton reads TRITON_INTERPRET when it is first imported, so the variable is set between the imports.
# ruff: noqa: E402

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
# The checkout's own code, whether or not anything is installed.
sys.path[:0] = [str(ROOT / ".ns"), str(Path(__file__).parent)]

import torch
import triton
from gpu_loads import (
    DRY_PLAN,
    Plan,
    begin_decodes,
    decode_rate,
    first_token_s,
    mixed_load,
    overlapped_decode_rate,
    run_mixed_load,
)
from gpu_models import SHAPES, TINY, build_model, bytes_per_step
from gpu_peers import peer_generate_batch, peer_static_cache, peer_vllm, synchronize

from genbatch.nif.models.self_check import check_paged_path

PARTS = ("tests", "races", "table")


@dataclass
class Report:
    """What was measured, row by row, and what was not."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, case: str, figure: str, note: str = "") -> None:
        self.rows.append((case, figure, note))
        print(f"  {case}: {figure} {note}", flush=True)

    def write(self, path: Path) -> None:
        """The rows as a file, whatever comes after."""
        rows = [{"case": case, "figure": figure, "note": note} for case, figure, note in self.rows]
        path.write_text(json.dumps({"dry_run": DRY_RUN, "rows": rows}, indent=1) + "\n")

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


def machine(report: Report) -> None:
    """What is there; a GPU that torch cannot use ends it here."""
    nvidia_smi = shutil.which("nvidia-smi")
    driver = "no nvidia-smi"
    if nvidia_smi is not None:
        query = [nvidia_smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    report.add("driver", driver)
    report.add("torch", torch.__version__, f"CUDA {torch.version.cuda}, triton {triton.__version__}")
    if DRY_RUN:
        report.add("device", "CPU, interpreted: figures mean nothing")
        return
    if torch.version.cuda is None:
        sys.exit('this torch is for the CPU; pip install "torch===2.13.0" takes the one with CUDA')
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device: {driver}; --dry-run tries the script without one")
    major, minor = torch.cuda.get_device_capability(0)
    report.add("device", torch.cuda.get_device_name(0), f"compute capability {major}.{minor}")


def run_tests(report: Report) -> None:
    """Every kernel test on the GPU and the tests marked gpu, without stopping at the first that fails."""
    chosen = ["tests/nif/kernels", "tests/nif/test_gpu.py"]
    if DRY_RUN:
        chosen = ["tests/nif/kernels/test_kernel_elementwise.py", "tests/nif/test_gpu.py", "-k", "next_tokens or h15"]
    report.add("tests", pytest_of(chosen, report))


def run_races(report: Report) -> None:
    """What only time shows: steps that overlap while the device is held up, and the sanitizer over the kernels."""
    report.add("steps held up", pytest_of(["tests/nif/test_gpu.py", "-k", "held_up"], report))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    kernels = ["tests/nif/kernels/test_kernel_paged_attention.py", "-k", "padding_row or every_head_size or one_long"]
    for tool in ("memcheck", "racecheck"):
        if sanitizer is None:
            report.add(f"compute-sanitizer {tool}", "not there", "it comes with the CUDA toolkit")
            continue
        prefix = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all")
        report.add(f"compute-sanitizer {tool}", pytest_of(kernels, report, prefix))


def pytest_of(chosen: Sequence[str], report: Report, prefix: Sequence[str] = ()) -> str:
    """What pytest says last, and before it each test that failed."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "pytest", "-q", *chosen],
        cwd=ROOT,
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT / ".ns")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR", "========= ERROR")):
            report.add("failed", line[:300])
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return f"{lines[-1] if lines else done.stderr.strip()[-200:]} (exit {done.returncode})"


def run_table(report: Report, models: Sequence[str], plan: Plan) -> None:
    """The figures, as many as the time allows."""
    started = time.monotonic()
    bandwidth = measured_bandwidth(target()[0])
    report.add("copy bandwidth", f"{bandwidth / 1e12:.3f} TB/s", "read and written together")
    for _ in cases(plan, models, bandwidth, report):
        if time.monotonic() - started > plan.budget_s:
            report.add("the rest", "not measured", f"the {plan.budget_s:.0f} s were over")
            break


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
        for length in plan.prompts:
            seconds = first_token_s(model, plan, length)
            report.add(
                f"{name} TTFT, {length} prompt tokens", f"{1e3 * seconds:.1f} ms", f"{length / seconds:,.0f} tok/s"
            )
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
        if find_spec("vllm") is not None:
            peer(report, f"{name} vLLM B={plan.batches[1]}", partial(peer_vllm, model, plan, plan.batches[1]))
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--result", type=Path, default=ROOT / "tests/benchmarks/results/gpu.json")
    arguments = parser.parse_args()
    report, started = Report(), time.monotonic()
    models = ["tiny"] if DRY_RUN else arguments.models
    parts: dict[str, Callable[[], None]] = {
        "tests": partial(run_tests, report),
        "races": partial(run_races, report),
        "table": partial(run_table, report, models, DRY_PLAN if DRY_RUN else Plan()),
    }
    machine(report)
    for name in arguments.parts:
        print(f"{name}:", flush=True)
        begin = time.monotonic()
        parts[name]()
        report.add(f"the part {name} took", f"{time.monotonic() - begin:.0f} s")
        report.write(arguments.result)
    report.add("all of it took", f"{time.monotonic() - started:.0f} s")
    report.write(arguments.result)
    print(report.table())
    print(f"written to {arguments.result}")


if __name__ == "__main__":
    main()
