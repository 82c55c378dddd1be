"""The measured cases of one part of `gpu.py`: a child process. It ends at the first case that fails.

    GPU_EVENTS=FILE python tests/benchmarks/gpu_cases.py decode-8b RESULTS

After a failure the device may be lost for this process. `gpu.py` starts a new one for the cases that are left.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from gpu_attention import AttentionLoad, compare
from gpu_events import IS_DRY, done, report
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
from gpu_peers import peer_generate, peer_generate_batch, synchronize
from gpu_profile import kernel_times

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.self_check import check_paged_path

SHAPE_OF = {"decode-8b": "llama-3.1-8b", "decode-0.6b": "qwen3-0.6b"}
PEERS_END = "-peers"


class Bench:
    """What the cases share; the model is built by the first case that needs it."""

    def __init__(self, part: str, results: Path) -> None:
        self.part = part.removesuffix(PEERS_END)
        self.results = results
        self.plan = DRY_PLAN if IS_DRY else Plan()
        self.device = torch.device("cpu") if IS_DRY else torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.float32 if IS_DRY else torch.bfloat16

    @cached_property
    def model(self) -> Model:
        name = SHAPE_OF[self.part]
        model = build_model(name, TINY if IS_DRY else SHAPES[name](), self.device, self.dtype)
        check_paged_path(name, model)
        return model

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a large copy on the device reads and writes together."""
        source = torch.empty((1 << 16) if IS_DRY else (4 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = []
        for _ in range(6):
            synchronize(self.device)
            start = time.perf_counter()
            target.copy_(source)
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        return 2 * len(source) / median(times[1:])

    def cases(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and works: the cheap and telling ones first."""
        yield "machine", self.machine
        if self.part == "service":
            yield "service", self.service
            return
        for batch_size in self._batches():
            yield f"decode B={batch_size}", partial(self.decode, batch_size)
        if self.part == "decode-8b":
            for quantize, batch_size in product(("int4", "int8"), self.plan.batches):
                yield f"decode {quantize} B={batch_size}", partial(self.other_decode, batch_size, weights=quantize)
            for batch_size in self.plan.batches[2:]:
                yield f"decode float8 cache B={batch_size}", partial(self.other_decode, batch_size, cache="float8")
                name = f"decode int4 and float8 cache B={batch_size}"
                yield name, partial(self.other_decode, batch_size, weights="int4", cache="float8")
        if self.part == "decode-0.6b":
            for length in self.plan.prompts:
                yield f"TTFT, {length} prompt tokens", partial(self.first_token, length)
            yield "W1", self.mixed

    def peers(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Peers over the same loads."""
        for batch_size in self.plan.batches[:3]:
            yield f"generate, B={batch_size}", partial(self.generate, batch_size, False)
        if self.part == "decode-0.6b":
            yield "W1 generate_batch", self.generate_batch
        for batch_size in self.plan.batches[:2]:
            yield f"generate, static cache, B={batch_size}", partial(self.generate, batch_size, True)
        for batch_size in self.plan.batches:
            yield f"attention of {SHAPE_OF[self.part]}, B={batch_size}", partial(self.attention, batch_size)

    def machine(self) -> None:
        """What is there; a GPU that torch cannot use fails it."""
        smi = shutil.which("nvidia-smi")
        driver = "no nvidia-smi"
        if smi is not None:
            query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        report("figure", "driver", figure=driver, note=f"Python {platform.python_version()}")
        note = f"CUDA {torch.version.cuda}, triton {triton.__version__}"
        report("figure", "torch", figure=torch.__version__, note=note)
        if IS_DRY:
            report("figure", "device", figure="CPU, interpreted: figures mean nothing")
        elif not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} finds no CUDA device; --dry-run tries the script without one"
            )
        else:
            major, minor = torch.cuda.get_device_capability(self.device)
            name = torch.cuda.get_device_name(self.device)
            report("figure", "device", figure=name, note=f"compute capability {major}.{minor}")
        report("figure", "copy bandwidth", figure=f"{self.bandwidth / 1e12:.3f} TB/s", note="read and written together")

    def decode(self, batch_size: int) -> None:
        plan, model = self.plan, self.model
        case = f"decode B={batch_size} context {plan.context}"
        roofline = batch_size * self.bandwidth / bytes_per_step(model, batch_size, plan.context)
        context = begin_decodes(model, plan, batch_size)
        rate, launch = decode_rate(context, plan, batch_size)
        note = f"{rate / roofline:.0%} of roofline {roofline:,.0f}, forward returns after {launch * 1e6:.0f} us"
        report("figure", case, figure=f"{rate:,.0f} tok/s", note=note)
        rate, host = overlapped_decode_rate(context, plan, batch_size)
        note = f"{rate / roofline:.0%} of roofline, the host works {host * 1e6:.0f} us a step"
        report("figure", f"{case}, steps overlapped", figure=f"{rate:,.0f} tok/s", note=note)
        if not IS_DRY:
            kernels = kernel_times(context, plan, batch_size)
            whole = sum(kernel.seconds for kernel in kernels)
            report("figure", f"{case}, all kernels", figure=f"{whole * 1e3:.3f} ms", note="a step")
            for kernel in kernels[:8]:
                figure, note = f"{kernel.seconds * 1e6:.0f} us", f"{kernel.launches:g} launches a step"
                report("figure", f"{case}, {kernel.name}", figure=figure, note=note)
        context.close()

    def other_decode(self, batch_size: int, **formats: str) -> None:
        context = begin_decodes(self.model, self.plan, batch_size, **formats)
        rate, host = overlapped_decode_rate(context, self.plan, batch_size)
        form = " and ".join(f"{value} cache" if name == "cache" else value for name, value in formats.items())
        case = f"decode {form} B={batch_size} context {self.plan.context}, steps overlapped"
        report("figure", case, figure=f"{rate:,.0f} tok/s", note=f"the host works {host * 1e6:.0f} us a step")
        context.close()

    def first_token(self, length: int) -> None:
        seconds = first_token_s(self.model, self.plan, length)
        figure, note = f"{1e3 * seconds:.1f} ms", f"{length / seconds:,.0f} tok/s"
        report("figure", f"TTFT, {length} prompt tokens", figure=figure, note=note)

    def mixed(self) -> None:
        requests = mixed_load(self.plan, self.model.vocab_size)
        rate = run_mixed_load(self.model, self.plan, requests)
        report("figure", "W1", figure=f"{rate:,.0f} tok/s")

    def generate(self, batch_size: int, compiles: bool) -> None:
        rate = peer_generate(self.model, self.plan, batch_size, compiles=compiles)
        kind = "static cache, compiled" if compiles else "as it is by default"
        report("figure", f"generate, {kind}, prefill included, B={batch_size}", figure=f"{rate:,.0f} tok/s")

    def generate_batch(self) -> None:
        requests = mixed_load(self.plan, self.model.vocab_size)
        rate = peer_generate_batch(self.model, self.plan, requests)
        report("figure", "W1 generate_batch", figure=f"{rate:,.0f} tok/s")

    def attention(self, batch_size: int) -> None:
        """One layer's attention: ours and the libraries'."""
        name = "tiny" if IS_DRY else SHAPE_OF[self.part]
        load = AttentionLoad(name, batch_size, self.plan.context, self.plan.block_size, self.device, self.dtype)
        for way, figure, note in compare(load):
            report("figure", f"attention of {SHAPE_OF[self.part]}, B={batch_size}, {way}", figure=figure, note=note)

    def service(self) -> None:
        """`genbatch bench` over a service of its own: the whole product, with sockets and an engine process."""
        from tests.nif.tiny_models import build_model as build_tiny
        from tests.nif.tiny_models import build_tokenizer

        directory = self.results / "service-model"
        if IS_DRY:
            build_tiny("llama", directory)
        else:
            build_model("qwen3-0.6b", SHAPES["qwen3-0.6b"](), self.device, self.dtype).hf.save_pretrained(directory)
            build_tokenizer(directory)
            torch.cuda.empty_cache()
        out = self.results / "service-w2.json"
        few = ["--num-prompts", "3", "--scale", "0.05", "--n-parallel", "2"] if IS_DRY else ["--n-parallel", "64"]
        command = [sys.executable, "-m", "genbatch", "bench", "-w", "w2", "--model", str(directory), "--out", str(out)]
        ran = subprocess.run([*command, *few], capture_output=True, text=True, check=False)
        shutil.rmtree(directory)
        if ran.returncode:
            raise RuntimeError(f"{ran.stdout[-1000:]}\n{ran.stderr[-2000:]}")
        for name, value in numbers_of(json.loads(out.read_text())["runs"]):
            report("figure", f"service W2 {name}", figure=f"{value:,.2f}")

    def _batches(self) -> list[int]:
        """What tells most comes first: with 64 rows both weights and keys count."""
        first = [size for size in self.plan.batches if size == 64]
        return first + [size for size in self.plan.batches if size != 64]


def numbers_of(tree: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a tree of JSON objects and lists, each with its keys from the top."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from numbers_of(value, f"{name} {key}".strip())
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield name, tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part")
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases, in this order; all by default")
    chosen = parser.parse_args()
    bench = Bench(chosen.part, chosen.results)
    works = dict(bench.peers() if chosen.part.endswith(PEERS_END) else bench.cases())
    ended = done()
    for case in chosen.only or works:
        work = works[case]
        if case in ended:
            continue
        report("begin", case)
        try:
            work()
        except Exception:
            report("failed", case, note=traceback.format_exc()[-1500:])
            return 3
        report("end", case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
