"""A real Ray with real replicas of a tiny model: the first request starts one, two gateways share it, one is killed."""

import dataclasses
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from genbatch import ZeroMQClient, open_batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.fleet.routing import ScaleRule
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients import remote
from genbatch.clients.fleet.gateway import FleetGateway, FleetOptions, open_fleet
from genbatch.clients.fleet.ray_replicas import FOLDER, NAMESPACE, OBJECT_STORE, RayReplicas, ReplicaOptions, own_folder
from genbatch.clients.fleet.replicas import Described, ReplicaConnection
from genbatch.clients.transports import ZeroMQTransport
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.errors import Unavailable
from genbatch.proto.service_messages import HealthRequest
from tests.actors.service.running_service import TIMEOUT_S, is_running
from tests.waiting import a_moment

ray = pytest.importorskip("ray", reason="Ray is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc"),
    # Ray's own: sockets and files that it leaves to the interpreter, and its deprecations.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = [40, 41, 42, 43]


async def replica_of(replicas: RayReplicas) -> Described:
    [name] = await replicas.names()
    described = await replicas.describe(name, TIMEOUT_S)
    assert described is not None
    return described


@pytest.mark.long
@pytest.mark.trio
async def test_a_fleet_on_ray_starts_at_the_first_request_and_keeps_its_promises_when_a_replica_is_killed(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)
    engine = EngineOptions(
        model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024, n_threads=1
    )
    replicas = RayReplicas("test", ReplicaOptions(engine=engine, batcher=BatcherOptions(), cpus=0.1), address="local")
    options = FleetOptions(rule=ScaleRule(min_replicas=0, max_replicas=1))
    service = ServiceOptions(bind=f"ipc://{tmp_path}/one.sock")
    with trio.fail_after(TIMEOUT_S):
        async with open_fleet(replicas, options, service) as gateway:
            assert not gateway.fleet.replicas and await replicas.names() == []
            assert "it started Ray itself" in gateway.take_over_refusal
            described = await _serve_and_kill(gateway, replicas, options, tmp_path)
    with trio.fail_after(TIMEOUT_S):
        for pid in described.pids:
            while is_running(pid):
                await a_moment()


async def _serve_and_kill(
    gateway: FleetGateway, replicas: RayReplicas, options: FleetOptions, directory: Path
) -> Described:
    other = FleetGateway(replicas, options, ServiceOptions(bind=f"ipc://{directory}/two.sock"))
    async with (
        ZeroMQClient(gateway.addresses[0], timeout=TIMEOUT_S) as client,
        other.run(),
        ZeroMQClient(other.addresses[0], timeout=TIMEOUT_S) as second,
    ):
        # From nothing: the request waits for the replica's start, which both gateways want and one is.
        wanted = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
        assert (await second.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)).token_ids == wanted.token_ids
        assert [card.id for card in await client.models()] == [card.id for card in await second.models()]
        before = await replica_of(replicas)

        streamed: list[list[int]] = [[], [], [], []]
        replayed: list[list[int]] = []

        async def stream() -> None:
            async with client.stream(token_ids=PROMPT, max_tokens=250, n=4, ignore_eos=True) as tokens:
                async for token in tokens:
                    if not stopped.is_set():
                        os.kill(before.pids[2], signal.SIGSTOP)  # or it might be quicker than we are
                        stopped.set()
                    streamed[token.choice].append(token.token_id)
            assert streamed == [choice.token_ids for choice in tokens.result.choices] == [streamed[0]] * 4
            assert streamed[0][:20] == wanted.token_ids and len(streamed[0]) == 250

        async def generate(client: ZeroMQClient) -> None:
            await stopped.wait()
            result = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
            replayed.append(result.token_ids)

        async def kill() -> None:
            await stopped.wait()
            while sum(one.fleet.replicas[0].num_own for one in (gateway, other)) < 3:
                await a_moment()
            os.kill(before.pids[0], signal.SIGKILL)

        stopped = trio.Event()
        async with trio.open_nursery() as nursery:
            for task in (stream, kill):
                nursery.start_soon(task)
            for caller in (client, second):
                nursery.start_soon(generate, caller)
        assert replayed == [wanted.token_ids] * 2
        after = await replica_of(replicas)
        assert after.life != before.life and not any(is_running(pid) for pid in before.pids)
        last = await _roll(replicas, client, wanted.token_ids, directory)
        for one in (gateway, other):
            one.fleet.check_integrity()
        return last


async def _roll(replicas: RayReplicas, client: ZeroMQClient, wanted: list[int], directory: Path) -> Described:
    """A gateway with other options brings another version; who asks the old gateway meanwhile is always answered."""
    [old] = await replicas.names()
    engine = dataclasses.replace(replicas.options.engine, n_ctx=512)
    later = RayReplicas("test", dataclasses.replace(replicas.options, engine=engine), address="local")
    options = FleetOptions(rule=ScaleRule(min_replicas=1, max_replicas=1))
    newer = FleetGateway(later, options, ServiceOptions(bind=f"ipc://{directory}/three.sock"))
    async with newer.run():
        while old in await replicas.names():
            result = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
            assert result.token_ids == wanted
        [new] = await replicas.names()
        assert later.is_ours(new) and not replicas.is_ours(new)
        result = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
        assert result.token_ids == wanted
        described = await later.describe(new, TIMEOUT_S)
        assert described is not None
        return described


def test_the_folder_of_a_replica_that_was_killed_is_removed_by_the_next_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, unready = tmp_path / f"{FOLDER}killed", tmp_path / f"{FOLDER}unready"
    for folder in (killed, unready):
        folder.mkdir()
    (killed / "lock").touch()
    (killed / "zeromq.sock").touch()
    with own_folder() as first:
        assert not killed.exists() and unready.exists()
        with own_folder() as second:
            assert first.exists() and second.exists() and first != second
    assert list(tmp_path.iterdir()) == [unready]


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes, of a processor each, on this machine."""
    cluster = cluster_utils.Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE, include_dashboard=False)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.long
@pytest.mark.trio
async def test_a_replica_of_two_ranks_on_two_nodes_is_reached_with_keys_and_comes_back_when_a_rank_dies(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)
    engine = EngineOptions(
        model_path=str(tiny_model_dir("llama")),
        dtype="float32",
        n_gpu_layers=0,
        n_ctx=512,
        n_threads=1,
        tensor_parallel=2,
    )
    replicas = RayReplicas("ranks", ReplicaOptions(engine=engine, batcher=BatcherOptions()), address=two_nodes)
    async with open_batcher(engine.model_path, dtype="float32", n_gpu_layers=0, n_ctx=512) as alone:
        wanted = (await alone.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)).token_ids
    options = FleetOptions(rule=ScaleRule())
    with trio.fail_after(TIMEOUT_S):
        async with open_fleet(replicas, options, ServiceOptions(bind=f"ipc://{tmp_path}/one.sock")) as gateway:
            assert gateway.take_over_refusal == "", "its replicas outlive it"
            before = await replica_of(replicas)
            assert before.address.startswith("tcp://") and before.server_key is not None
            with pytest.raises(Unavailable):  # without a key, libzmq lets nobody in
                async with ReplicaConnection(ZeroMQTransport(before.address), timeout=1.0) as stranger:
                    await stranger.ask(HealthRequest())
            [name] = await replicas.names()
            standing = ray.get_actor(name, namespace=NAMESPACE)
            assert len(set(ray.get(standing.placed.remote()))) == 2  # each has room for one of them
            async with ZeroMQClient(gateway.addresses[0], timeout=TIMEOUT_S) as client:
                result = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
                assert result.token_ids == wanted
                os.kill(before.pids[2], signal.SIGKILL)  # rank 0; the other one cannot go on without it
                result = await client.generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
                assert result.token_ids == wanted
            after = await replica_of(replicas)
            assert after.life != before.life and after.server_key != before.server_key
