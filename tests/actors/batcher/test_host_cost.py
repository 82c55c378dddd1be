"""What a decode step costs beside its forward, in what does not depend on the machine: calls made and memory kept."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.parts import TIMED_STEPS
from genbatch.actors.runtime.actor import start
from genbatch.clients.interface import TokenStream
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Content, Largest, RaggedBatch
from genbatch.proto.messages import GenerateRequest, Token

TinyModel = Callable[[str], Model]

# Functions entered, Python's and others, for one more sequence in one step: planning, laying out, choosing, booking,
# detokenizing, the stream and its reader. With half as much again as was counted when this was written.
MOST_CALLS = {True: 120, False: 180}  # by async_batching
# Calls of a step however many sequences it has.
MOST_CALLS_A_STEP = {True: 450, False: 700}
# Blocks of memory that stay for one token: lists grow in steps, most token ids and texts are there already.
MOST_BLOCKS = 2
NEW = 60


class IdleRunner:
    """A runner without a model, which draws token 5 for ever; its forwards wait until the tokens before are read."""

    name = "idle"
    quantize = "none"

    def __init__(self, model: Model) -> None:
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        self.read = threading.Semaphore(1 + TIMED_STEPS)  # the Batcher rehearses with steps of a token

    def bytes_per_block(self, group: int, block_size: int) -> int:
        return block_size

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        pass

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        raise AssertionError("greedy decoding asks for no logits")

    def forward_largest(
        self, batch: RaggedBatch, *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest]:
        assert not with_logits
        if batch.max_query_len == 1:
            for _ in range(len(batch.kv_lens)):
                self.read.acquire()
        rows = len(batch.logit_rows)
        return None, Largest(np.ones(rows, np.float32), np.full(rows, 5, np.int32))

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        raise AssertionError

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


class Meter:
    """Reads a counter when the last sequence has read its 10th token and when it has read its 50th."""

    def __init__(self, read: Callable[[], int], sequences: int) -> None:
        self._read = read
        self._left = {10: sequences, 50: sequences}
        self._at: dict[int, int] = {}

    def token(self, token: Token) -> None:
        if token.index in self._left:
            self._left[token.index] -= 1
            if not self._left[token.index]:
                self._at[token.index] = self._read()

    @property
    def a_step(self) -> float:
        return (self._at[50] - self._at[10]) / 40


async def run(model: Model, sequences: int, async_batching: bool, read: Callable[[], int]) -> float:
    """How far the counter goes in a step of so many sequences."""
    options = BatcherOptions(n_parallel=sequences, batch_timeout=1000.0, async_batching=async_batching)
    runner, meter = IdleRunner(model), Meter(read, sequences)

    async def caller(ref: Any) -> None:
        stream = TokenStream()
        request = GenerateRequest(token_ids=[7, 8, 9], max_tokens=NEW, ignore_eos=True)

        async def produce() -> None:
            stream.finish(await ref.call(Generate(request, stream.push), timeout=None))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
            async for token in stream:
                meter.token(token)
                runner.read.release()

    async with trio.open_nursery() as nursery:
        batcher = Batcher(lambda: Context(model, runner, n_ctx=64 * 16, n_parallel=sequences), options)
        ref = await start(nursery, batcher, name="batcher")
        async with trio.open_nursery() as callers:
            for _ in range(sequences):
                callers.start_soon(caller, ref)
        await ref.stop()
    return meter.a_step


def calls_a_step(model: Model, sequences: int, async_batching: bool) -> float:
    """Functions entered on all threads."""
    counts = {"call": 0, "c_call": 0}

    def profile(_: Any, event: str, __: Any) -> None:
        if event in counts:
            counts[event] += 1

    previous = sys.getprofile()
    threading.setprofile(profile)  # for the threads to come
    sys.setprofile(profile)
    try:
        return trio.run(run, model, sequences, async_batching, lambda: sum(counts.values()))
    finally:
        sys.setprofile(previous)
        threading.setprofile(previous)


@pytest.mark.parametrize("async_batching", [True, False])
def test_a_decode_step_makes_a_bounded_number_of_calls(tiny_model: TinyModel, async_batching: bool) -> None:
    few = calls_a_step(tiny_model("llama"), 4, async_batching)
    many = calls_a_step(tiny_model("llama"), 12, async_batching)
    for_one_more = (many - few) / 8
    assert for_one_more <= MOST_CALLS[async_batching]
    assert few - 4 * for_one_more <= MOST_CALLS_A_STEP[async_batching]


def test_a_decoded_token_keeps_a_bounded_number_of_blocks(tiny_model: TinyModel) -> None:
    kept = trio.run(run, tiny_model("llama"), 8, True, sys.getallocatedblocks)
    assert kept / 8 <= MOST_BLOCKS
