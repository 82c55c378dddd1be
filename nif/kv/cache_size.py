"""Computes the sizes of the KV pools from free memory, the model's shape and a step's own memory."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genbatch.nif.cuda_device import Device
from genbatch.nif.errors import OptionError
from genbatch.nif.runner import LayerGroup


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU in bytes.

    Args:
        device: its name, "cuda:0".
        total: the whole memory.
        free: memory that no process has.
        reserved: memory that torch has reserved in this process.
        allocated: the part of `reserved` that tensors take.
    """

    device: str
    total: int
    free: int
    reserved: int
    allocated: int

    @property
    def usable(self) -> int:
        """Return the bytes for new tensors, including the gaps between torch's tensors."""
        return self.free + self.reserved - self.allocated

    def __str__(self) -> str:
        others = self.total - self.free - self.reserved
        return (
            f"{self.device} has {self.total} bytes: {self.free} are free, tensors of this process take "
            f"{self.allocated}, gaps between them {self.reserved - self.allocated}, everything else {others}"
        )


def gpu_memory(device: Device, *, collect: bool) -> GpuMemory:
    """Measure the memory of a CUDA device.

    Args:
        collect: collect garbage first and empty torch's cache, which waits for the device.
            Loading a model leaves gigabytes of unused segments, and a stopped Batcher leaves its whole pool.
    """
    import torch

    if collect:
        gc.collect()
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(str(device))
    reserved, allocated = torch.cuda.memory_reserved(str(device)), torch.cuda.memory_allocated(str(device))
    return GpuMemory(str(device), int(total), int(free), int(reserved), int(allocated))


# TensorRT-LLM's names for two of the limits.
_ALIASES = {"freeGpuMemoryFraction": "max_memory_percent", "maxTokens": "max_tokens"}
# Python objects of one block: a reference count, a hash, a prefix cache entry and tokens. The figure is generous.
_HOST_BYTES_PER_BLOCK = 512
# A fourth of a step's bytes is spare: glibc was measured to keep up to a fifth of them in holes of its heap.
_SPARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """The limits of the pool; the smallest limit applies.

    Args:
        max_memory_percent: the fraction of free memory to use, above 0 and at most 1 (also freeGpuMemoryFraction).
        max_tokens: positions, all sequences together, rounded down to blocks (also maxTokens).
        n_ctx: the same, rounded up to blocks.
        num_blocks: blocks of a group that attends to all positions.

    Raises:
        OptionError: a value is out of range.
    """

    max_memory_percent: float = 0.9
    max_tokens: int | None = None
    n_ctx: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_memory_percent) and 0 < self.max_memory_percent <= 1):
            raise OptionError("max_memory_percent", f"must be above 0 and at most 1, not {self.max_memory_percent}")
        for option in ("max_tokens", "n_ctx", "num_blocks"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise OptionError(option, f"must be at least 1, not {value}")

    @classmethod
    def named(cls, **options: float | None) -> "CacheLimits":
        """Build limits from our names or TensorRT-LLM's; None means the default.

        Raises:
            OptionError: an unknown name, both names of one limit, or a value out of range.
        """
        chosen: dict[str, float] = {}
        for name, value in options.items():
            ours = _ALIASES.get(name, name)
            if ours not in cls.__slots__:
                raise OptionError(name, "no such limit of the KV cache")
            if value is None:
                continue
            if ours in chosen:
                raise OptionError(name, f"given twice, as {ours} too")
            chosen[ours] = value
        return cls(**chosen)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The figures that determine a forward pass's memory beside the KV pool.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP, all experts of a token together.
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        head_dim: the larger of a key's and a value's elements.
        vocab_size: width of the logits.
        dtype_bytes: bytes of one activation element.
        max_batch_tokens: most tokens of one forward.
        num_sequences: most sequences of one forward.
        logit_rows: most rows of logits of one forward.
        max_positions: longest sequence the model allows.
        score_bytes: attention's bytes per (head, query, key); 0 for kernels that never write scores or masks.
        choice_bytes: bytes for drawing tokens and scoring prompts, beside the logits.
        step_bytes: the runner's own figure for its activations; None computes the figure from the shape.
        runner_bytes: the runner's own bytes: captured graphs and their logits, shares of attention.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype_bytes: int
    max_batch_tokens: int
    num_sequences: int
    logit_rows: int
    max_positions: int
    score_bytes: float = 16  # scores, softcapped scores and weights in float32, and the mask as float32
    choice_bytes: int = 0
    step_bytes: int | None = None
    runner_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Predicted bytes, an upper bound of the real use. `spare` is freed memory that allocators keep."""

    kv: int
    activations: int
    logits: int
    bookkeeping: int
    runner: int = 0

    @property
    def spare(self) -> int:
        return (self.activations + self.logits + self.runner) // _SPARE

    @property
    def total(self) -> int:
        return self.kv + self.activations + self.logits + self.bookkeeping + self.runner + self.spare


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The blocks per layer group, their predicted bytes with a step's, and the smallest limit.

    `positions` is the pool's capacity; a group with a window serves as many positions with fewer blocks.
    """

    num_blocks: tuple[int, ...]
    footprint: Footprint
    limited_by: str
    positions: int


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory with only the model loaded.

    Args:
        measure: returns its bytes; None if they are unknown.
        describe: describes this memory for an error message.
    """

    measure: Callable[[], int | None]
    describe: Callable[[], str] = str


def cache_size(
    step: StepShape,
    groups: Sequence[LayerGroup],
    bytes_per_block: Sequence[int],
    *,
    block_size: int,
    memory: FreeMemory,
    limits: CacheLimits,
) -> CacheSize:
    """Compute the size of every layer group's pool.

    Args:
        bytes_per_block: bytes of a block, per group.

    Raises:
        OptionError: not even a sequence of one block fits, or nothing at all bounds the pool.
    """

    def sized(whole: int) -> CacheSize:
        counts = tuple(
            group_blocks(group, whole * block_size, block_size, step.max_batch_tokens, step.num_sequences)
            for group in groups
        )
        footprint = _footprint(step, counts, bytes_per_block, block_size, whole)
        return CacheSize(counts, footprint, limited_by, whole * block_size)

    caps = {
        "max_tokens": None if limits.max_tokens is None else limits.max_tokens // block_size,
        "n_ctx": None if limits.n_ctx is None else -(-limits.n_ctx // block_size),
        "num_blocks": limits.num_blocks,
    }
    pinned = {option: count for option, count in caps.items() if count is not None}
    limited_by = min(pinned, key=pinned.__getitem__, default="max_memory_percent")
    if pinned.get(limited_by) == 0:
        raise OptionError(limited_by, f"less than one block of {block_size} positions")
    free = memory.measure()
    if free is None:
        if not pinned:
            raise OptionError("max_memory_percent", "free memory is unknown here; give n_ctx or num_blocks")
        return sized(pinned[limited_by])
    budget = int(free * limits.max_memory_percent)
    if pinned and sized(pinned[limited_by]).footprint.total <= budget:
        return sized(pinned[limited_by])
    limited_by = "max_memory_percent"
    least = sized(1).footprint.total
    if least > budget:
        description = memory.describe()
        raise OptionError(
            limited_by,
            f"a sequence of one block takes {least} bytes with its step, {budget} of {free} may be used"
            + (f"; {description}" if description else ""),
        )
    # Bisect the number of blocks that fit: the footprint grows with each block.
    fits, too_many = 1, max(2, budget // max(1, min(bytes_per_block)) + 1)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if sized(middle).footprint.total <= budget:
            fits = middle
        else:
            too_many = middle
    return sized(fits)


def group_blocks(group: LayerGroup, positions: int, block_size: int, max_batch_tokens: int, num_sequences: int) -> int:
    """Return the blocks that a group needs so that it never limits a pool of `positions` positions.

    Args:
        group: the layer group; its window and its sinks determine the number.
        positions: the pool's capacity, all sequences together.
        max_batch_tokens: most tokens of one step.
    """
    whole = -(-positions // block_size)
    group = group.sized(block_size)
    if group.window is None:
        return whole
    # Each sequence keeps its sinks and its window, and a window may touch one more block. Add the step's tokens.
    kept = num_sequences * (-(-group.sink_tokens // block_size) + -(-(group.window - 1) // block_size) + 1)
    return min(whole, kept + -(-max_batch_tokens // block_size) + num_sequences)


def _footprint(
    step: StepShape, counts: Sequence[int], bytes_per_block: Sequence[int], block_size: int, whole: int
) -> Footprint:
    longest = min(step.max_positions, whole * block_size)
    heads_width = (step.num_heads + 2 * step.num_kv_heads) * step.head_dim
    # Count residuals and their float32 copies in the norms, Q, K, V before and after rotation, and the gated MLP.
    per_token = (
        step.dtype_bytes * (4 * step.hidden_size + 2 * heads_width + 3 * step.intermediate_size)
        + 4 * 4 * step.hidden_size
    )
    # Count one sequence's gathered keys and values of one layer, as stored and in float32.
    gathered = longest * 2 * step.num_kv_heads * step.head_dim * (step.dtype_bytes + 4)
    scores = int(step.score_bytes * step.num_heads * step.max_batch_tokens * longest)
    # Count the logits in float32, and in the model's dtype before the conversion.
    logits = step.logit_rows * step.vocab_size * (4 + (step.dtype_bytes if step.dtype_bytes < 4 else 0))
    logits += step.choice_bytes
    activations = step.max_batch_tokens * per_token
    if step.score_bytes:
        activations += gathered + max(0, scores - logits)  # the last layer's scores are gone when the logits come
    tables = len(counts) * step.num_sequences * -(-longest // block_size) * 2 * 4
    slots = step.max_batch_tokens * (2 + 2 * len(counts)) * 8
    return Footprint(
        kv=sum(count * size for count, size in zip(counts, bytes_per_block, strict=True)),
        activations=activations if step.step_bytes is None else step.step_bytes,
        logits=logits,
        bookkeeping=tables + slots + sum(counts) * _HOST_BYTES_PER_BLOCK,
        runner=step.runner_bytes,
    )
