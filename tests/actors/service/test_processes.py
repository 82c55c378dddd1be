"""A service of three processes over a tiny model and ZeroMQ, and what its clients see when one of them is killed."""

import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import SyncZeroMQClient, ZeroMQClient
from genbatch.actors.gateways.dispatcher import MAX_CALLS, MAX_REQUEST_BYTES, held_bytes
from genbatch.clients import remote
from genbatch.clients.remote import Retry
from genbatch.proto.errors import EngineLost, GenbatchError, ModelNotFound
from genbatch.proto.messages import GenerateRequest, Result
from tests.actors.engine.stage import Stage
from tests.actors.service.running_service import TIMEOUT_S, RunningService, is_running, kill
from tests.lora_adapters import change_config, make_adapter
from tests.waiting import a_moment

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")


# Imported by each process of the service as it starts.
TELLS_WHAT_IS_FROZEN = """
import gc
import os
from pathlib import Path

freeze = gc.freeze

def freeze_and_tell():
    freeze()
    Path(__file__).with_name(f"{os.getpid()}.frozen").write_text(str(gc.get_freeze_count()))

gc.freeze = freeze_and_tell
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def stage(directory: Path) -> Stage:
    return Stage(directory)


@pytest.fixture(scope="module")
def service(tiny_model_dir: Callable[[str], Path], directory: Path, stage: Stage) -> Iterator[RunningService]:
    flags = (
        *("--scheduler", stage.scheduler, "--n-parallel", "4"),
        *("--stall-s", "10", "--max-restarts", "100", "--default-deadline-s", "0"),  # a loaded machine loads slowly
    )
    (directory / "sitecustomize.py").write_text(TELLS_WHAT_IS_FROZEN)
    with RunningService(tiny_model_dir("llama"), directory, *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)  # this process may wait for its turn


def connect(service: RunningService) -> ZeroMQClient:
    return ZeroMQClient(service.address, timeout=TIMEOUT_S)


class Asked:
    """Requests of one client, each in a task, and how each ended."""

    def __init__(self, client: ZeroMQClient, nursery: trio.Nursery) -> None:
        self.tokens: dict[str, list[int]] = {}  # of streams
        self._ends: dict[str, Any] = {}
        self._client = client
        self._nursery = nursery
        self._changed = trio.Event()

    def generate(self, name: str, prompt: list[int], max_tokens: int = 100) -> None:
        async def ask() -> Result:
            return await self._client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

        self._nursery.start_soon(self._run, name, ask)

    def stream(self, name: str, prompt: list[int], max_tokens: int = 240) -> None:
        tokens = self.tokens[name] = []

        async def ask() -> Result:
            async with self._client.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
                async for token in stream:
                    assert token.index == len(tokens)
                    tokens.append(token.token_id)
                    self._wake()
            return stream.result

        self._nursery.start_soon(self._run, name, ask)

    async def end_of(self, name: str) -> Any:
        """The result, or the error."""
        while name not in self._ends:
            await self._changed.wait()
        return self._ends[name]

    async def some_tokens_of(self, name: str) -> None:
        while len(self.tokens[name]) < 3:
            await self._changed.wait()

    async def _run(self, name: str, ask: Callable[[], Awaitable[Result]]) -> None:
        try:
            self._ends[name] = await ask()
        except GenbatchError as error:
            self._ends[name] = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def test_what_loading_made_is_never_looked_through_for_garbage(service: RunningService, directory: Path) -> None:
    for pid, least in ((service.engine, 100_000), (service.gateway, 10_000)):
        assert int((directory / f"{pid}.frozen").read_text()) > least


@pytest.mark.trio
async def test_finals_and_replays_follow_a_killed_engine_and_the_connection_lives(
    service: RunningService, stage: Stage
) -> None:
    async with connect(service) as client, trio.open_nursery() as nursery:
        asked = Asked(client, nursery)
        asked.generate("done", [6, 0])
        expected = (await asked.end_of("done")).token_ids
        asked.stream("whole stream", [5, 6, 8])
        whole = (await asked.end_of("whole stream")).token_ids
        with stage.holding():
            asked.stream("streaming", [5, 6, 8])
            await asked.some_tokens_of("streaming")
            for number in range(6):  # some run, some wait for a slot
                asked.generate(f"whole {number}", [6, number])
            while (await client.stats())["accepted"] < 9:
                await a_moment()
            old = kill(service.engine)
            while (await client.health()).status != "down":
                await a_moment()
            assert len(asked.tokens["streaming"]) >= 3
            asked.generate("meanwhile", [5, 6, 9], 4)
        assert (await asked.end_of("meanwhile")).finish_reason == "length"
        assert service.engine not in (None, old)
        ends = [await asked.end_of(f"whole {number}") for number in range(6)]
        assert ends[0].token_ids == expected
        assert all(len(end.token_ids) == len(expected) for end in ends)
        assert (await asked.end_of("streaming")).token_ids == asked.tokens["streaming"] == whole
        stats = await client.stats()
        assert (stats["engine_restarts"], stats["requests_lost"], stats["requests_replayed"]) == (1, 0, 7)
        assert (await client.health()).status == "ready"


@pytest.mark.trio
async def test_a_gateway_that_is_killed_comes_back_to_the_same_engine(service: RunningService, stage: Stage) -> None:
    async with connect(service) as client, trio.open_nursery() as nursery:
        engine, asked = service.engine, Asked(client, nursery)
        steps = (await client.stats())["steps"]
        asked.stream("whole stream", [5, 6, 8])
        whole = (await asked.end_of("whole stream")).token_ids
        plain: list[list[int]] = []

        def stream_plainly() -> None:
            with SyncZeroMQClient(service.address, timeout=TIMEOUT_S) as other:
                with other.stream([5, 6, 8], max_tokens=240, ignore_eos=True) as stream:
                    plain.append([token.token_id for token in stream])
                plain.append(stream.result.token_ids)

        with stage.holding():
            asked.stream("streaming", [5, 6, 8])
            asked.generate("whole", [5, 6, 8], 240)
            nursery.start_soon(trio.to_thread.run_sync, stream_plainly)
            await asked.some_tokens_of("streaming")
            while (await client.stats())["requests_running"] < 3:
                await a_moment()
            old = kill(service.gateway)
        assert (await asked.end_of("streaming")).token_ids == asked.tokens["streaming"] == whole
        assert (await asked.end_of("whole")).token_ids == whole
        while len(plain) < 2:
            await a_moment()
        assert plain == [whole, whole]
        assert service.engine == engine and service.gateway != old
        stats = await client.stats()
        assert stats["steps"] > steps
        assert stats["requests_running"] == 0 and stats["kv_blocks_used"] == 0  # what the dead one had asked for
        assert stats["finished"]["cancelled"] == 3


# Seconds that a process may stand still without a fault: a machine that sleeps, swaps, or moves its containers.
STANDSTILL_S = 4.0


@pytest.mark.trio
@pytest.mark.parametrize("client", ["trio", "plain"])
async def test_a_gateway_that_stands_still_for_seconds_loses_no_request_over_zeromq(
    service: RunningService, stage: Stage, client: str
) -> None:
    async with connect(service) as other, trio.open_nursery() as nursery:
        asked = Asked(other, nursery)
        results: list[Result] = []

        def generate_plainly() -> None:
            with SyncZeroMQClient(service.address, timeout=TIMEOUT_S) as plain:
                results.append(plain.generate([5, 6, 9], max_tokens=100, ignore_eos=True))

        with stage.holding():
            if client == "plain":
                nursery.start_soon(trio.to_thread.run_sync, generate_plainly)
                while not (await other.stats())["requests_running"]:
                    await a_moment()
            else:
                asked.stream("streaming", [5, 6, 8])
                await asked.some_tokens_of("streaming")
            gateway = kill(service.gateway, signal.SIGSTOP)
            try:
                await trio.sleep(STANDSTILL_S)
            finally:
                kill(gateway, signal.SIGCONT)
        asked.generate("afterwards", [5, 6], 2)
        await asked.end_of("afterwards")
        if client == "trio":
            assert (await asked.end_of("streaming")).finish_reason == "length"
    if client == "plain":
        assert results[0].finish_reason == "length"


@pytest.mark.trio
async def test_an_engine_that_stands_still_for_seconds_goes_on_and_is_not_replaced(
    service: RunningService, stage: Stage
) -> None:
    async with connect(service) as client, trio.open_nursery() as nursery:
        engine, restarts = service.engine, (await client.stats())["engine_restarts"]
        asked = Asked(client, nursery)
        asked.stream("whole stream", [5, 6, 8])
        whole = (await asked.end_of("whole stream")).token_ids
        with stage.holding():
            asked.stream("streaming", [5, 6, 8])
            await asked.some_tokens_of("streaming")
            asked.generate("whole", [5, 6, 8], 240)
            kill(engine, signal.SIGSTOP)
            try:
                await trio.sleep(STANDSTILL_S)
                asked.generate("meanwhile", [5, 6, 8], 240)
            finally:
                kill(engine, signal.SIGCONT)
        asked.generate("afterwards", [5, 6], 2)
        for name in ("streaming", "whole", "meanwhile"):
            assert (await asked.end_of(name)).token_ids == whole
        assert service.engine == engine and (await client.stats())["engine_restarts"] == restarts


# Of each tenth of a second a process runs so long: a container with a quota of a fifth of a core.
QUOTA_S = 0.02


async def throttle(pid: int) -> None:
    """Let a process run a fifth of the time, as a container's quota does, until cancelled."""
    try:
        while True:
            kill(pid, signal.SIGSTOP)
            await trio.sleep(0.1 - QUOTA_S)
            kill(pid, signal.SIGCONT)
            await trio.sleep(QUOTA_S)
    finally:
        kill(pid, signal.SIGCONT)


@pytest.mark.trio
async def test_a_service_with_a_fifth_of_a_core_answers_and_nothing_is_restarted(service: RunningService) -> None:
    async with connect(service) as client:
        known = (await client.generate([5, 6, 8], max_tokens=60, ignore_eos=True)).token_ids
        before, restarts = (service.engine, service.gateway), (await client.stats())["engine_restarts"]
        async with trio.open_nursery() as nursery:
            for pid in (service.process.pid, *before):
                assert pid is not None
                nursery.start_soon(throttle, pid)
            for _ in range(3):
                async with client.stream([5, 6, 8], max_tokens=60, ignore_eos=True) as stream:
                    assert [token.token_id async for token in stream] == known
                assert (await client.health()).status == "ready"
                await trio.sleep(1.0)  # the gateway looks twice for a sign of life
            nursery.cancel_scope.cancel()
        assert (service.engine, service.gateway) == before
        assert (await client.stats())["engine_restarts"] == restarts


@pytest.mark.long
@pytest.mark.trio
async def test_adapters_outlive_engines_and_gateways(
    service: RunningService, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompt = tiny_model_dir("llama"), [5, 6, 7, 8]
    dirs = {name: make_adapter(base, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two", "three"))}

    async def say(name: str | None) -> list[int]:
        return (await client.generate(prompt, model=name, max_tokens=6, ignore_eos=True)).token_ids

    async with connect(service) as client:
        plain = await say(None)
        for name, path in dirs.items():
            await client.load_adapter(name, str(path))
        said = {name: await say(name) for name in dirs}
        assert len({*map(tuple, [plain, *said.values()])}) == 4
        await client.unload_adapter("two")
        old = kill(service.engine)
        assert await say("one") == said["one"] and await say(None) == plain
        assert service.engine != old
        names = [card.id for card in await client.models()]
        assert names[1:] == ["one", "three"]
        with pytest.raises(ModelNotFound):
            await say("two")
        kill(service.gateway)
        assert [card.id for card in await client.models()] == names
        change_config(dirs["one"], lora_alpha=1)
        kill(service.engine)
        assert await say("three") == said["three"]
        with pytest.raises(ModelNotFound):
            await say("one")
        assert "has changed since the adapter was loaded" in service.log
        assert [card.id for card in await client.models()] == [names[0], "three"]
        await client.unload_adapter("three")


@pytest.mark.long
@pytest.mark.trio
async def test_an_engine_that_hangs_is_killed_and_its_requests_are_replayed(service: RunningService) -> None:
    async with connect(service) as client, trio.open_nursery() as nursery:
        asked = Asked(client, nursery)
        old = kill(service.engine, signal.SIGSTOP)
        asked.generate("whole", [7, 8], 5)
        assert (await client.health()).status == "ready"  # answered, by a gateway that does not know yet
        assert (await asked.end_of("whole")).finish_reason == "length"
        assert not is_running(old)
    assert "killing the engine" in service.log


def resident_bytes(pid: int | None) -> int:
    """Memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.trio
async def test_big_messages_to_an_engine_that_stands_still_take_bounded_memory_and_others_are_served(
    service: RunningService,
) -> None:
    """One client has as many calls open as it may, of a MB each, which is five of text: one character takes four bytes
    of every other."""
    big = "\N{GRINNING FACE}" + "x" * (2**20 - 2**16)
    most = MAX_REQUEST_BYTES // held_bytes(GenerateRequest(prompt=big))
    once = ZeroMQClient(service.address, timeout=TIMEOUT_S, retry=Retry(max_attempts=1))
    async with once as client, connect(service) as other, trio.open_nursery() as nursery:
        await client.health()
        before = resident_bytes(service.gateway)
        stopped = kill(service.engine, signal.SIGSTOP)
        asked, refused = Asked(other, nursery), list[GenbatchError]()
        asked.generate("other", [7, 8], 5)

        async def send() -> None:
            try:
                await client.generate(big, max_tokens=1)
            except GenbatchError as error:
                refused.append(error)

        for _ in range(MAX_CALLS):
            nursery.start_soon(send)
        while len(refused) < MAX_CALLS - most:
            await a_moment()
        assert all("are being answered for this client" in str(error) for error in refused)
        # A message under way is there as it came, too, and as what goes to the engine.
        assert resident_bytes(service.gateway) - before < 1.5 * MAX_REQUEST_BYTES
        kill(stopped, signal.SIGCONT)
        assert (await asked.end_of("other")).finish_reason == "length"
    assert len(refused) == MAX_CALLS, "no prompt of a MB fits"


@pytest.mark.trio
async def test_a_request_that_kills_engines_is_replayed_once_and_then_refused(
    service: RunningService, stage: Stage
) -> None:
    async with connect(service) as client, trio.open_nursery() as nursery:
        asked = Asked(client, nursery)
        accepted = (await client.stats())["accepted"]
        with stage.holding():
            asked.generate("innocent", [5, 5], 200)
            while (await client.stats())["accepted"] == accepted:
                await a_moment()
            asked.generate("poison", [13, 5], 5)
            while (await client.health()).status != "down":
                await a_moment()
        assert isinstance(await asked.end_of("poison"), EngineLost)
        assert (await asked.end_of("innocent")).finish_reason == "length"
        with pytest.raises(EngineLost) as refused:
            await client.generate([13, 5], max_tokens=5, ignore_eos=True)
        assert refused.value.retry_after_ms
        assert (await client.health()).status == "ready"  # nothing died of that one


def test_nothing_outlives_a_supervisor_that_is_killed(service: RunningService) -> None:
    """The last of this file: the service is gone."""
    deadline = time.monotonic() + TIMEOUT_S
    # An engine may have died before it had started: then there are more restarts than starts.
    while service.log.rfind("supervisor.child_start name=engine") < service.log.rfind("supervisor.restart name=engine"):
        assert time.monotonic() < deadline, "no engine starts"
        time.sleep(0.01)
    engine, gateway = service.engine, service.gateway
    assert engine is not None and gateway is not None
    kill(service.process.pid)
    service.process.wait()
    while is_running(engine) or is_running(gateway):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.01)
