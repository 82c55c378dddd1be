"""KV outside the pools: saved sequences as bytes, and swapped-out sequences in host memory."""

import hashlib
import json
from collections.abc import Hashable, Sequence

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from genbatch.nif.cuda_device import has_gpu
from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.models.loaded_model import Model, weights_sample
from genbatch.nif.runner import Content, Runner

FORMAT = "genbatch-sequence-1"


def fingerprint(model: Model, runner: Runner, block_size: int, adapter: str = "") -> str:
    """Return a digest that two contexts must share to exchange KV.

    The digest covers the model's config, a sample of its weights, layout, precision, and the adapter's digest.
    """
    facts: dict[str, object] = {
        "config": model.config.to_dict(),
        "weights": weights_sample(model),
        "dtype": f"torch.{model.dtype}",
        "runner": [type(runner).__name__, runner.quantize],
        "block_size": block_size,
        "reach": [(group.window, group.sink_tokens) for group in runner.groups],
        "bytes_per_block": [runner.bytes_per_block(g, block_size) for g in range(len(runner.groups))],
    }
    if adapter:
        facts["adapter"] = adapter
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def pack(tokens: Sequence[int], contents: Sequence[Content], identity: str) -> bytes:
    """Pack the tokens and each layer group's content into one file's bytes."""
    tensors = {f"group.{index}": np.ascontiguousarray(content) for index, content in enumerate(contents)}
    tensors["tokens"] = np.array(tokens, np.int64)
    # `save` accepts only strings as metadata.
    return bytes(save(tensors, metadata={"format": FORMAT, "identity": identity}))


def unpack(data: bytes, identity: str, num_groups: int) -> tuple[list[int], list[np.ndarray]]:
    """Unpack the tokens and the contents that `pack` packed.

    Raises:
        BatchError: the data is no saved sequence, is damaged, or is of another model, precision or block size.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        tensors = load(data)
        if tensors["tokens"].dtype != np.int64 or tensors["tokens"].ndim != 1:
            raise ValueError("its tokens are no list of ids")
        tokens = tensors["tokens"].tolist()
        contents = [np.array(tensors[f"group.{index}"]) for index in range(num_groups)]  # copies that may be written
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is no map")
    except (SafetensorError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise BatchError(f"not a saved sequence: {error}") from error
    # guard: identity of a session file
    if metadata.get("format") != FORMAT or metadata.get("identity") != identity:
        raise BatchError("the saved sequence is of another model, precision or block size")
    return tokens, contents


class HostBlockStore:
    """Stores content by key until it is taken back. Content that does not fit is refused, and nothing is evicted.

    Args:
        max_bytes: the budget in bytes; 0 refuses everything.
        pinned: whether to keep content in page-locked memory, from which a GPU copies fast.

    Raises:
        OptionError: max_bytes < 0, or pinned without CUDA.
    """

    def __init__(self, max_bytes: int, *, pinned: bool = False) -> None:
        if max_bytes < 0:
            raise OptionError("cpu_offload_space", f"must not be negative, not {max_bytes}")
        if pinned and not has_gpu():
            raise OptionError("cpu_offload_space", "memory can be pinned only for a CUDA device")
        self.max_bytes = max_bytes
        self.bytes_used = 0
        self._pinned = pinned
        self._content: dict[Hashable, list[Content]] = {}

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._content

    def put(self, key: Hashable, content: Sequence[Content]) -> bool:
        """Store the content of each layer group; returns False and stores nothing if they exceed the budget.

        Raises:
            BatchError: the key is in use.
        """
        if key in self._content:
            raise BatchError(f"{key!r} is swapped out already")
        size = _size(content)
        if self.bytes_used + size > self.max_bytes:
            return False
        self._content[key] = [_own(part, pinned=self._pinned) for part in content]
        self.bytes_used += size
        return True

    def take(self, key: Hashable) -> list[Content]:
        """Remove and return the content that `put` stored.

        Raises:
            BatchError: the key has no content.
        """
        if key not in self._content:
            raise BatchError(f"{key!r} is not swapped out")
        content = self._content.pop(key)
        self.bytes_used -= _size(content)
        return content

    def drop(self, key: Hashable) -> bool:
        """Drop the content of a sequence that will not return; returns False if there is none."""
        if key not in self._content:
            return False
        self.take(key)
        return True


def _own(content: Content, *, pinned: bool) -> Content:
    """Return the content, copied if it is a view: a view would keep a larger array alive, outside the budget."""
    if isinstance(content, np.ndarray) and not pinned:
        return content if content.base is None else content.copy()
    import torch

    tensor = torch.as_tensor(content)
    kept = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    return kept.pin_memory() if pinned else kept


def _size(content: Sequence[Content]) -> int:
    return sum(part.nbytes for part in content)
