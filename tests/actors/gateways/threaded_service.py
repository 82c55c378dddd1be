"""The whole tree on a thread of its own, for tests that are plain Python or run other programs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.nif.engine_options import EngineOptions


@contextmanager
def threaded_service(model: Path, *, n_ctx: int = 4096, **options: Any) -> Iterator[Service]:
    """Serves `model` in float32 on the CPU while the body runs; `options` are ServiceOptions'."""
    engine = EngineOptions(model_path=str(model), dtype="float32", n_gpu_layers=0, n_ctx=n_ctx)
    ready = threading.Event()
    found: list[Service] = []
    stops: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []

    async def serve() -> None:
        async with open_service(engine, BatcherOptions(batch_timeout=1.0), ServiceOptions(**options)) as service:
            found.append(service)
            stops.append((trio.lowlevel.current_trio_token(), trio.Event()))
            ready.set()
            await stops[0][1].wait()

    def run() -> None:
        try:
            trio.run(serve)
        finally:
            ready.set()  # also where it could not start, which the thread's own error tells

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        assert found, "the service did not start"
        yield found[0]
    finally:
        for token, stop in stops:
            token.run_sync_soon(stop.set)
        thread.join()
