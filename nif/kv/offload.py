"""A bounded store in host memory for the KV of sequences that were swapped out.

if store.put(request_id, [runner.read_blocks(group, blocks) for group, blocks in enumerate(exported)]):
    kv.seq_rm(seq_id)
...
for group, (blocks, content) in enumerate(zip(kv.import_(seq_id, tokens, key), store.take(request_id))):
    runner.write_blocks(group, blocks, content)
"""

from collections.abc import Hashable, Sequence

import torch

from genbatch.nif.errors import BatchError, OptionError


class HostBlockStore:
    """Keeps content by key until it is taken back; what does not fit is refused, never evicted.

    Args:
        max_bytes: the budget; 0 refuses everything.
        pinned: keep it in page-locked memory, from which a GPU copies fast.

    Raises:
        OptionError: max_bytes < 0, or pinned without CUDA.
    """

    def __init__(self, max_bytes: int, *, pinned: bool = False) -> None:
        if max_bytes < 0:
            raise OptionError("cpu_offload_space", f"must not be negative, not {max_bytes}")
        if pinned and not torch.cuda.is_available():
            raise OptionError("cpu_offload_space", "memory can be pinned only for a CUDA device")
        self.max_bytes = max_bytes
        self.bytes_used = 0
        self._pinned = pinned
        self._content: dict[Hashable, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._content

    def put(self, key: Hashable, content: Sequence[torch.Tensor]) -> bool:
        """Keeps one host tensor per layer group; False, keeping nothing, when the budget has no room for them.

        Raises:
            BatchError: something is kept under this key already.
        """
        if key in self._content:
            raise BatchError(f"{key!r} is swapped out already")
        size = _size(content)
        if self.bytes_used + size > self.max_bytes:
            return False
        # A view would keep the whole of what it looks at alive, outside the budget.
        kept = [tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone() for tensor in content]
        self._content[key] = [tensor.pin_memory() for tensor in kept] if self._pinned else kept
        self.bytes_used += size
        return True

    def take(self, key: Hashable) -> list[torch.Tensor]:
        """Gives back what `put` kept and forgets it.

        Raises:
            BatchError: nothing is kept under this key.
        """
        if key not in self._content:
            raise BatchError(f"{key!r} is not swapped out")
        content = self._content.pop(key)
        self.bytes_used -= _size(content)
        return content

    def drop(self, key: Hashable) -> bool:
        """Forgets a sequence that will not come back; False when nothing was kept."""
        if key not in self._content:
            return False
        self.take(key)
        return True


def _size(content: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in content)
