"""How many cores this process may use."""

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use: its affinity and, in a container, its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup of this version: only the affinity counts
    return cores
