"""What kind of machine a figure was taken on."""

import os
import platform
from pathlib import Path

# What decides how fast the CPU kernels of any engine are.
_NOTABLE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
_CPUINFO = Path("/proc/cpuinfo")


def machine(cpuinfo: Path = _CPUINFO) -> str:
    """The CPU's name, how many cores this process may use, and the instructions that matter."""
    fields = _first_processor(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    notable = [flag for flag in _NOTABLE if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = "1 core" if cores == 1 else f"{cores} cores"
    return f"{count} of {name}" + (f" ({', '.join(notable)})" if notable else "")


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
