"""`genbatch serve` from its start to its end by a signal, with an engine process and without."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genbatch.clients import SyncZeroMQClient
from genbatch.proto.errors import Unavailable
from tests.actors.engine.running_service import TIMEOUT_S, RunningService, is_running, kill


def test_sigterm_lets_open_requests_end_and_is_success(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with RunningService(tiny_model_dir("llama"), tmp_path) as service:
        assert service.address in service.log and "float32" in service.log
        children = [pid for pid in (service.engine, service.gateway) if pid is not None]
        with (
            SyncZeroMQClient(service.address) as client,
            client.stream("go", max_tokens=240, ignore_eos=True) as stream,
        ):
            next(iter(stream))
            kill(service.process.pid, signal.SIGTERM)
            service.wait_for(" stopping ")
            with SyncZeroMQClient(service.address) as late, pytest.raises(Unavailable):
                while True:  # the signal may still be on its way to the gateway
                    late.generate("new", max_tokens=1)
            assert len([*stream]) == 239
            assert stream.result.finish_reason == "length"
        assert service.process.wait(TIMEOUT_S) == 0
        assert len(children) == 2 and not any(is_running(pid) for pid in children)
    assert " stopped" in service.log and "Traceback" not in service.log
    assert not (tmp_path / "zeromq.sock").exists()


def test_a_second_signal_waits_for_nothing(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with (
        RunningService(tiny_model_dir("llama"), tmp_path, "--engine", "thread", "--n-parallel", "1") as service,
        SyncZeroMQClient(service.address) as client,
        client.stream("go", max_tokens=240, ignore_eos=True) as stream,
    ):
        assert service.engine is None and service.gateway is None
        next(iter(stream))
        kill(service.process.pid, signal.SIGINT)
        service.wait_for(" stopping ")
        kill(service.process.pid, signal.SIGINT)
        began = time.monotonic()
        assert service.process.wait(TIMEOUT_S) == 128 + signal.SIGINT
        assert time.monotonic() - began < 5.0
