"""Where a decode step's time goes on the GPU: seconds of each kernel, by the GPU's own clock."""

import re
from collections import Counter
from dataclasses import dataclass

import torch
from gpu_loads import Plan, start_length
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from genbatch.nif.context import Context
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams


@dataclass(frozen=True)
class KernelTime:
    """One kind of kernel in one step."""

    name: str
    launches: float  # a step
    seconds: float  # a step, of all its launches together


def kernel_times(context: Context, plan: Plan, batch_size: int, steps: int = 8) -> list[KernelTime]:
    """Kernels of an overlapped decode step, the longest first.

    Args:
        context: as `begin_decodes` returns it, or after other decodes.
    """
    for seq_id in range(batch_size):
        context.seq_rm(seq_id, start_length(plan))
    entries = [Entry(seq_id, (1,), start_length(plan)) for seq_id in range(batch_size)]
    states = [SamplerState(SamplingParams(seed=seq_id), ()) for seq_id in range(batch_size)]
    run = context.decode_run(entries, states, max_steps=steps + 2)
    run.step()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            run.step()
        torch.cuda.synchronize()
    run.close()
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA:
            name = short_name(event.name)
            seconds[name] += event.device_time_total / 1e6
            launches[name] += 1
    return [KernelTime(name, launches[name] / steps, total / steps) for name, total in seconds.most_common()]


def short_name(kernel: str) -> str:
    """A kernel's name without its namespaces and template arguments."""
    return re.sub(r"<.*|\(.*", "", kernel.removeprefix("void ")).split("::")[-1][:60]
