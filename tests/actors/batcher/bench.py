"""A Batcher over a real (tiny) model, for tests that look inside it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate, Keep
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.nif.context import Context
from genbatch.nif.kv.disk_cache import DiskCache
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Runner
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.messages import GenerateRequest, Result, Token

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]


class Bench:
    """A running Batcher and what tests look at inside it."""

    def __init__(self, actor: Batcher, ref: ActorRef, runner: Any = None, usual: dict[str, Any] | None = None) -> None:
        self.actor = actor
        self.ref = ref
        self.runner = runner
        self._usual = {"max_tokens": 8} if usual is None else usual

    async def generate(
        self,
        on_token: Callable[[Token], None] | None = None,
        *,
        client: str = "",
        beam_width: int = 1,
        keep: Keep | None = None,
        **params: Any,
    ) -> Result:
        request = GenerateRequest(**{**self._usual, **params})
        message = Generate(request, on_token, client, beam_width=beam_width, keep=keep)
        result = await self.ref.call(message, timeout=None)
        assert isinstance(result, Result)
        return result

    def assert_idle(self) -> None:
        """Every slot and every block is back, but for prompts held on purpose."""
        actor = self.actor
        assert actor.slots.seq_pool == set(range(actor.options.n_parallel))
        assert (actor.slots.sequences, actor.slots.pending, list(actor.requests)) == ({}, [], [])
        actor.ctx.kv.check_integrity()
        for held in list(actor.held_prompts):
            actor.ctx.seq_rm(actor.held_prompts.drop(held))
        assert actor.ctx.kv.counts().used == 0


@asynccontextmanager
async def batcher(
    model: Model,
    *,
    n_ctx: int | None = 512,
    num_blocks: list[int] | None = None,
    new_runner: Callable[[Model], Runner] = TorchRunner,
    new_disk: Callable[[Any], DiskCache] | None = None,
    usual: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A Batcher until the body ends; then every slot and block must be back.

    Args:
        num_blocks: of the pool, in the place of `n_ctx`.
        new_disk: makes the prefix cache on disk for a runner's blocks.
        usual: what requests of `generate` have unless it is given otherwise.
        options: of the Batcher, in the place of those below.
    """
    chosen = BatcherOptions(**{"n_parallel": 4, "batch_timeout": 1.0, "max_batch_tokens": 32, **options})
    runners: list[Runner] = []

    def open_context() -> Context:
        runners.append(new_runner(model))
        return Context(
            model,
            runners[-1],
            n_ctx=n_ctx if num_blocks is None else None,
            num_blocks=num_blocks,
            n_parallel=chosen.n_parallel,
            n_held=chosen.max_held_prompts,
            block_size=4,
            n_batch=chosen.max_batch_tokens,
            disk=None if new_disk is None else new_disk(runners[-1]),
        )

    async with trio.open_nursery() as nursery:
        actor = Batcher(open_context, chosen)
        ref = await start(nursery, actor, name="batcher")
        bench = Bench(actor, ref, runners[-1], usual)
        yield bench
        bench.assert_idle()
        await ref.stop("shutdown", timeout=None)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


async def gather(bench: Bench, requests: list[dict[str, Any]]) -> list[Result]:
    results: dict[int, Result] = {}

    async def one(index: int, params: dict[str, Any]) -> None:
        results[index] = await bench.generate(**params)

    async with trio.open_nursery() as nursery:
        for index, params in enumerate(requests):
            nursery.start_soon(one, index, params)
    return [results[index] for index in range(len(requests))]
