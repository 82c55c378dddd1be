"""genbatch behind Ray Serve: each of Serve's replicas is a genbatch service, and OpenAI's API is passed through to it.

pip install genbatch 'ray[serve]'
GENBATCH_MODEL=smollm2 serve run ray_serve:app     # in this folder; then http://127.0.0.1:8000/v1
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

# Headers that belong to one connection, and not to what goes over it.
PER_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(num_replicas=2, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1})
class Genbatch:
    """A service in a process of its own, which ends with this actor.

    Args:
        model: what to serve.
        flags: of `genbatch serve`.
    """

    def __init__(self, model: str, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        program = Path(sys.executable).parent / "genbatch"
        self._service = subprocess.Popen([program, "serve", model, "--http", f":{port}", *flags])
        self._session: aiohttp.ClientSession | None = None

    async def check_health(self) -> None:
        """Serve asks now and again, and starts another replica when this raises."""
        if self._service.poll() is not None:
            raise RuntimeError(f"genbatch has ended with code {self._service.returncode}")

    async def __call__(self, request: Request) -> Response:
        """Passes a request on, and its answer back as it comes."""
        session = self._session = self._session or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {name: value for name, value in request.headers.items() if name not in PER_CONNECTION}
        url = f"{self._url}{request.url.path}"
        if request.url.query:
            url = f"{url}?{request.url.query}"
        body = await request.body()
        while True:
            try:
                answer = await session.request(request.method, url, data=body, headers=headers)
                break
            except aiohttp.ClientConnectorError:
                await self.check_health()
                await asyncio.sleep(0.2)  # the model is being loaded
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in PER_CONNECTION}
        return StreamingResponse(_pieces(answer), status_code=answer.status, headers=kept)

    def __del__(self) -> None:
        self._service.terminate()  # which lets open requests end
        self._service.wait()


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:  # a caller that leaves ends the request
        async for piece in answer.content.iter_any():
            yield piece


app = Genbatch.bind(os.environ.get("GENBATCH_MODEL", "smollm2"))
