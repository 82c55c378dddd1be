"""The memory that this process can still use: of the host, or of a control group with less. No torch."""

from collections.abc import Iterator
from pathlib import Path

from genbatch.nif.cores import control_groups

# By the version of control groups: limit file, usage file, key in memory.stat of the reclaimable page cache.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still use: MemAvailable, or a control group's lower limit.

    Args:
        root: the folder where proc and sys are mounted.

    Returns:
        The bytes, or None if the system does not tell (no /proc/meminfo).
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_cgroup_rooms(root)]))


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group around this process."""
    for kind, folder in control_groups("memory", root):
        limit_file, usage_file, reclaimable_key = _FILES[kind]
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None:
            yield limit - usage + _statistic(folder / "memory.stat", reclaimable_key)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _statistic(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines)
    return int(fields.get(key, 0))
