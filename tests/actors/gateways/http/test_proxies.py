"""Proxies and clients that others wrote, with the settings that they have by themselves, in front of the gateway."""

import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest
import trio

from tests.actors.gateways.http.serving import ServedHTTP, served_http
from tests.actors.gateways.http.test_connection import STREAMS
from tests.actors.gateways.http.test_doors import Talking
from tests.actors.gateways.scripted_batcher import PATIENCE_S

pytestmark = pytest.mark.trio

COMPLETION = "/v1/completions"
# By default nginx speaks HTTP/1.0 to its upstream and collects answers before it passes them on.
NGINX = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/client;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 50s
    timeout server 50s
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    server one 127.0.0.1:{upstream}
"""
PROXIES = ("nginx", "haproxy")


def program(name: str) -> str:
    """Where it is; skips the test if it is nowhere."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip(f"needs {name}; .ci/run installs it where it can")
    return path


@asynccontextmanager
async def proxied(name: str, served: ServedHTTP, directory: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a proxy that has the gateway as its upstream."""
    path, configuration = program(name), directory / f"{name}.conf"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    text = NGINX if name == "nginx" else HAPROXY
    configuration.write_text(text.format(directory=directory, port=port, upstream=served.port))
    command = [path, "-p", f"{directory}", "-c", f"{configuration}"] if name == "nginx" else [path, "-db"]
    command += [] if name == "nginx" else ["-f", f"{configuration}"]
    async with trio.open_nursery() as nursery:
        log = (directory / "log").open("wb")
        with log:
            run = partial(trio.run_process, command, stdout=log, stderr=subprocess.STDOUT, check=False)
            process: trio.Process = await nursery.start(run)
            await _until_it_listens(port, process)
            address = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=address, trust_env=False, timeout=PATIENCE_S) as client:
                yield client
            process.kill()


async def _until_it_listens(port: int, process: trio.Process) -> None:
    while True:
        assert process.poll() is None, "it has ended; the file log in tmp_path has its reason"
        try:
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        except OSError:
            await trio.sleep(0.01)  # another program's start
        else:
            return


@pytest.mark.parametrize("name", PROXIES)
async def test_a_proxy_passes_on_streams_of_every_api_to_their_end(name: str, tmp_path: Path) -> None:
    async with served_http(batcher=Talking()) as served, proxied(name, served, tmp_path) as client:
        for _ in range(2):
            for path, body, end in STREAMS:
                response = await client.post(path, json=body | {"stream": True})
                assert response.status_code == 200 and end in response.content
                assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("name", PROXIES)
async def test_a_proxy_passes_on_each_token_as_it_comes(name: str, tmp_path: Path) -> None:
    async with served_http() as served, proxied(name, served, tmp_path) as client, trio.open_nursery() as nursery:

        async def emit_first() -> None:
            (await served.batcher.arrival("hold")).emit("a")

        nursery.start_soon(emit_first)
        async with client.stream("POST", COMPLETION, json={"prompt": "hold", "stream": True}) as response:
            texts = []
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                    if texts == ["a"]:
                        served.batcher.held["hold"].emit("b")
                    elif texts == ["a", "b"]:
                        served.batcher.held["hold"].finish()
    assert "".join(texts) == "ab"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROXIES)
async def test_a_client_that_leaves_a_proxy_frees_its_sequence(name: str, stream: bool, tmp_path: Path) -> None:
    async with served_http() as served, proxied(name, served, tmp_path) as client, trio.open_nursery() as nursery:

        async def ask() -> None:
            await client.post(COMPLETION, json={"prompt": "hold", "stream": stream})

        nursery.start_soon(ask)
        held = await served.batcher.arrival("hold")
        if stream:
            held.emit("a")
        nursery.cancel_scope.cancel()
        await client.aclose()
        await served.batcher.release("hold")


@pytest.mark.parametrize("name", PROXIES)
async def test_a_refusal_reaches_the_client_of_a_proxy(name: str, tmp_path: Path) -> None:
    async with served_http() as served, proxied(name, served, tmp_path) as client:
        response = await client.post(COMPLETION, content=b"{")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_message")
        response = await client.post(COMPLETION, json={"prompt": "a"}, headers={"Origin": "http://evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        response = await client.post("/nowhere", content=b" " * 900_000)
        assert response.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_alive", [(), ("-k",)])
async def test_ab_gets_every_answer(keep_alive: tuple[str, ...], stream: bool, tmp_path: Path) -> None:
    path = program("ab")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "to be", "stream": stream}))
    async with served_http() as served:
        command = [path, *keep_alive, "-n", "40", "-c", "4", "-l", "-p", f"{body}", "-T", "application/json"]
        ended = await trio.run_process([*command, f"http://127.0.0.1:{served.port}{COMPLETION}"], capture_stdout=True)
        told = ended.stdout.decode()
        assert "Complete requests:      40\n" in told and "Failed requests:        0\n" in told, told
        assert "Non-2xx" not in told and len(served.batcher.requests) == 40


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
@pytest.mark.parametrize(("path", "body", "end"), STREAMS)
async def test_curl_streams_in_every_version_that_it_can_ask_for(
    version: str, path: str, body: dict[str, object], end: bytes
) -> None:
    curl = program("curl")
    async with served_http(batcher=Talking()) as served:
        command = [curl, "-sSN", "--noproxy", "*", "--fail", version, "-d", json.dumps(body | {"stream": True})]
        ended = await trio.run_process([*command, f"http://127.0.0.1:{served.port}{path}"], capture_stdout=True)
    assert end in ended.stdout


async def test_curl_that_speaks_http_2_at_once_is_refused() -> None:
    curl = program("curl")
    async with served_http() as served:
        command = [curl, "-sS", "--noproxy", "*", "--http2-prior-knowledge", f"http://127.0.0.1:{served.port}/health"]
        ended = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        assert ended.returncode != 0 and not ended.stdout
        assert (await served.client.get("/health")).status_code == 200
