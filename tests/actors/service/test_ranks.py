"""A service whose engine is two ranks over gloo, and what its clients see when one of them is killed or hangs."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from genbatch import ZeroMQClient
from genbatch.clients import remote
from tests.actors.service.running_service import TIMEOUT_S, RunningService, is_running, kill

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def service(
    tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    flags = (
        *("--tensor-parallel", "2", "--n-threads", "1", "--n-parallel", "4"),
        *("--stall-s", "4", "--max-restarts", "100", "--default-deadline-s", "0"),
    )
    with RunningService(tiny_model_dir("llama"), tmp_path_factory.mktemp("ranks"), *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)


def other_rank(service: RunningService) -> int:
    """The process id of rank 1, which rank 0 has started."""
    engine = service.engine
    tasks = Path(f"/proc/{engine}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    [rank] = [pid for pid in children if "tensor_parallel" in Path(f"/proc/{pid}/cmdline").read_text()]
    return rank


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.trio
async def test_b34_a_rank_that_dies_or_hangs_takes_the_group_down_and_finals_are_as_always(
    service: RunningService, number: signal.Signals
) -> None:
    async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
        wanted = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
        engine, rank = service.engine, other_rank(service)
        streamed: list[int] = []
        begun = trio.Event()
        replayed = []

        async def stream() -> None:
            async with client.stream(token_ids=PROMPT, max_tokens=200, ignore_eos=True) as tokens:
                async for token in tokens:
                    assert token.index == len(streamed)
                    streamed.append(token.token_id)
                    if len(streamed) == 5:
                        kill(rank, number)
                        begun.set()

        async def generate() -> None:
            await begun.wait()
            replayed.append(await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True))

        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream)
                nursery.start_soon(generate)
        assert len(streamed) == 200 and streamed[:20] == wanted.token_ids
        assert [result.token_ids for result in replayed] == [wanted.token_ids]
    assert engine is not None and service.engine != engine
    assert not is_running(engine) and not is_running(rank) and is_running(other_rank(service))
