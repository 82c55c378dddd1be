"""Target: what `genbatch bench` measures, a running service, a private one, or the batch manager."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import trio
from rich.console import Console

from genbatch.clients.bench.case import Case
from genbatch.clients.bench.load import Load
from genbatch.clients.bench.load_run import Streams
from genbatch.clients.cli.bench_flags import MeasureFlags
from genbatch.clients.cli.command import UsageError
from genbatch.clients.cli.engine_flags import ModelFlags, engine_options
from genbatch.clients.cli.progress import LoadingBars
from genbatch.clients.connection import ConnectionFlags, import_engine, open_client

DEFAULT_PARALLEL = 32
# Flags that the batch manager has no counterpart of.
_NOT_THE_BATCH_MANAGERS = ("runner", "quantize", "n_threads", "n_ctx")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the flags lead to.

    Args:
        n_parallel: sequences that a private service decodes at once; None is the default.

    Raises:
        UsageError: flags that only a private service reads, or that the batch manager does not.
    """

    connection: ConnectionFlags
    engine: ModelFlags
    n_parallel: int | None
    measures: MeasureFlags

    def __post_init__(self) -> None:
        if self.connection.connect is not None:
            self._refuse_flags_of_a_private_service(self.connection.connect)
        if self.measures.logits:
            self._refuse_flags_beside_logits()

    @asynccontextmanager
    async def open(self, loads: Sequence[Load]) -> AsyncIterator[tuple[Streams, dict[str, Any]]]:
        """A client, and what is known of the model.

        Args:
            loads: what a private service needs room for.

        Raises:
            GenbatchError, ModelError, OptionError: as the client or the service raises.
        """
        if self.measures.logits:
            async with self._open_batch_manager(loads) as opened:
                yield opened
            return
        engine = self.engine if self.connection.connect is not None else self._roomy(loads)
        async with open_client(self.connection, engine, n_parallel=self._parallel) as client:
            yield client, msgspec.to_builtins((await client.models())[0])

    async def floors(self, cases: Sequence[Case]) -> list[float | None]:
        """Seconds of each case's step by the kernels alone; None where it is not asked for."""
        if not self.measures.floor:
            return [None for _ in cases]
        with LoadingBars(Console(stderr=True)) as bars:
            await import_engine(bars)
            return await trio.to_thread.run_sync(self._measure_floors, cases, abandon_on_cancel=True)

    def logits_of(self, client: Streams) -> dict[str, int]:
        """Logits that came with the last load, in rows and bytes; nothing where none are asked for."""
        if not self.measures.logits:
            return {}
        from genbatch.clients.bench.gpt_manager_client import GptManagerClient

        assert isinstance(client, GptManagerClient)
        seen = client.take_logits()
        return {
            "context_logits_rows": seen.context_rows,
            "generation_logits_rows": seen.generation_rows,
            "logits_bytes": seen.num_bytes,
        }

    @property
    def _parallel(self) -> int:
        return self.n_parallel or DEFAULT_PARALLEL

    def _measure_floors(self, cases: Sequence[Case]) -> list[float | None]:
        from genbatch.clients.bench.floor import DecodeFloor

        floor = DecodeFloor(engine_options(self.connection.model, self.engine))
        found: list[float | None] = []
        for case in cases:
            assert case.batch is not None
            request = case.load.requests[0]
            found.append(floor.measure(case.batch, len(request.prompt) + request.max_tokens // 2))
        return found

    @asynccontextmanager
    async def _open_batch_manager(self, loads: Sequence[Load]) -> AsyncIterator[tuple[Streams, dict[str, Any]]]:
        with LoadingBars(Console(stderr=True)) as bars:
            await import_engine(bars)
            from genbatch.clients.bench.gpt_manager_client import open_gpt_manager
            from genbatch.nif.models.model import load_model

            load = partial(load_model, dtype=self.engine.dtype, n_gpu_layers=self.engine.n_gpu_layers, progress=bars)
            model = await trio.to_thread.run_sync(load, self.connection.model, abandon_on_cancel=True)
        async with open_gpt_manager(model, loads, self._parallel, **self.measures.logits) as client:
            yield client, {"id": model.name, "vocab_size": model.vocab_size, "runner": "batch manager"}

    def _roomy(self, loads: Sequence[Load]) -> ModelFlags:
        """The engine's flags with a KV pool in which no sequence waits for memory, unless its size was given."""
        default = ModelFlags().n_ctx
        if self.engine.n_ctx != default:
            return self.engine
        wanted = max(load.positions_of(self._parallel) for load in loads)
        block = 64  # at least what the last block of a sequence holds
        return replace(self.engine, n_ctx=max(default, wanted + block * self._parallel))

    def _refuse_flags_of_a_private_service(self, address: str) -> None:
        given = {"n_parallel": self.n_parallel, "floor": self.measures.floor}
        given["return_context_logits"] = self.measures.return_context_logits
        given["return_generation_logits"] = self.measures.return_generation_logits
        for name, value in given.items():
            if value:
                raise UsageError(f"{name}: only of a model in this process, not of the service at {address}")

    def _refuse_flags_beside_logits(self) -> None:
        default = ModelFlags()
        for name in _NOT_THE_BATCH_MANAGERS:
            if getattr(self.engine, name) != getattr(default, name):
                raise UsageError(f"{name}: logits come from the batch manager, which does not read it")
        if self.measures.floor:
            raise UsageError("floor: logits come from the batch manager, whose steps have no measured floor")
