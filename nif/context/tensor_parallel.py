"""Tensor parallelism: one model over several processes, each with a share of every layer's heads, MLP and vocabulary.

    rank 0                                          rank 1, 2, ...
    Batcher -> Context -> TensorParallelRunner      follow(options)
                 |  plan of the step (tensors)            |
                 +------------- broadcast --------------->+
                 |  TorchRunner over its shard            |  TorchRunner over its shard
                 +<--------- all-reduce, twice a layer -->+
                 +<--------- gather of the logits --------+

Rank 0 alone decides: it has the requests, the scheduler, the block tables and the sampler. Rank 0 sends the plan of
each step to the other ranks. The plan holds the tokens drawn so far, so the ranks cannot diverge. An all-reduce gives
every rank the same sums, bit for bit. Several ranks add in another order than one rank. So float32 answers equal those
of one rank up to the first near tie.

The model's own modules run with sliced weights. The query, key, value, gate, up and head projections keep some rows.
The output and down projections keep some columns, and an all-reduce sums their results. The embedding is whole on
every rank. If there are fewer KV heads than ranks, each KV head is repeated on the ranks that read it.

A dead rank breaks the group for good: the step raises DeviceFault, and the supervisor ends rank 0. Every other rank
ends after rank 0. If a rank hangs, the step does not end; the service's `stall_s` is the timeout for it.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from genbatch.nif.cuda_device import CPU, Device
from genbatch.nif.engine_options import EngineOptions, is_torchrun, sent_fields
from genbatch.nif.errors import DeviceFault, NativeError, OptionError
from genbatch.nif.host import available_cores
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Content, RaggedBatch, Rows
from genbatch.nif.runners.torch_runner import TensorBatch, TorchRunner

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# An idle rank waits without a timeout; the service's `stall_s` detects a hung rank.
_WITHOUT_END = timedelta(days=3650)
# The int64 words of a command's first message: a decode step of 32 sequences of some 500 tokens fits.
_FIRST_WORDS = 4096
_HEADER_WORDS = 4  # command, words of the payload, block size, unused

_FORWARD, _ALLOCATE, _COPY_BLOCKS, _READ_BLOCKS, _WRITE_BLOCKS, _CLOSE = range(6)


class Collective(Protocol):
    """The collective operations between the shards of a model."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum all ranks' tensors into `tensor`, in place."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor in the order of ranks; all have one shape."""


# Shards


def shard_model(model: Model, collective: Collective, device: Device | None = None) -> Model:
    """Cut a model down to this rank's share. The model's own weights are released.

    Args:
        model: a whole model of one of `FAMILIES`.
        collective: connects all ranks, which shard the same model.
        device: the shard's device; None means the model's device.

    Raises:
        OptionError: the model cannot be divided among so many ranks.
    """
    rank, size = collective.rank, collective.size
    kind, config = type(model.hf).__name__, model.config
    if kind not in FAMILIES:
        raise OptionError("tensor_parallel", f"{kind} is none of {', '.join(FAMILIES)}")
    heads, kv_heads, head_size = config.num_attention_heads, model.layers[0].num_kv_heads, model.layers[0].key_dim
    query_heads, its_kv_heads = head_ranges(heads, kv_heads, rank, size)
    queries, keys = _rows(query_heads, head_size), _rows(its_kv_heads, head_size)
    decoder: Any = model.hf.model
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner = share(mlp.gate_proj.out_features, rank, size)
        _keep_rows(attention.q_proj, queries)
        for projection in (attention.k_proj, attention.v_proj):
            _keep_rows(projection, keys)
        for projection in (mlp.gate_proj, mlp.up_proj):
            _keep_rows(projection, inner)
        _keep_columns(attention.o_proj, queries, collective)
        _keep_columns(mlp.down_proj, inner, collective)
    module: Any = model.hf
    _keep_rows(module.lm_head, share(model.vocab_size, rank, size))
    device = device or model.device
    module.to(str(device))
    layers = tuple(replace(shape, num_kv_heads=len(its_kv_heads)) for shape in model.layers)
    return replace(model, layers=layers, device=device)


def share(count: int, rank: int, size: int) -> range:
    """Return the rank's part of range(count); the first ranks take one more if `count` does not divide evenly."""
    return range(_begin(count, rank, size), _begin(count, rank + 1, size))


def head_ranges(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Return the rank's query heads and the KV heads that they read. Each KV head is read by equally many.

    Raises:
        OptionError: the heads cannot be divided among so many ranks.
    """
    per_kv_head = heads // kv_heads
    if size <= kv_heads:
        own = share(kv_heads, rank, size)
        return range(own.start * per_kv_head, own.stop * per_kv_head), own
    if size > heads:
        raise OptionError("tensor_parallel", f"{size} ranks, and the model has {heads} heads")
    # The ranks are divided among the KV heads, and each KV head's query heads among its ranks.
    kv_head = next(head for head in range(kv_heads) if rank in share(size, head, kv_heads))
    ranks = share(size, kv_head, kv_heads)
    own = share(per_kv_head, rank - ranks.start, len(ranks))
    if len(ranks) > per_kv_head:
        raise OptionError("tensor_parallel", f"{size} ranks, and {per_kv_head} heads read each of {kv_heads} KV heads")
    first = kv_head * per_kv_head
    return range(first + own.start, first + own.stop), range(kv_head, kv_head + 1)


def _begin(count: int, rank: int, size: int) -> int:
    return rank * (count // size) + min(rank, count % size)


def _rows(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)


def _keep_rows(linear: torch.nn.Linear, rows: range) -> None:
    # Copy, because a view would keep the whole weight in memory. The head may share the embedding's weight, and the
    # embedding stays whole.
    linear.weight = _parameter(linear.weight[rows.start : rows.stop])
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias[rows.start : rows.stop])
    linear.out_features = len(rows)


def _keep_columns(linear: torch.nn.Linear, columns: range, collective: Collective) -> None:
    linear.weight = _parameter(linear.weight[:, columns.start : columns.stop])
    if linear.bias is not None and collective.rank:
        linear.bias = _parameter(torch.zeros_like(linear.bias))  # only rank 0 adds the bias, before the sum
    linear.in_features = len(columns)

    def reduce(_: torch.nn.Module, __: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        collective.all_reduce(output)
        return output

    linear.register_forward_hook(reduce)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone(), requires_grad=False)


class ShardRunner(TorchRunner):
    """A rank's TorchRunner that returns logits over the whole vocabulary."""

    name = "tensor parallel"

    def __init__(self, shard: Model, collective: Collective) -> None:
        super().__init__(shard)
        self._collective = collective

    def _logits(self, batch: TensorBatch) -> torch.Tensor:
        """Run TorchRunner's forward and join every rank's part of the vocabulary."""
        own = super()._logits(batch)  # [R, this rank's]
        counts = [len(share(self.vocab_size, rank, self._collective.size)) for rank in range(self._collective.size)]
        padded = own.new_zeros((len(own), counts[0]))
        padded[:, : own.shape[1]] = own
        parts = self._collective.gather(padded)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)


# The group of processes


class RankGroup:
    """A rank's connection to all ranks over torch.distributed.

    Tensors go over NCCL between GPUs and over gloo otherwise. Plans always go over gloo.

    Args:
        device: the device that this rank computes on.
        store: the rendezvous of the ranks; None means torchrun's, from the environment.
    """

    def __init__(self, rank: int, size: int, device: Device, store: Any = None) -> None:
        self.rank, self.size = rank, size
        backend = "nccl" if device.type == "cuda" else "gloo"
        where = {"init_method": "env://"} if store is None else {"store": store}
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=_WITHOUT_END, **where)
        self._control = dist.new_group(backend="gloo", timeout=_WITHOUT_END)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See Collective."""
        dist.all_reduce(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See Collective."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def tell(self, what: int, payload: torch.Tensor, argument: int = 0) -> None:
        """Send a command and its payload, a CPU tensor [n] int64. Only rank 0 calls this."""
        first = torch.zeros(_FIRST_WORDS, dtype=torch.int64)
        first[:3] = torch.tensor([what, len(payload), argument])
        room = _FIRST_WORDS - _HEADER_WORDS
        head = payload[:room]
        first[_HEADER_WORDS : _HEADER_WORDS + len(head)] = head
        dist.broadcast(first, 0, group=self._control)
        if len(payload) > room:
            dist.broadcast(payload[room:].contiguous(), 0, group=self._control)

    def hear(self) -> tuple[int, torch.Tensor, int]:
        """Wait for the next command and return it. Only the other ranks call this."""
        first = torch.empty(_FIRST_WORDS, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._control)
        what, count, argument = first[:3].tolist()
        room = _FIRST_WORDS - _HEADER_WORDS
        head = first[_HEADER_WORDS : _HEADER_WORDS + min(count, room)]
        if count <= room:
            return what, head, argument
        rest = torch.empty(count - room, dtype=torch.int64)
        dist.broadcast(rest, 0, group=self._control)
        return what, torch.cat([head, rest]), argument

    def bytes_to_zero(self, content: torch.Tensor | None, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Collect every rank's flat bytes at rank 0. Other ranks send `content` and get None."""
        if self.rank:
            assert content is not None
            dist.send(content, 0, group=self._control)
            return None
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for rank in range(1, self.size):
            dist.recv(parts[rank], rank, group=self._control)
        return parts

    def bytes_from_zero(self, parts: Sequence[torch.Tensor] | None, size: int) -> torch.Tensor:
        """Scatter rank 0's `parts`; every rank gets its own flat bytes."""
        if not self.rank:
            assert parts is not None
            for rank in range(1, self.size):
                dist.send(parts[rank], rank, group=self._control)
            return parts[0]
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, 0, group=self._control)
        return content


class TensorParallelRunner:
    """Rank 0's runner: it sends every step to the other ranks and computes its own share. Implements `Runner`.

    Logits lie on rank 0's device.

    Args:
        runner: runs rank 0's shard.
        group: connects all ranks.
        alive: raises DeviceFault if another rank has ended.
    """

    name = "tensor parallel"
    quantize = "none"

    def __init__(self, runner: ShardRunner, model: Model, group: RankGroup, alive: Callable[[], None]) -> None:
        self.vocab_size, self.groups = runner.vocab_size, runner.groups
        self._runner, self._group, self._alive = runner, group, alive
        self._heads = [
            len(head_ranges(model.config.num_attention_heads, _kv_heads(model), rank, group.size)[1])
            for rank in range(group.size)
        ]
        self._block_size = 0

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Sum the bytes of all ranks; see `Runner`."""
        own = self._runner.bytes_per_block(group, block_size)
        return own // self._heads[0] * sum(self._heads)

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Allocate every rank's pool."""
        self._block_size = block_size
        self._tell(_ALLOCATE, num_blocks, block_size)
        self._runner.allocate(num_blocks, block_size)

    def forward(self, batch: RaggedBatch) -> Rows:
        """See `Runner`; every rank computes its share.

        Raises:
            DeviceFault: a rank is gone, or its share of the step failed.
        """
        self._tell(_FORWARD, pack_batch(batch))
        try:
            return self._runner.forward(batch)
        except Exception as error:
            raise DeviceFault(f"a rank failed in mid step: {error}") from error

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner`; each rank copies its heads' share."""
        self._tell(_COPY_BLOCKS, [group, *(block for pair in pairs for block in pair)])
        self._runner.copy_blocks(group, pairs)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """See `Runner`; the result joins the ranks' shares side by side."""
        self._tell(_READ_BLOCKS, [group, *blocks])
        own = torch.as_tensor(self._runner.read_blocks(group, blocks))
        sizes = [own.numel() // self._heads[0] * heads for heads in self._heads]
        try:
            parts = self._group.bytes_to_zero(None, sizes)
        except Exception as error:
            raise DeviceFault(f"a rank is gone: {error}") from error
        assert parts is not None
        parts[0] = own.flatten()
        return torch.cat([part.view(len(blocks), -1) for part in parts], dim=1).numpy()

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """See `Runner`; each rank gets its share back."""
        assert content.shape == (len(blocks), self.bytes_per_block(group, self._block_size))
        self._tell(_WRITE_BLOCKS, [group, *blocks])
        widths = [content.shape[1] // sum(self._heads) * heads for heads in self._heads]
        parts = [part.contiguous() for part in torch.split(torch.as_tensor(content), widths, dim=1)]
        try:
            self._group.bytes_from_zero([part.flatten() for part in parts], 0)
        except Exception as error:
            raise DeviceFault(f"a rank is gone: {error}") from error
        self._runner.write_blocks(group, blocks, parts[0])

    def close(self) -> None:
        """Release every rank's pool."""
        try:
            self._tell(_CLOSE, ())
        finally:
            self._runner.close()

    def _tell(self, what: int, words: Sequence[int] | torch.Tensor, argument: int = 0) -> None:
        self._alive()
        payload = words if isinstance(words, torch.Tensor) else torch.tensor(list(words), dtype=torch.int64)
        try:
            self._group.tell(what, payload, argument)
        except Exception as error:
            raise DeviceFault(f"a rank is gone: {error}") from error


def serve_rank(runner: ShardRunner, group: RankGroup, on_step: Callable[[Rows], None] | None = None) -> None:
    """Run rank 0's commands until the process ends.

    Args:
        on_step: called with each step's logits, which every rank has.
    """
    block_size = 0
    while True:
        what, words, argument = group.hear()
        if what == _FORWARD:
            logits = runner.forward(unpack_batch(words))
            if on_step is not None:
                on_step(logits)
        elif what == _ALLOCATE:
            block_size = argument
            runner.allocate(words.tolist(), block_size)
        elif what == _CLOSE:
            runner.close()
        else:
            group_id, *blocks = words.tolist()
            if what == _COPY_BLOCKS:
                runner.copy_blocks(group_id, list(zip(blocks[::2], blocks[1::2], strict=True)))
            elif what == _READ_BLOCKS:
                group.bytes_to_zero(torch.as_tensor(runner.read_blocks(group_id, blocks)).flatten(), ())
            else:
                width = runner.bytes_per_block(group_id, block_size)
                content = group.bytes_from_zero(None, len(blocks) * width)
                runner.write_blocks(group_id, blocks, content.view(len(blocks), width))


# A step as words


def pack_batch(batch: RaggedBatch) -> torch.Tensor:
    """Pack a batch into one CPU tensor [n] int64 for `unpack_batch`."""
    plain: list[np.ndarray] = [batch.input_ids, batch.positions, batch.query_starts, batch.kv_lens, batch.logit_rows]
    sizes = [len(batch.slots), batch.max_query_len, batch.max_kv_len, *(len(array) for array in plain)]
    sizes += [table.shape[1] for table in batch.block_tables]
    flat = [array.reshape(-1).astype(np.int64) for array in (*plain, *batch.slots, *batch.block_tables)]
    return torch.from_numpy(np.concatenate([np.array(sizes, np.int64), *flat]))


def unpack_batch(words: torch.Tensor) -> RaggedBatch:
    """Unpack the tensor of `pack_batch`."""
    num_groups, max_query_len, max_kv_len, tokens, _, starts, entries, rows = words[:8].tolist()
    widths = words[8 : 8 + num_groups].tolist()
    sizes = [tokens, tokens, starts, entries, rows, *[tokens] * num_groups, *(entries * width for width in widths)]
    parts = np.split(words[8 + num_groups :].numpy(), np.cumsum(sizes)[:-1])
    tables = parts[5 + num_groups :]
    return RaggedBatch(
        input_ids=parts[0],
        positions=parts[1],
        query_starts=parts[2].astype(np.int32),
        kv_lens=parts[3].astype(np.int32),
        logit_rows=parts[4],
        slots=tuple(parts[5 : 5 + num_groups]),
        block_tables=tuple(
            table.astype(np.int32).reshape(entries, width) for table, width in zip(tables, widths, strict=True)
        ),
        max_query_len=max_query_len,
        max_kv_len=max_kv_len,
    )


# Starting and following


def open_ranks(options: EngineOptions, load: Callable[[], Model]) -> tuple[Model, Callable[[], TensorParallelRunner]]:
    """Start the other ranks (unless torchrun has), load the model, and join the group as rank 0.

    Returns:
        The model with rank 0's share of the weights, and a function that makes a context's runner.

    Raises:
        OptionError: the model cannot be divided among the ranks, or another rank did not start.
        ModelError: as `load_model`.
    """
    size = options.tensor_parallel
    if options.runner not in ("auto", "torch"):
        raise OptionError("runner", f"several ranks compute in torch, not {options.runner}")
    for option, asked in (
        ("quantize", options.quantize not in ("auto", "none")),
        ("use_cuda_graph", options.use_cuda_graph),
    ):
        if asked:
            raise OptionError(option, "several ranks compute in torch, in the model's dtype and without graphs")
    # The number of threads does not change the sums; too many threads only wait for one another.
    torch.set_num_threads(threads_per_rank(options))
    others = None if is_torchrun() else OtherRanks(options)
    try:
        model = load()
        device = compute_device(options)
        if others is not None:
            others.wait_until_loaded()
        group = RankGroup(0, size, device, None if others is None else others.store)
        alive: Callable[[], None] = _nobody_to_ask if others is None else others.check
        whole = model
        shard = shard_model(model, group, device)
    except BaseException:
        if others is not None:
            others.end()
        raise
    # The rest of the engine must see the shapes of the whole model.
    return replace(whole, device=device), lambda: TensorParallelRunner(ShardRunner(shard, group), whole, group, alive)


def follow(options: EngineOptions, rank: int, store: Any = None, on_step: Callable[[Rows], None] | None = None) -> None:
    """Load the model on another rank, keep this rank's share, and run rank 0's commands until rank 0 is gone.

    Raises:
        OptionError, ModelError: as `open_ranks`.
        RuntimeError: rank 0 or another rank is gone.
    """
    torch.set_num_threads(threads_per_rank(options))
    model = load_model(options.model_path, dtype=options.dtype, n_gpu_layers=0)
    if store is not None:
        store.set(f"loaded {rank}", "yes")
    device = compute_device(options)
    group = RankGroup(rank, options.tensor_parallel, device, store)
    serve_rank(ShardRunner(shard_model(model, group, device), group), group, on_step)


def compute_device(options: EngineOptions) -> Device:
    """Return a rank's device: the first visible GPU, or the CPU. A torchrun rank sees all GPUs and takes its own."""
    if options.n_gpu_layers == 0 or not torch.cuda.is_available():
        return CPU
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Device("cuda", local if local < torch.cuda.device_count() else 0)


def threads_per_rank(options: EngineOptions) -> int:
    """Return the number of compute threads for each rank on this machine."""
    if options.n_threads:
        return options.n_threads
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", options.tensor_parallel)))


class OtherRanks:
    """The processes of all ranks but 0 on this machine. The processes end with this process and with this object."""

    def __init__(self, options: EngineOptions) -> None:
        # The ranks meet in a file that only this user can read: a port would have to be chosen, and others could join.
        self._directory = tempfile.TemporaryDirectory(prefix="genbatch-ranks-")
        self._size = options.tensor_parallel
        path = Path(self._directory.name) / "store"
        self.store = _meeting_place(path, self._size)
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.processes = [_start_rank(options, rank, path) for rank in range(1, self._size)]
        self.end = weakref.finalize(self, _end_ranks, self.processes, self._directory)

    def wait_until_loaded(self) -> None:
        """Wait until every rank has loaded its model.

        Raises:
            OptionError: a rank has ended instead.
        """
        waiting = set(range(1, self._size))
        while waiting:
            self._check_started()
            waiting = {rank for rank in waiting if not self.store.check([f"loaded {rank}"])}
            time.sleep(0.02)

    def check(self) -> None:
        """Check that every rank is running.

        Raises:
            DeviceFault: a rank has ended.
        """
        for rank, process in enumerate(self.processes, start=1):
            if process.poll() is not None:
                raise DeviceFault(f"rank {rank} of {self._size} has ended with code {process.returncode}")

    def _check_started(self) -> None:
        try:
            self.check()
        except DeviceFault as fault:
            raise OptionError("tensor_parallel", str(fault)) from fault


def _meeting_place(path: Path, size: int) -> Any:
    distributed: Any = dist  # torch's own types leave the class out
    return distributed.FileStore(str(path), size)


def _start_rank(options: EngineOptions, rank: int, store: Path) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if options.n_gpu_layers != 0 and torch.cuda.is_available():
        visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        if len(devices) < options.tensor_parallel:
            raise OptionError("tensor_parallel", f"{options.tensor_parallel} ranks, and GPUs {visible}")
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank]
    command = "from genbatch.nif.context.tensor_parallel import main; main()"
    sent = msgspec.json.encode(sent_fields(options)).decode()
    arguments = [sys.executable, "-c", command, sent, str(rank), str(store)]
    # The rank ends when its standard input closes, and the pipe closes when this process ends.
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, env=environment)


def _end_ranks(processes: "Sequence[subprocess.Popen[bytes]]", directory: "tempfile.TemporaryDirectory[str]") -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    directory.cleanup()


def _nobody_to_ask() -> None:
    """Do nothing: torchrun watches its ranks itself."""


def _kv_heads(model: Model) -> int:
    heads = getattr(model.config, "num_key_value_heads", None)
    return int(heads or model.config.num_attention_heads)


def main() -> None:
    """Run a rank that rank 0 started, with the arguments `options rank store`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    options = msgspec.json.decode(sys.argv[1], type=EngineOptions)
    try:
        follow(options, int(sys.argv[2]), _meeting_place(Path(sys.argv[3]), options.tensor_parallel))
    except (NativeError, RuntimeError) as error:
        # torch.distributed raises RuntimeError if a peer is gone: the group is over.
        print(f"rank {sys.argv[2]} ends: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    # Threads of a backend whose peers are gone may never end.
    os._exit(1)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, as a blocked read would hold its lock
        pass
    os._exit(1)
