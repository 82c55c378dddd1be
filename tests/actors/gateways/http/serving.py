"""An HTTP gateway in front of a scripted Batcher, and a plain client of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import trio

from genbatch.actors.gateways.addresses import parse_http_address
from genbatch.actors.gateways.dispatcher import Callee, Dispatcher
from genbatch.actors.gateways.http.batch_store import BatchStore
from genbatch.actors.gateways.http.http_gateway import HTTPGateway, MetricsGateway
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.security.security import Security
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher


@dataclass(frozen=True)
class ServedHTTP:
    """A gateway, who answers behind it, and a client in front of it."""

    batcher: ScriptedBatcher
    ref: ActorRef
    gateway: HTTPGateway
    gateway_scope: trio.CancelScope
    client: httpx2.AsyncClient

    @property
    def port(self) -> int:
        return int(self.gateway.address.rpartition(":")[2])

    async def complete(self, prompt: str, **params: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **params})


@asynccontextmanager
async def served_http(
    security: Security | None = None,
    batcher: ScriptedBatcher | None = None,
    *,
    only_metrics: bool = False,
    strict: bool = False,
    batch_dir: Path | None = None,
    takes_over: bool = False,
    in_front: Callable[[ActorRef], Callee] = lambda ref: ref,
) -> AsyncIterator[ServedHTTP]:
    """Runs all of them for as long as the body runs; PATIENCE_S at most, so that no test hangs.

    Args:
        in_front: returns what the gateway calls; the Batcher itself if it is not given.
    """
    batcher = batcher or ScriptedBatcher()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, batcher)
            address = parse_http_address(":0")
            store = None if batch_dir is None else BatchStore(batch_dir, waits=takes_over)
            kind = MetricsGateway if only_metrics else HTTPGateway
            gateway = kind(Dispatcher(in_front(ref)), address, security, strict=strict, store=store)
            scope = trio.CancelScope()

            async def run(task_status: trio.TaskStatus[str]) -> None:
                with scope:
                    await gateway.run(task_status=task_status)

            url = await nursery.start(run)
            async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
                yield ServedHTTP(batcher, ref, gateway, scope, client)
            nursery.cancel_scope.cancel()
