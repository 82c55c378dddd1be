"""`genbatch serve` from its start to its end by a signal, with an engine process and without."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from genbatch import Retry, SyncRPCClient, SyncZeroMQClient
from genbatch.clients.cli.serve import _give_up_start
from genbatch.proto.errors import Unavailable
from tests.actors.engine.stage import Stage
from tests.actors.service.running_service import TIMEOUT_S, RunningService, is_running, kill


def test_sigterm_lets_open_requests_end_and_is_success(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    # The kernel keeps what was sent for a client that is slow to read; ZeroMQ drops it when the service has gone.
    rpc = f"unix://{tmp_path / 'rpc.sock'}"
    with RunningService(tiny_model_dir("llama"), tmp_path, "--rpc-bind", rpc) as service:
        assert service.address in service.log and "float32" in service.log
        children = [pid for pid in (service.engine, service.gateway) if pid is not None]
        with (
            SyncRPCClient(rpc, timeout=TIMEOUT_S) as client,
            client.stream("go", max_tokens=240, ignore_eos=True) as stream,
        ):
            next(iter(stream))
            kill(service.process.pid, signal.SIGTERM)
            service.wait_for(" stopping ")
            once = Retry(max_attempts=1)
            with SyncZeroMQClient(service.address, retry=once) as late, pytest.raises(Unavailable) as refused:
                while True:  # the signal may still be on its way to the gateway
                    late.generate("new", max_tokens=1)
            assert refused.value.retry_after_ms
            assert len([*stream]) == 239
            assert stream.result.finish_reason == "length"
        assert service.process.wait(TIMEOUT_S) == 0
        assert len(children) == 2 and not any(is_running(pid) for pid in children)
    assert " stopped" in service.log and "Traceback" not in service.log
    assert not (tmp_path / "zeromq.sock").exists()


def test_a_second_signal_waits_for_nothing(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    flags = ("--engine", "thread", "--scheduler", stage.scheduler, "--shutdown-timeout-s", "3600")
    with (
        RunningService(tiny_model_dir("llama"), tmp_path, *flags) as service,
        SyncZeroMQClient(service.address, timeout=TIMEOUT_S) as client,
        stage.holding(),
        client.stream("go", max_tokens=240, ignore_eos=True) as stream,
    ):
        assert service.engine is None and service.gateway is None
        next(iter(stream))
        kill(service.process.pid, signal.SIGINT)
        service.wait_for(" stopping ")
        kill(service.process.pid, signal.SIGINT)
        # The stream would never end, and has an hour: whoever waited for anything would be waiting still.
        assert service.process.wait(TIMEOUT_S) == 128 + signal.SIGINT


@pytest.mark.trio
@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_signal_before_the_service_is_ready_gives_the_start_up(is_ready: bool) -> None:
    stopping, ready, goes_on = trio.Event(), trio.Event(), False
    if is_ready:
        ready.set()
    stopping.set()
    with trio.CancelScope() as start:
        await _give_up_start(stopping, ready, start)
        await trio.lowlevel.checkpoint()
        goes_on = True
    assert goes_on == is_ready
