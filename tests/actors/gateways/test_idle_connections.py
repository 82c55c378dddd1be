"""Clients by the thousand that have connected and say nothing."""

import resource
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing

from genbatch.actors.gateways.rpc_gateway import RPCGateway
from tests.actors.gateways.scripted_batcher import served
from tests.actors.gateways.test_rpc_gateway import connected

pytestmark = pytest.mark.trio


async def test_a_thousand_idle_connections_leave_the_others_alone_and_nothing_behind(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, soft // 3)  # both ends are in this process
    async with served(tmp_path, "unix") as service, connected(service) as busy:
        assert isinstance(service.gateway, RPCGateway)
        service.gateway._limit.most = count + 1
        await busy.tell([0, 1, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        async with AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(connected(service))
            while len(service.gateway._limit) < count + 1:
                await trio.lowlevel.checkpoint()
            held.emit("a")
            assert await busy.hear() == [2, "token", [1, 0, 100, "a"]]
            assert (await busy.ask([0, 2, "generate", [{"prompt": "ok"}]]))[3]["text"] == "ok"
        while len(service.gateway._limit) > 1:
            await trio.lowlevel.checkpoint()
        held.finish()
        assert (await busy.hear())[:3] == [1, 1, None]


async def test_a_hundred_connections_that_end_at_once_end_one_a_turn_of_the_event_loop(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service:
        assert isinstance(service.gateway, RPCGateway)
        path = service.address.removeprefix("unix://")
        lines = [await trio.open_unix_socket(path) for _ in range(100)]
        while len(service.gateway._limit) < 100:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        for line in lines:
            line.socket.close()
        seen = [100]
        while seen[-1]:
            await trio.lowlevel.checkpoint()  # a turn
            seen.append(len(service.gateway._limit))
        assert max(before - after for before, after in pairwise(seen)) == 1
