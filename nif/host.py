"""What the host gives this process: cores and memory, within the limits of its control groups. No torch.

A CPU quota is a share of each period of 100 ms or so. More threads than it has cores for use it up early in the period,
and then all of them stand still. It may be set for the process's own control group or for any group above it.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# By the version of control groups: limit file, usage file, key in memory.stat of the reclaimable page cache.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Instructions that multiply bytes: VNNI and AMX on x86, SDOT and SMMLA on ARM, by their names in /proc/cpuinfo.
_INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})


def available_cores() -> int:
    """Return the number of threads that may run at once; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the cores of the smallest quota of this process's control groups, version 1 and 2; None for no quota.

    Args:
        root: holds proc/self and the mounted control groups.
    """
    quotas = [
        quota for kind, directory in _control_groups("cpu", root) if (quota := _quota(directory, kind)) is not None
    ]
    return min(quotas, default=None)


def multiplies_int8(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies bytes in vectors, which makes `quantize="int8"` fast; False if unknown."""
    try:
        words = cpuinfo.read_text().split()
    except OSError:
        return False
    return not _INT8_FLAGS.isdisjoint(words)


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


def _control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[str, Path]]:
    """Yield this process's control groups and those above them, of version 1 ("cgroup") and 2 ("cgroup2").

    Args:
        controller: the name of the limited resource, "cpu" or "memory".
        root: as for `cpu_quota`.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return  # a system without control groups
    for kind, folder, group in _mounted(controller, groups, mounts):
        for directory in _up_to(root / folder.lstrip("/"), group):
            yield kind, directory


def _mounted(controller: str, groups: list[str], mounts: list[str]) -> Iterator[tuple[str, str, PurePosixPath]]:
    """Yield each hierarchy with this resource: its kind, where it is mounted, and this process's group below that."""
    paths: dict[str, str] = {}
    for line in groups:  # "4:cpu,cpuacct:/docker/1f", or "0::/user.slice" in version 2
        _, controllers, own = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), own))
    for line in mounts:  # "33 24 0:30 /docker/1f /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct"
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mounted, place = (_unescaped(field) for field in before.split(" ")[3:5])
        listed = controller if kind == "cgroup" and controller in options.split(",") else ""
        if (listed or kind == "cgroup2") and listed in paths:
            group = PurePosixPath(paths[listed])
            # Of another namespace's groups only the mounted one can be seen.
            yield kind, place, group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()


def _unescaped(field: str) -> str:
    """Return a path of mountinfo, which writes a space as \\040."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _up_to(folder: Path, group: PurePosixPath) -> Iterator[Path]:
    """Yield a group's directory and those above it."""
    inside = PurePosixPath(*(part for part in group.parts if part != ".."))
    yield from (folder / step for step in (inside, *inside.parents))


def _quota(directory: Path, kind: str) -> float | None:
    try:
        if kind == "cgroup2":
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None  # no quota is set here ("max", -1), or the group has none


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group around this process."""
    for kind, folder in _control_groups("memory", root):
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
