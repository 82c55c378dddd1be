"""Free memory is what the host has, unless a control group allows less."""

from pathlib import Path

import pytest

from genbatch.nif.kv.cache_size import free_host_memory

_KIB = 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\nHugePages_Total:  0\n")
    return tmp_path


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_control_groups_it_is_mem_available(root: Path) -> None:
    assert free_host_memory(root) == 4000 * _KIB


def test_b20_a_control_group_further_up_bounds_it(root: Path) -> None:
    _write(root / "proc/self/cgroup", "0::/outer/inner")
    outer = root / "sys/fs/cgroup/outer"
    _write(outer / "inner/memory.max", "max")
    _write(outer / "inner/memory.current", 100)
    _write(outer / "memory.max", 3000 * _KIB)
    _write(outer / "memory.current", 1000 * _KIB)
    _write(outer / "memory.stat", f"anon 5\ninactive_file {200 * _KIB}")
    assert free_host_memory(root) == 2200 * _KIB


def test_a_control_group_of_the_first_version_bounds_it_too(root: Path) -> None:
    _write(root / "proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/elsewhere/seen/from/outside")
    mount = root / "sys/fs/cgroup/memory"
    _write(mount / "memory.limit_in_bytes", 1000 * _KIB)
    _write(mount / "memory.usage_in_bytes", 400 * _KIB)
    assert free_host_memory(root) == 600 * _KIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    _write(root / "proc/self/cgroup", "0::/")
    _write(root / "sys/fs/cgroup/memory.max", 10)
    _write(root / "sys/fs/cgroup/memory.current", 20)
    assert free_host_memory(root) == 0


def test_a_system_that_does_not_say_is_unknown(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None
