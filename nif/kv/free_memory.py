"""How much memory a KV pool could take: the host's, as its control groups limit it, or a GPU's."""

from collections.abc import Iterator
from pathlib import Path

# (limit, usage, and the key in memory.stat of page cache that is given back on demand), cgroup v2 and v1
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process could still use: MemAvailable, or less where a control group allows less.

    Args:
        root: where proc and sys are mounted.

    Returns:
        None where the system does not say (no /proc/meminfo).
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


def free_gpu_memory(index: int | None = None) -> int:
    """Bytes free on a CUDA device, the current one by default."""
    import torch  # here, so that the host's memory can be asked for without it

    free, _ = torch.cuda.mem_get_info(index)
    return int(free)


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each control group around this process leaves, innermost first."""
    for folder in _cgroup_folders(root):
        for limit_file, usage_file, reclaimable_key in _FILES:
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None:
                yield limit - usage + _statistic(folder / "memory.stat", reclaimable_key)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = mount / path.lstrip("/")
        # A path outside the mount, as containers may show, leaves the mount itself, which is walked to anyway.
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(mount):
                break
            yield parent


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
