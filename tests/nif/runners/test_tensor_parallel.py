"""Ranks: shards that add up to the model, and real processes over gloo that say what one process says."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.context import Context
from genbatch.nif.context.engine import load_engine
from genbatch.nif.context.tensor_parallel import (
    _ALLOCATE,
    _COPY_BLOCKS,
    _READ_BLOCKS,
    _WRITE_BLOCKS,
    ShardRunner,
    TensorParallelRunner,
    _end_ranks,
    head_ranges,
    pack_batch,
    serve_rank,
    shard_model,
    share,
    unpack_batch,
)
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import NativeError, OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Entry, Logits, RaggedBatch
from genbatch.nif.runners.torch_runner import TorchRunner


class Threads:
    """Ranks that are threads, each with its part of what all bring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Any] = [None] * size

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = tensor.clone()
        self.barrier.wait()
        parts = list(self.brought)
        self.barrier.wait()
        return parts

    def rank(self, rank: int) -> "ThreadRank":
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, threads.size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self.threads.meet(self.rank, tensor)).sum(dim=0))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.threads.meet(self.rank, tensor)


PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [5, 6, 7, 30])


def steps(model: Model, runner: Any) -> list[torch.Tensor]:
    """Logits of a prefill of all prompts, a chunk that continues one, and a mixed step."""
    context = Context(model, runner, n_parallel=4, n_ctx=64, block_size=4, n_batch=64)
    found = context.eval([Entry(seq_id, prompt, 0, Logits.ALL) for seq_id, prompt in enumerate(PROMPTS)])
    found += context.eval([Entry(1, [40, 41, 42], 3), Entry(0, [12], 7)])
    context.seq_cp(0, 3)
    found += context.eval([Entry(3, [13], 8), Entry(0, [14], 8), Entry(2, [15], 4)])
    return [torch.as_tensor(rows) for rows in found]


def in_ranks(path: str, size: int) -> list[list[torch.Tensor]]:
    threads, found = Threads(size), [[] for _ in range(size)]  # type: list[list[torch.Tensor]]
    faults: list[BaseException] = []
    # One after another: while transformers loads, it changes what belongs to all threads.
    models = [load_model(path, dtype="float32", n_gpu_layers=0) for _ in range(size)]

    def run(rank: int) -> None:
        try:
            place = threads.rank(rank)
            runner = ShardRunner(shard_model(models[rank], place), place)
            found[rank] = steps(models[rank], runner)
        except BaseException as fault:
            faults.append(fault)
            threads.barrier.abort()

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not faults, faults
    return found


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama", 3), ("llama", 4), ("qwen3", 2), ("mistral", 4)])
def test_shards_add_up_to_the_model_on_every_rank(tiny_model_dir: Callable[[str], Any], family: str, size: int) -> None:
    path = str(tiny_model_dir(family))
    whole = load_model(path, dtype="float32", n_gpu_layers=0)
    wanted = steps(whole, TorchRunner(whole))
    ranks = in_ranks(path, size)
    for found in ranks:
        for logits, expected, first in zip(found, wanted, ranks[0], strict=True):
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
            assert torch.equal(logits, first), "ranks differ"


class Words:
    """What rank 0 tells, kept until another rank hears it; and the bytes that go to and fro."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.told: list[tuple[int, torch.Tensor, int]] = []
        self.from_zero = torch.empty(0, dtype=torch.uint8)
        self.to_zero: list[torch.Tensor] = []

    def bytes_from_zero(self, parts: None, size: int) -> torch.Tensor:
        assert self.from_zero.shape == (size,)
        return self.from_zero

    def bytes_to_zero(self, content: torch.Tensor, sizes: tuple[()]) -> None:
        self.to_zero.append(content)

    def tell(self, what: int, payload: torch.Tensor, argument: int) -> None:
        self.told.append((what, payload, argument))

    def hear(self) -> tuple[int, torch.Tensor, int]:
        if not self.told:
            raise EOFError
        return self.told.pop(0)


def test_a_rank_that_does_what_it_is_told_holds_what_rank_0_holds(tiny_model_dir: Callable[[str], Any]) -> None:
    path, place, words = str(tiny_model_dir("llama")), Threads(1).rank(0), Words()
    first, other = (
        ShardRunner(shard_model(load_model(path, dtype="float32", n_gpu_layers=0), place), place) for _ in range(2)
    )
    whole = load_model(path, dtype="float32", n_gpu_layers=0)
    context = Context(
        whole, TensorParallelRunner(first, whole, words, lambda: None), n_parallel=4, n_ctx=64, block_size=4, n_batch=64
    )
    context.eval([Entry(seq_id, prompt, 0) for seq_id, prompt in enumerate(PROMPTS)])
    context.seq_cp(0, 3)  # the block that is begun becomes two
    context.eval([Entry(0, [13], 7), Entry(3, [14], 7)])
    assert any(what == _COPY_BLOCKS for what, _, _ in words.told)
    with pytest.raises(EOFError):
        serve_rank(other, words)
    blocks = range(10)
    assert first.read_blocks(0, blocks).any()
    assert np.array_equal(other.read_blocks(0, blocks), first.read_blocks(0, blocks))


def test_of_ranks_that_were_ended_nothing_is_left() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    directory = tempfile.TemporaryDirectory()
    _end_ranks(processes, directory)
    for process in processes:
        assert process.returncode == -signal.SIGKILL
        assert process.stdin is not None and process.stdin.closed
    assert not Path(directory.name).exists()


def test_a_rank_keeps_and_gives_back_the_blocks_it_is_told_to(tiny_model_dir: Callable[[str], Any]) -> None:
    place, words = Threads(1).rank(0), Words()
    model = load_model(str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0)
    runner = ShardRunner(shard_model(model, place), place)
    content = torch.randint(256, (2, runner.bytes_per_block(0, 4)), dtype=torch.uint8)
    words.from_zero = content.flatten()
    words.told = [
        (_ALLOCATE, torch.tensor([4]), 4),
        (_WRITE_BLOCKS, torch.tensor([0, 1, 3]), 0),  # of group 0 the blocks 1 and 3
        (_READ_BLOCKS, torch.tensor([0, 3, 2, 1]), 0),
    ]
    with pytest.raises(EOFError):
        serve_rank(runner, words)  # type: ignore[arg-type]
    [given] = words.to_zero
    there, untouched, here = given.view(3, -1)
    assert torch.equal(torch.stack([here, there]), content) and not untouched.any()


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 64))
def test_every_head_is_on_one_rank_with_the_keys_it_reads(kv_heads: int, per_kv_head: int, size: int) -> None:
    heads = kv_heads * per_kv_head
    try:
        ranges = [head_ranges(heads, kv_heads, rank, size) for rank in range(size)]
    except OptionError as error:
        assert error.option == "tensor_parallel" and size > kv_heads
        return
    assert [head for queries, _ in ranges for head in queries] == list(range(heads))
    for queries, keys in ranges:
        assert len(queries) and len(queries) % len(keys) == 0
        each = len(queries) // len(keys)
        assert [head // per_kv_head for head in queries] == [key for key in keys for _ in range(each)]


@given(st.integers(0, 1000), st.integers(1, 20))
def test_shares_are_whole_and_even(count: int, size: int) -> None:
    shares = [share(count, rank, size) for rank in range(size)]
    assert [thing for own in shares for thing in own] == list(range(count))
    assert max(map(len, shares)) == len(shares[0]) and len(shares[0]) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("family", "size", "said"),
    [("llama", 5, "5 ranks, and the model has 4 heads"), ("gemma2", 2, "Gemma2ForCausalLM is none of")],
)
def test_a_model_that_cannot_be_divided_is_refused(
    tiny_model: Callable[[str], Model], family: str, size: int, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        shard_model(tiny_model(family), Threads(size).rank(0))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"runner": "native"}, "runner"),
        ({"quantize": "int8"}, "quantize"),
        ({"use_cuda_graph": True}, "use_cuda_graph"),
        ({"model_path": "/no/such/model"}, None),
    ],
)
def test_what_ranks_do_not_do_is_refused_and_leaves_nobody(options: dict[str, Any], option: str | None) -> None:
    with pytest.raises(NativeError) as caught:
        load_engine(EngineOptions(**{"dtype": "float32", "n_gpu_layers": 0, "tensor_parallel": 2, **options}))
    assert getattr(caught.value, "option", None) == option
    assert not [child for child in children() if "tensor_parallel" in child]


def children() -> list[str]:
    pids = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


def batches() -> Sequence[RaggedBatch]:
    def batch(tokens: int, entries: int, widths: Sequence[int], rows: int) -> RaggedBatch:
        return RaggedBatch(
            input_ids=np.arange(tokens),
            positions=np.arange(tokens) + 7,
            query_starts=np.arange(entries + 1, dtype=np.int32),
            kv_lens=np.arange(entries, dtype=np.int32) + 3,
            slots=tuple(np.arange(tokens) * (2 + group) for group in range(len(widths))),
            block_tables=tuple(np.arange(entries * width, dtype=np.int32).reshape(entries, width) for width in widths),
            logit_rows=np.arange(rows),
            max_query_len=5,
            max_kv_len=99,
        )

    return [batch(1, 1, [1], 1), batch(9, 3, [4, 2], 0), batch(600, 64, [100], 64)]


@pytest.mark.parametrize("batch", batches())
def test_a_step_travels_as_words(batch: RaggedBatch) -> None:
    found = unpack_batch(pack_batch(batch))
    for name in RaggedBatch.__dataclass_fields__:
        sent, came = getattr(batch, name), getattr(found, name)
        if sent is None or isinstance(sent, int):
            assert came == sent, name
            continue
        for one, other in zip(
            *((value,) if isinstance(value, np.ndarray) else value for value in (sent, came)), strict=True
        ):
            assert one.dtype == other.dtype and np.array_equal(one, other), name


@pytest.mark.long
def test_b34_three_processes_emit_identical_tokens_and_they_are_those_of_one(tmp_path: Path, smollm2: Model) -> None:
    """SmolLM2 has nine heads and three KV heads; torchrun starts the ranks, which meet over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("rank_worker.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    zero, one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    assert zero["seen"] == one == two

    context = Context(smollm2, TorchRunner(smollm2), n_parallel=4, n_ctx=256, block_size=16, n_batch=64)
    entries = [Entry(seq_id, prompt, 0) for seq_id, prompt in enumerate(zero["prompts"])]
    for tokens in zero["seen"]:
        assert np.concatenate(context.eval(entries)).argmax(-1).tolist() == tokens
        entries = [
            Entry(entry.seq_id, (token,), entry.n_past + len(entry.tokens))
            for entry, token in zip(entries, tokens, strict=True)
        ]
