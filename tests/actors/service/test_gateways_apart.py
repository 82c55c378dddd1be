"""No gateway's end reaches another gateway or a request there, and no number of ends stops the service."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from genbatch import RPCClient, ZeroMQClient
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import ControlChannel, EngineReady, ProcessDied
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.errors import RestartLimit
from genbatch.actors.runtime.supervisor import Supervisor
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service import gateway_process, processes
from genbatch.actors.service.gateway_process import OF_GATEWAYS, Listeners
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.processes import EngineRunner, GatewayRunner, open_processes
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.messages import Result
from genbatch.proto.service_messages import Models
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher

pytestmark = pytest.mark.trio


async def test_a_gateway_that_crashes_again_and_again_leaves_the_others_and_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.service.gateway_process.OF_GATEWAYS", OF_GATEWAYS.__class__(pause_s=0.01))
    crash = trio.Event()
    serve = ZeroMQGateway._serve

    async def serve_until_the_crash(gateway: ZeroMQGateway, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, gateway, task_status)
            await crash.wait()
            raise ZeroDivisionError

    monkeypatch.setattr(ZeroMQGateway, "_serve", serve_until_the_crash)
    batcher, options = ScriptedBatcher(), ServiceOptions(bind=f"ipc://{tmp_path}/z", rpc_bind=f"unix://{tmp_path}/r")
    results: list[Result] = []
    telemetry = Telemetry()
    to_test, starts = trio.open_memory_channel[str](100)
    telemetry.attach(lambda event, _, of: to_test.send_nowait(f"{event} {of['child_id']}"))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            listeners = Listeners(await start(nursery, batcher), options, telemetry)
            await nursery.start(Supervisor([listeners.child()]).run)
            async with RPCClient(f"unix://{tmp_path}/r") as client, trio.open_nursery() as calls:

                async def ask() -> None:
                    results.append(await client.generate("hold on"))

                calls.start_soon(ask)
                held = await batcher.arrival("hold on")
                for _ in range(3 * OF_GATEWAYS.max_restarts):
                    crash.set()
                    crash = trio.Event()
                    while await starts.receive() != "supervisor.restart zeromq":
                        pass
                    assert await starts.receive() == "supervisor.child_start zeromq"
                    async with ZeroMQClient(f"ipc://{tmp_path}/z") as other:
                        assert (await other.generate("a b")).text == "ab"
                held.emit("there")
                held.finish()
            assert results[0].text == "there" and not batcher.freed
            nursery.cancel_scope.cancel()


async def test_a_gateway_process_may_die_as_often_as_strangers_like_and_an_engine_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(processes, "check_start", lambda *_: None)
    num_lives = {"engine": 0, "gateway": 0}
    engine_dies = trio.Event()

    def living(name: str, lives: Callable[[], Awaitable[object]]) -> Any:
        async def run(runner: Any, *, task_status: trio.TaskStatus[None]) -> None:
            num_lives[name] += 1
            if name == "engine":
                runner.ready = EngineReady(Models(models=()), {})
            task_status.started()
            await lives()
            raise ProcessDied(name, -6)

        return run

    monkeypatch.setattr(EngineRunner, "run", living("engine", engine_dies.wait))
    monkeypatch.setattr(GatewayRunner, "run", living("gateway", partial(trio.sleep, 0.1)))
    logging.disable(logging.CRITICAL)
    options = ServiceOptions(max_restarts=2, restart_window_s=1000.0)
    try:
        with pytest.raises(RestartLimit, match="gave up on child 'engine'"):
            async with open_processes(EngineOptions(model_path="x"), BatcherOptions(), options):
                await trio.sleep(100)
                assert num_lives["engine"] == 1 and 80 < num_lives["gateway"] < 100
                engine_dies.set()
                await trio.sleep(100)
    finally:
        logging.disable(logging.NOTSET)


async def test_the_process_of_the_gateways_gives_back_what_a_flood_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = trio.Event()

    async def keep_returning() -> None:
        begun.set()
        await trio.sleep_forever()

    class Parent:
        async def receive(self) -> None:
            await begun.wait()

    monkeypatch.setattr(gateway_process, "keep_returning_freed_memory", keep_returning)
    with trio.fail_after(PATIENCE_S):
        await gateway_process.GatewayProcess(cast(ControlChannel[Any], Parent())).serve()
