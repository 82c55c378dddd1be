"""The samples of docs/deploy: read as their own programs read them, their command lines as `genbatch serve` does."""

import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.addresses import check_http, parse_http_address
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.security.security import Security
from genbatch.actors.service.on_demand import ModelCatalog
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.main import app
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError

pytestmark = pytest.mark.usefixtures("logging_restored")

DEPLOY = Path(__file__).parent.parent / "docs" / "deploy"


def unit() -> dict[str, str]:
    """The keys of the systemd unit, whatever their section."""
    lines = (DEPLOY / "genbatch.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def container() -> dict[str, Any]:
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def composed() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["genbatch"])


COMMANDS = {
    "compose": lambda: composed()["command"],
    "kubernetes": lambda: container()["args"],
    "systemd": lambda: shlex.split(unit()["ExecStart"])[1:],
}


@pytest.fixture(params=sorted(COMMANDS))
def flags(request: pytest.FixtureRequest) -> list[str]:
    command, *rest = COMMANDS[request.param]()
    assert command == "serve"
    return list(rest)


def test_each_command_line_is_one_that_serve_takes(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[ServiceOptions] = []

    @asynccontextmanager
    async def note(
        catalog: ModelCatalog,
        batcher: BatcherOptions,
        options: ServiceOptions,
        sockets: ListeningSockets,
    ) -> AsyncIterator[None]:
        taken.append(options)
        [engine] = catalog.models
        assert isinstance(engine, EngineOptions)
        raise ModelError(engine.model_path, "the end")
        yield

    monkeypatch.setattr("genbatch.clients.cli.serve._open_service", note)
    result = CliRunner().invoke(app, ["serve", *flags])
    assert "cannot load model 'smollm2': the end" in result.stderr
    [service] = taken
    assert service.http is not None and service.metrics is not None
    check_http(service.http, Security(http_insecure=service.http_insecure))  # else it would not start
    assert parse_http_address(service.metrics).port == 9000


def test_a_stop_leaves_time_for_open_requests(flags: list[str]) -> None:
    given = " ".join(flags).replace("=", " ")
    [drain] = re.findall(r"--shutdown-timeout-s (\d+)", given)
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for seconds in (grace, int(composed()["stop_grace_period"].removesuffix("s")), int(unit()["TimeoutStopSec"])):
        assert seconds > int(drain)


def test_the_probes_ask_for_paths_and_ports_that_there_are() -> None:
    pod = container()
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    assert ports == {"http": 8000, "metrics": 9000}
    for name in ("startupProbe", "readinessProbe"):
        assert pod[name]["httpGet"]["path"] == "/health" and pod[name]["httpGet"]["port"] in ports
    assert pod["livenessProbe"]["tcpSocket"]["port"] in ports
    assert "http://127.0.0.1:9000/health" in composed()["healthcheck"]["test"][-1]


def test_the_image_has_what_the_command_lines_need() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "/src[http,grammar]" in text and "gcc" in text and 'ENTRYPOINT ["genbatch"]' in text
    assert f"--uid {10001}" in text  # the one that kubernetes.yaml runs as


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("needs systemd-analyze")
    # The program is not installed here, and that is all that may be missing.
    path = tmp_path / "genbatch.service"
    path.write_text((DEPLOY / "genbatch.service").read_text().replace("/opt/genbatch/bin/genbatch", "/bin/true"))
    done = subprocess.run([systemd, "verify", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "genbatch.service" not in done.stderr


def test_docker_takes_the_compose_file() -> None:
    docker = shutil.which("docker")
    asked = [docker or "", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("needs docker compose")
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
