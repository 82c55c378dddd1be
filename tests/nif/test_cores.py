"""How many cores a container's quota leaves, from the files as kernels and container programs write them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from genbatch.nif import host
from genbatch.nif.host import available_cores, cpu_quota, multiplies_int8

V2_HOST = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
# docker run --cpus, with a control group namespace, and kubernetes on cgroup v2
V2_CONTAINER = "1147 1140 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate"
V1_HOST = """\
31 23 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
34 31 0:31 / /sys/fs/cgroup/cpuset rw,nosuid - cgroup cgroup rw,cpuset
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct"""
V1_CONTAINER = "634 631 0:30 /docker/1f /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:15 - cgroup cgroup rw,cpu,cpuacct"
V1_GROUPS = (
    "12:pids:/docker/1f\n4:cpu,cpuacct:/docker/1f\n3:cpuset:/docker/1f\n1:name=systemd:/docker/1f\n0::/docker/1f"
)
V1_PLACE = "sys/fs/cgroup/cpu,cpuacct"


def v1(place: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{place}/cpu.cfs_quota_us": f"{quota}\n", f"{place}/cpu.cfs_period_us": f"{period}\n"}


CASES: dict[str, tuple[str, str, Mapping[str, str], float | None]] = {
    "docker, version 2": ("0::/", V2_CONTAINER, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "no quota, version 2": ("0::/", V2_CONTAINER, {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "systemd's CPUQuota": (
        *("0::/system.slice/genbatch.service", V2_HOST),
        {"sys/fs/cgroup/system.slice/genbatch.service/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "a quota above, version 2": (
        *("0::/a.slice/b.slice/c.scope", V2_HOST),
        {
            "sys/fs/cgroup/a.slice/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/a.slice/b.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a.slice/b.slice/c.scope/cpu.max": "800000 100000\n",
        },
        2.0,
    ),
    "a group of another namespace": (
        "0::/../../x",
        V2_CONTAINER,
        {"sys/fs/cgroup/cpu.max": "300000 100000\n"},
        3.0,
    ),
    "docker, version 1": (V1_GROUPS, V1_CONTAINER, v1(V1_PLACE, 250_000), 2.5),
    "no quota, version 1": (V1_GROUPS, V1_CONTAINER, v1(V1_PLACE, -1), None),
    "a quota above, version 1": (
        *(V1_GROUPS, V1_HOST),
        v1(V1_PLACE, -1) | v1(f"{V1_PLACE}/docker", 40_000, 20_000) | v1(f"{V1_PLACE}/docker/1f", 400_000),
        2.0,
    ),
    "both versions": (
        *(V1_GROUPS, f"{V1_HOST}\n41 31 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"),
        v1(f"{V1_PLACE}/docker/1f", 100_000),
        1.0,
    ),
    "a path with a space": (
        *("0::/", V2_CONTAINER.replace("/sys/fs/cgroup", "/my\\040groups")),
        {"my groups/cpu.max": "100000 50000\n"},
        2.0,
    ),
    "no control groups": ("", "", {}, None),
    "nonsense": ("0::/", V2_CONTAINER, {"sys/fs/cgroup/cpu.max": "many 0\n"}, None),
    "a period of nothing": ("0::/", V2_CONTAINER, {"sys/fs/cgroup/cpu.max": "100000 0\n"}, None),
}


def lay_out(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> None:
    for place, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("case", CASES)
def test_a_quota_is_found_wherever_it_is_set(tmp_path: Path, case: str) -> None:
    groups, mounts, files, quota = CASES[case]
    lay_out(tmp_path, groups, mounts, files)
    assert cpu_quota(tmp_path) == quota


def test_without_proc_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.5, 1), (1.99, 1), (3.0, 3), (64.0, 4)])
def test_threads_fit_into_the_quota_and_the_affinity(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    assert available_cores() == threads


def test_a_real_group_with_a_quota_is_noticed() -> None:
    """Where this system lets a test make one; the child asks from within."""
    mounted = {place: Path("/sys/fs/cgroup") / place for place in ("cpu", "cpu,cpuacct", ".")}
    parent = next((path for path in mounted.values() if (path / "cpu.cfs_quota_us").exists()), mounted["."])
    group = parent / f"genbatch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as fault:
        pytest.skip(f"no control group can be made: {fault}")
    try:
        try:
            inner = group / "inner"
            inner.mkdir()
            file, value = (
                ("cpu.max", "100000 100000") if (group / "cpu.max").exists() else ("cpu.cfs_quota_us", "100000")
            )
            (group / file).write_text(value)
        except OSError as fault:
            pytest.skip(f"no quota can be set: {fault}")
        ask = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
            "from genbatch.nif.host import available_cores, cpu_quota; print(cpu_quota(), available_cores())"
        )
        command = [sys.executable, "-c", ask, str(inner / "cgroup.procs")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1.0 1\n"
    finally:
        for made in (group / "inner", group):
            if made.exists():
                made.rmdir()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", True),
        ("Features\t: fp asimd asimddp", True),
        ("flags\t\t: fpu avx2 avx512f", False),
    ],
)
def test_int8_is_recommended_where_the_cpu_multiplies_bytes(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert multiplies_int8(tmp_path / "cpuinfo") is expected
    assert not multiplies_int8(tmp_path / "missing")
