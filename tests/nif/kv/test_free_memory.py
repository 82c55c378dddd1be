"""Free memory is what the host has, unless a control group allows less."""

from pathlib import Path

import pytest
import torch

from genbatch.nif.cuda_device import Device
from genbatch.nif.host import free_host_memory
from genbatch.nif.kv.cache_size import gpu_memory
from tests.nif.test_cores import V2_CONTAINER, V2_HOST

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
    _write(root / "proc/self/mountinfo", V2_HOST)
    outer = root / "sys/fs/cgroup/outer"
    _write(outer / "inner/memory.max", "max")
    _write(outer / "inner/memory.current", 100)
    _write(outer / "memory.max", 3000 * _KIB)
    _write(outer / "memory.current", 1000 * _KIB)
    _write(outer / "memory.stat", f"anon 5\ninactive_file {200 * _KIB}")
    assert free_host_memory(root) == 2200 * _KIB


def test_a_control_group_of_the_first_version_bounds_it_too(root: Path) -> None:
    _write(root / "proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/elsewhere/seen/from/outside")
    _write(
        root / "proc/self/mountinfo", "36 31 0:33 /docker/1f /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,hugetlb"
    )
    mount = root / "sys/fs/cgroup/memory"
    _write(mount / "memory.limit_in_bytes", 1000 * _KIB)
    _write(mount / "memory.usage_in_bytes", 400 * _KIB)
    assert free_host_memory(root) == 600 * _KIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    _write(root / "proc/self/cgroup", "0::/")
    _write(root / "proc/self/mountinfo", V2_HOST)
    _write(root / "sys/fs/cgroup/memory.max", 10)
    _write(root / "sys/fs/cgroup/memory.current", 20)
    assert free_host_memory(root) == 0


@pytest.mark.parametrize(
    ("groups", "mounts", "place"),
    [
        ("4:memory:/a/b", "36 31 0:33 / /mnt/groups/memory rw - cgroup cgroup rw,memory", "mnt/groups/memory/a"),
        ("0::/a/b", V2_CONTAINER.replace("/sys/fs/cgroup", "/my\\040groups"), "my groups/a"),
    ],
)
def test_a_limit_above_is_found_wherever_the_groups_are_mounted(
    root: Path, groups: str, mounts: str, place: str
) -> None:
    _write(root / "proc/self/cgroup", groups)
    _write(root / "proc/self/mountinfo", mounts)
    second = groups.startswith("0::")
    _write(root / place / ("memory.max" if second else "memory.limit_in_bytes"), 1000 * _KIB)
    _write(root / place / ("memory.current" if second else "memory.usage_in_bytes"), 700 * _KIB)
    assert free_host_memory(root) == 300 * _KIB


def test_a_system_that_does_not_say_is_unknown(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None


class Cuda:
    """torch.cuda's memory: segments without a tensor, and tensors that only the garbage collector frees."""

    def __init__(self, total: int, others: int, reserved: int, allocated: int, in_cycles: int) -> None:
        self.total, self.others, self.reserved, self.allocated = total, others, reserved, allocated
        self.in_cycles = in_cycles

    def collect(self) -> int:
        self.allocated -= self.in_cycles
        self.in_cycles = 0
        return 0

    def empty_cache(self) -> None:
        self.reserved = self.allocated + 10  # the gaps in segments that still hold a tensor

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total

    def memory_reserved(self, device: str) -> int:
        return self.reserved

    def memory_allocated(self, device: str) -> int:
        return self.allocated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A GPU of 24,000 after an 8B was loaded and its projections were merged, beside a Batcher that was stopped."""
    made = Cuda(total=24_000, others=500, reserved=23_400, allocated=15_900 + 2_000, in_cycles=2_000)
    for name in ("empty_cache", "mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr("genbatch.nif.kv.cache_size.gc.collect", made.collect)
    return made


def test_h08_what_torch_caches_on_a_gpu_is_free_for_the_pool(cuda: Cuda) -> None:
    found = gpu_memory(Device("cuda", 0), collect=True)
    assert found.usable == 24_000 - 500 - 15_900
    assert found.allocated == 15_900


def test_a_running_service_keeps_its_cache_and_counts_it_as_free(cuda: Cuda) -> None:
    found = gpu_memory(Device("cuda", 0), collect=False)
    assert (cuda.reserved, cuda.in_cycles) == (23_400, 2_000)
    assert found.usable == 24_000 - 500 - 17_900


def test_h08_an_error_says_where_the_memory_of_a_gpu_is(cuda: Cuda) -> None:
    words = str(gpu_memory(Device("cuda", 1), collect=True))
    assert words == (
        "cuda:1 has 24000 bytes: 7590 are free, tensors of this process take 15900, gaps between them 10, "
        "everything else 500"
    )
