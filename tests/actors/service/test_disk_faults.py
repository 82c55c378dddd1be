"""Faults of the disk that has the prefix cache: the service gives the answers of a service without a disk cache."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import ZeroMQClient
from tests.actors.service.running_service import TIMEOUT_S, RunningService, kill
from tests.nif.failing_disks import breakable_disk, mounted_disk

pytestmark = pytest.mark.long

PROMPTS = [f"Tale {i}. " + " ".join(str((i * 7919 + j * 31) % 997) for j in range(120)) for i in range(6)]
FLAGS = ("--n-parallel", "4", "--quantize", "int8", "--max-restarts", "100")
Fault = Callable[[], object]


async def answers(service: RunningService) -> tuple[list[Any], dict[str, int] | None]:
    """Return the tokens of all prompts, asked for at once, and the counters of the prefix cache on disk."""
    found: dict[int, list[int]] = {}
    async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:

        async def ask(number: int) -> None:
            found[number] = (await client.generate(PROMPTS[number], max_tokens=8, ignore_eos=True)).token_ids

        async with trio.open_nursery() as nursery:
            for number in range(len(PROMPTS)):
                nursery.start_soon(ask, number)
        counted = await settled_counters(client)
        return [found[number] for number in range(len(PROMPTS))], counted


async def settled_counters(client: ZeroMQClient) -> dict[str, int] | None:
    """Return the counters once the cache's thread, which writes behind the answers, has nothing left to write."""
    before: dict[str, int] | None = None
    while (counted := (await client.stats()).get("prefix_disk")) is not None and counted != before:
        before = counted
        await trio.sleep(0.5)
    return counted


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with RunningService(Path("smollm2"), tmp_path_factory.mktemp("plain"), *FLAGS) as service:
        return trio.run(answers, service)[0]


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


def run(folder: Path, place: Path, expected: list[Any], faults: Sequence[Fault]) -> tuple[list[dict[str, int]], str]:
    """Cause each fault, start a new engine, and compare its answers. Its prefix cache in memory is empty.

    Returns:
        The counters after each fault, and the log.
    """
    counters = []
    with RunningService(Path("smollm2"), place, *FLAGS, "--prefix-cache-dir", str(folder)) as service:
        for fault in faults:
            fault()
            kill(service.engine)
            found, counted = trio.run(answers, service)
            assert found == expected
            assert counted is not None
            counters.append(counted)
    return counters, service.log


def nothing() -> None:
    """The disk is well."""


def test_a_full_disk_and_a_read_only_one(tmp_path: Path, expected: list[Any]) -> None:
    folder = tmp_path / "kv"
    with mounted_disk(folder, "size=2m"):
        lock = ["mount", "-o", "remount,ro", str(folder)]
        (first, second, third), log = run(
            folder, tmp_path, expected, [nothing, nothing, lambda: subprocess.run(lock, check=True)]
        )
    assert first["written"] and first["errors"] == 1  # then it is left alone for a minute
    assert second["read"] == third["read"] == first["written"]
    assert log.count("No space left") == 2 and log.count("Read-only file system") == 1  # once in each engine


def test_torn_damaged_and_foreign_blocks(tmp_path: Path, expected: list[Any]) -> None:
    folder, draw = tmp_path / "kv", random.Random(1)

    def tear() -> None:
        for block in blocks(folder):
            os.truncate(block, draw.randrange(block.stat().st_size))

    def turn_bits() -> None:
        for block in blocks(folder):
            data = bytearray(block.read_bytes())
            data[draw.randrange(len(data))] ^= 4
            block.write_bytes(data)

    def swap() -> None:
        contents = [block.read_bytes() for block in blocks(folder)]
        for block, data in zip(blocks(folder), [*contents[1:], contents[0]], strict=True):
            block.write_bytes(data)

    faults = [nothing, nothing, tear, turn_bits, swap, lambda: shutil.rmtree(folder), nothing]
    (first, second, *damaged, gone, last), log = run(folder, tmp_path, expected, faults)
    assert first["written"] > 60 and second["read"] > 0.9 * first["written"]
    assert [(counted["read"], counted["damaged"]) for counted in damaged] == [(0, len(PROMPTS))] * 3
    assert (gone["read"], gone["written"]) == (0, first["written"]) and last["read"] == second["read"]
    assert log.count("has a damaged block") == 3  # once in each engine


def test_a_disk_that_cannot_read(tmp_path: Path, expected: list[Any]) -> None:
    folder = tmp_path / "kv"
    with breakable_disk(tmp_path / "image", folder) as break_disk:
        faults = [nothing, nothing, lambda: break_disk(blocks(folder))]
        (first, second, broken), log = run(folder, tmp_path, expected, faults)
    assert first["written"] and second["read"] and not broken["read"] and broken["errors"]
    assert log.count("Input/output error") >= 1
