"""`genbatch serve` from its start to its end by a signal, with an engine process and without."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from rich.console import Console

from genbatch import Retry, SyncRPCClient, SyncZeroMQClient
from genbatch.actors.batcher.parts import model_cards
from genbatch.clients.cli import serve
from genbatch.clients.cli.serve import INT8_GAIN, _give_up_start, banner
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
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


@pytest.mark.parametrize("output", ["a full disk", "a pipe without a reader"])
def test_a_service_needs_no_reader_of_its_output_and_nohup_keeps_it(
    output: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    if output == "a full disk":
        written = os.open("/dev/full", os.O_WRONLY)
    else:
        read, written = os.pipe()
        os.close(read)
    address = f"ipc://{tmp_path}/zeromq.sock"
    command = ["nohup", sys.executable, "-m", "genbatch", "serve", str(tiny_model_dir("native_llama"))]
    flags = ["--bind", address, "--engine", "thread", "--n-ctx", "512", "--n-gpu-layers", "0"]
    with subprocess.Popen([*command, *flags], stdout=written, stderr=written) as service:
        try:
            with SyncZeroMQClient(address, timeout=TIMEOUT_S, retry=Retry(max_attempts=1)) as client:
                client.generate("go", max_tokens=1)
                kill(service.pid, signal.SIGHUP)
                assert [client.health().status for _ in range(20)] == ["ready"] * 20
            kill(service.pid, signal.SIGTERM)
            assert service.wait(TIMEOUT_S) == 0
        finally:
            service.kill()
            os.close(written)


def test_a_second_signal_waits_for_nothing(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    flags = ("--engine", "thread", "--scheduler", stage.scheduler, "--shutdown-timeout-s", "3600")
    with (
        RunningService(tiny_model_dir("native_llama"), tmp_path, *flags) as service,
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


@pytest.mark.parametrize(
    ("quantize", "runner", "multiplies", "is_told"),
    [
        ("none", "native", True, True),
        ("none", "native", False, False),
        ("int8", "native", True, False),
        ("none", "torch", True, False),
    ],
)
def test_the_banner_tells_what_int8_would_give(
    tiny_model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    quantize: str,
    runner: str,
    multiplies: bool,
    is_told: bool,
) -> None:
    monkeypatch.setattr(serve, "multiplies_int8", lambda: multiplies)
    model = "smollm2" if runner == "native" else str(tiny_model_dir("llama"))  # whose heads the kernels cannot take
    options = EngineOptions(model_path=model, dtype="float32", quantize=quantize, runner=runner, num_blocks=4)
    ctx = load_engine(options).open_context(n_parallel=1, n_held=0, n_batch=16)
    [card] = model_cards(ctx, 1)
    console = Console(width=200)
    with console.capture() as printed:
        console.print(banner(card, {"kv_blocks_max": 1, "kv_block_size": 16}, ["tcp://localhost:1"]))
    ctx.close()
    assert (INT8_GAIN in printed.get()) is is_told
