"""Few file descriptors: a service raises its limit where it may, and otherwise says so before a model is loaded."""

import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from genbatch import SyncZeroMQClient
from genbatch.actors.gateways.accepting import AMPLE_FILES, LEAST_FILES, allow_files
from tests.actors.service.running_service import TIMEOUT_S, RunningService

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "set_to"),
    [
        ((1024, 4096), 256, 256, None),
        ((1024, 4096), 65536, 4096, (4096, 4096)),
        ((64, 10**6), 65536, 65536, (65536, 10**6)),
        ((64, NO_LIMIT), 65536, 65536, (65536, NO_LIMIT)),
        ((NO_LIMIT, NO_LIMIT), 65536, 65536, None),
        ((64, 64), 256, 64, (64, 64)),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    wanted: int,
    allowed: int,
    set_to: tuple[int, int] | None,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, to: told.append(to))
    assert allow_files(wanted) == allowed
    assert told == ([] if set_to is None else [set_to])


def test_a_service_with_too_few_files_says_so_at_once(tmp_path: Path) -> None:
    serve = f"exec {sys.executable} -m genbatch serve nothing --bind ipc://{tmp_path}/z"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 64 && {serve}"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode != 0
    assert f"may open 64 files, a service needs {LEAST_FILES}" in " ".join((done.stdout + done.stderr).split())


def test_many_connections_to_a_gateway_that_was_given_few_files_do_not_end_it(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != NO_LIMIT and hard < 4096:
        pytest.skip(f"the system lets nobody open more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))  # the service has it from here
    try:
        service = RunningService(tiny_model_dir("native_llama"), tmp_path).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with ExitStack() as stack:
        stack.push(service)
        gateway = service.gateway
        files = Path(f"/proc/{gateway}/limits").read_text().partition("Max open files")[2].split()[0]
        assert int(files) >= min(AMPLE_FILES, hard if hard != NO_LIMIT else AMPLE_FILES)
        for _ in range(800):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            while one.connect_ex(service.address.removeprefix("ipc://")):
                assert service.gateway == gateway  # its queue is full, and it takes the next in a moment
        with SyncZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
            assert client.health().status == "ready"
        assert service.gateway == gateway
