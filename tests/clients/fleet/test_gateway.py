"""FleetGateway over real services: who joins, who leaves, and who comes back as somebody else."""

from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from itertools import count
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from genbatch import ZeroMQClient, open_batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.fleet.routing import ScaleRule
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.service.gateway_process import gateway_addresses
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.processes import open_processes
from genbatch.actors.service.take_over import Succession, find_predecessor
from genbatch.clients.fleet.gateway import FleetGateway, FleetOptions
from genbatch.clients.fleet.replicas import Described, ReplicaConnection
from genbatch.clients.transports import ZeroMQTransport
from genbatch.nif.engine_options import EngineOptions
from tests.waiting import ENGINE_PATIENCE_S, a_moment


class Services:
    """Replicas of one address, each time with another life; implements Replicas."""

    take_over_refusal = ""

    def __init__(self, address: str) -> None:
        self.lives: dict[str, Described] = {}  # by name
        self._address = address
        self._lives = count(1)

    async def settle(self) -> None:
        await trio.lowlevel.checkpoint()

    async def names(self) -> list[str]:
        await trio.lowlevel.checkpoint()
        return list(self.lives)

    async def create(self, index: int) -> str:
        await trio.lowlevel.checkpoint()
        self.lives[f"replica {index}"] = Described(str(next(self._lives)), self._address, (), None)
        return f"replica {index}"

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        await trio.lowlevel.checkpoint()
        return self.lives.get(name)

    def connect(self, described: Described) -> ReplicaConnection:
        return ReplicaConnection(ZeroMQTransport(described.address))

    async def end(self, name: str) -> None:
        await trio.lowlevel.checkpoint()

    def is_ours(self, name: str) -> bool:
        return True

    def is_superseded(self, names: list[str]) -> bool:
        return False


@pytest.mark.trio
async def test_a_replica_that_leaves_is_asked_no_more_and_another_life_of_it_joins(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    services = Services(f"ipc://{tmp_path}/replica.sock")
    options = FleetOptions(rule=ScaleRule(min_replicas=2, max_replicas=2))
    gateway = FleetGateway(services, options, ServiceOptions(bind=f"ipc://{tmp_path}/fleet.sock"))

    async def replicas_are(*lives: str) -> None:
        while sorted(replica.name for replica in gateway.fleet.replicas) != sorted(lives):
            await a_moment()

    with trio.fail_after(ENGINE_PATIENCE_S):
        async with (
            open_batcher(
                str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, bind=f"ipc://{tmp_path}/replica.sock"
            ),
            gateway.run(),
        ):
            await replicas_are("replica 0 1", "replica 1 2")
            del services.lives["replica 1"]
            await replicas_are("replica 0 1", "replica 1 3")
            del services.lives["replica 0"]
            await replicas_are("replica 0 4", "replica 1 3")


@pytest.mark.trio
async def test_a_gateway_takes_over_from_another_of_its_fleet_and_streams_of_both_end_as_usual(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    services = Services(f"ipc://{tmp_path}/replica.sock")
    options = FleetOptions(rule=ScaleRule(min_replicas=1, max_replicas=1))
    service = ServiceOptions(bind=f"ipc://{tmp_path}/fleet.sock")
    addresses, long = gateway_addresses(service), {"max_tokens": 200, "ignore_eos": True}
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with AsyncExitStack() as stack:
            engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)
            own = ServiceOptions(bind=f"ipc://{tmp_path}/replica.sock")
            await stack.enter_async_context(open_processes(engine, BatcherOptions(), own, of_fleet=True))
            nursery = await stack.enter_async_context(background())
            sockets = stack.enter_context(closing(ListeningSockets(addresses)))
            earlier = FleetGateway(services, options, service, sockets=sockets)
            await stack.enter_async_context(earlier.run())
            succession = Succession(sockets, earlier.take_over_refusal)
            await nursery.start(succession.run)
            client = await stack.enter_async_context(ZeroMQClient(service.bind, timeout=ENGINE_PATIENCE_S))
            async with client.stream([5, 6], **long) as stream:
                tokens = [(await anext(stream)).token_id]
                predecessor = await stack.enter_async_context(find_predecessor(addresses))
                assert predecessor is not None
                taken = stack.enter_context(closing(ListeningSockets(addresses, predecessor.sockets)))
                later = FleetGateway(services, options, service, sockets=taken)
                await stack.enter_async_context(later.run())
                await predecessor.leave()
                taken.own()
                assert succession.leaving.is_set()
                nursery.start_soon(earlier.retire, ENGINE_PATIENCE_S)
                async with ZeroMQClient(service.bind, timeout=ENGINE_PATIENCE_S) as other:
                    answer = await other.generate([5, 6], **long)
                assert later.fleet.counts["accepted"] == 1
                tokens += [token.token_id async for token in stream]
            assert tokens == answer.token_ids and earlier.fleet.counts["accepted"] == 1


@pytest.mark.trio
async def test_a_replica_that_takes_long_to_start_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    services = Services("ipc:///nowhere")
    asked: list[str] = []

    async def describe(name: str, timeout_s: float) -> Described | None:
        asked.append(name)
        await trio.sleep_forever()

    monkeypatch.setattr(services, "describe", describe)
    gateway = FleetGateway(services, FleetOptions(rule=ScaleRule(min_replicas=2, max_replicas=2)), ServiceOptions())
    with trio.move_on_after(60):
        async with gateway.run():
            raise AssertionError("no replica is ready")
    assert sorted(asked) == ["replica 0", "replica 1"]


@pytest.mark.trio
async def test_a_replica_too_many_is_let_go_once_it_was_too_many_for_a_while_and_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    services = Services("ipc:///nowhere")
    options = FleetOptions(rule=ScaleRule(min_replicas=1, max_replicas=3, idle_s=10.0))
    gateway = FleetGateway(services, options, ServiceOptions())
    let_go: list[str] = []
    monkeypatch.setattr(gateway, "_let_go", let_go.append)
    names = [await services.create(index) for index in range(3)]

    async def look(ready: int, after_s: float) -> None:
        await trio.sleep(after_s)
        gateway._known = dict.fromkeys(names[:ready])  # type: ignore[assignment]
        await gateway._scale(names)

    for ready, after_s in ((0, 0), (2, 50), (3, 50), (3, 5)):
        await look(ready, after_s)  # another one has become ready meanwhile, or it is too soon
        assert not let_go
    await look(3, 4.9)
    await look(3, 0.2)
    assert not let_go, "the wait begins at the first look that sees the same ones"
    await look(3, 10.0)
    assert let_go == [names[2]]
    await look(3, 5.0)
    assert let_go == [names[2]], "the next one waits as long"
