"""Our decode attention beside a library's, in a CUDA graph, over a KV pool that is laid out as ours.

    for name, figure, note in compare(load): ...

The libraries are FlashInfer, and FlashAttention 3 behind torch's `varlen_attn`. `varlen_attn` takes block tables from
torch 2.13 on, and only with the kernels of the package flash-attn-3, which are for compute capability 9.0. Each
library's plan is made before the graph, as ours is; FlashInfer's is made on the host, and its time is a figure of its
own.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from inspect import signature

import torch
from gpu_tiles import copies_of, seconds_of

from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention, plan_shares

Attend = Callable[[int], torch.Tensor]  # computes one layer
_INTERPRETED_PROCESSORS = 4

# Query heads, KV heads and elements of a head.
HEADS = {"qwen3-0.6b": (16, 8, 128), "llama-3.1-8b": (32, 8, 128), "tiny": (4, 2, 16)}


class NotThere(Exception):
    """A library cannot be measured here; the message says what is missing."""


@dataclass(frozen=True)
class AttentionLoad:
    """One decode step's attention: so many rows, each with so many positions.

    Args:
        model: a key of HEADS.
    """

    model: str
    rows: int
    context: int
    block_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        """Return the blocks of one sequence."""
        return -(-self.context // self.block_size)

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values: views of one pool, in which a block holds the K and V of all layers."""
        _, kv_heads, head_size = HEADS[self.model]
        size = kv_heads * self.block_size * head_size
        count = copies_of(2 * size * self.rows * self.num_blocks * self.dtype.itemsize)
        pool = torch.randn(
            (self.rows * self.num_blocks, 2 * count * size), dtype=self.dtype, device=self.device
        )  # [num_blocks, elements of a block]
        shape = (len(pool), kv_heads, self.block_size, head_size)
        parts = [pool[:, begin : begin + size].view(shape) for begin in range(0, 2 * count * size, size)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    @cached_property
    def query(self) -> torch.Tensor:
        """Return [rows, heads, head size]."""
        heads, _, head_size = HEADS[self.model]
        return torch.randn((self.rows, heads, head_size), dtype=self.dtype, device=self.device)

    @cached_property
    def table(self) -> torch.Tensor:
        """Return the block tables, [rows, blocks of a sequence] int32: blocks lie anywhere in the pool."""
        order = torch.randperm(self.rows * self.num_blocks, device=self.device)
        return order.int().view(self.rows, self.num_blocks)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Return [rows] int32."""
        return torch.full((self.rows,), self.context, dtype=torch.int32, device=self.device)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Return [rows + 1] int32."""
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.device)

    @property
    def scale(self) -> float:
        """Return the scores' factor."""
        return float(HEADS[self.model][2] ** -0.5)


def ours(load: AttentionLoad) -> Attend:
    """Return our kernels, as a decode step launches them."""
    on_gpu = load.device.type == "cuda"
    processors = _INTERPRETED_PROCESSORS
    if on_gpu:
        processors = torch.cuda.get_device_properties(load.device).multi_processor_count
    shares = plan_shares(load.starts, load.lengths, AttentionSetting(processors), max_kv_len=load.context)

    def attend(layer: int) -> torch.Tensor:
        keys, values = load.layers[layer]
        return paged_attention(
            load.query, keys, values, load.table, load.starts, load.lengths, shares, scale=load.scale, max_query_len=1
        )

    return attend


def flashinfer(load: AttentionLoad, *, by_tensor_cores: bool) -> tuple[Attend, float]:
    """Return FlashInfer's decode attention, and the seconds that its plan takes on the host.

    Args:
        by_tensor_cores: which of its two kernels computes; it advises this one for many query heads a KV head.
    """
    if load.device.type != "cuda" or find_spec("flashinfer") is None:
        raise NotThere("it needs a GPU, and the package flashinfer-python")
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    heads, kv_heads, head_size = HEADS[load.model]
    indptr, pages, last = pages_of(load)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=load.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=by_tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(pages),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )

    def plan() -> None:
        wrapper.plan(
            indptr, pages, last, heads, kv_heads, head_size, load.block_size,
            q_data_type=load.dtype, kv_data_type=load.dtype, sm_scale=load.scale,
        )  # fmt: skip

    plan()  # loads its kernels
    torch.cuda.synchronize()
    began = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    return lambda layer: wrapper.run(load.query, load.layers[layer]), time.perf_counter() - began


def pages_of(load: AttentionLoad) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FlashInfer's form of block tables: where each sequence's pages begin, the pages, the last one's length."""
    last = load.context - (load.num_blocks - 1) * load.block_size
    return load.starts * load.num_blocks, load.table.flatten(), torch.full_like(load.lengths, last)


def varlen(load: AttentionLoad, num_splits: int | None = None) -> Attend:
    """Return torch's `varlen_attn` over block tables; `num_splits` 1 makes it independent of the batch."""
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in signature(varlen_attn).parameters:
        raise NotThere(f"torch {torch.__version__} has no block tables in varlen_attn, 2.13 has")
    if load.device.type != "cuda" or find_spec("flash_attn_interface") is None:
        raise NotThere("it needs a GPU, and the package flash-attn-3")
    activate_flash_attention_impl("FA3")

    def attend(layer: int) -> torch.Tensor:
        keys, values = (part.transpose(1, 2) for part in load.layers[layer])  # [blocks, block size, KV heads, D]
        out = varlen_attn(
            load.query, keys, values, load.starts, None, 1, load.context, scale=load.scale, window_size=(-1, 0),
            enable_gqa=True, seqused_k=load.lengths, block_table=load.table, num_splits=num_splits,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def compare(load: AttentionLoad) -> Iterator[tuple[str, str, str]]:
    """Return the name, the figure and a note of each way: the seconds of one layer, and how far it is from ours."""
    count = len(load.layers)
    attend = ours(load)
    want = attend(0).float()
    own = seconds_of([partial(attend, layer) for layer in range(count)])
    bytes_read = sum(part.nbytes for part in load.layers[0])
    yield "ours", f"{own * 1e6:.1f} us", f"{bytes_read / own / 1e12:.2f} TB/s of keys and values"
    ways: dict[str, Callable[[], tuple[Attend, str]]] = {
        "FlashInfer": lambda: _planned(load, by_tensor_cores=False),
        "FlashInfer by tensor cores": lambda: _planned(load, by_tensor_cores=True),
        "varlen_attn": lambda: (varlen(load), "splits as it chooses"),
        "varlen_attn, one split": lambda: (varlen(load, num_splits=1), "the same for every batch"),
    }
    for name, make in ways.items():
        try:
            theirs, note = make()
        except NotThere as error:
            yield name, "not there", str(error)
            continue
        difference = (theirs(0).float() - want).abs().max().item()
        seconds = seconds_of([partial(theirs, layer) for layer in range(count)])
        yield name, f"{seconds * 1e6:.1f} us", f"ours {own / seconds:.2f} x, differs by {difference:.1e}; {note}"


def _planned(load: AttentionLoad, *, by_tensor_cores: bool) -> tuple[Attend, str]:
    attend, plan_s = flashinfer(load, by_tensor_cores=by_tensor_cores)
    return attend, f"plan() takes the host {plan_s * 1e6:.0f} us a step"
