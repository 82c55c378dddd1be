"""Swap: keeps the KV of paused sequences in host memory, so that they go on without evaluating anything again."""

from collections.abc import Callable, Sequence

import torch

from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.kv.offload import HostBlockStore

GIB = 2**30


class SwapFault(Exception):
    """Copying KV between the pool and the host failed; what the context holds is not known any more."""


class Swap:
    """Decides between two steps who is swapped; copies at the beginning of the next step, on the model's thread.

    Block ids may be handed to others as soon as a sequence is paused, but they are written by a step at the
    earliest, and every step copies first.

    Args:
        context: whose sequences.
        space: GiB of host memory; 0 swaps nobody.

    Raises:
        OptionError: `space` is negative or not a number.
    """

    def __init__(self, context: Context, space: float) -> None:
        if not space >= 0:
            raise OptionError("cpu_offload_space", f"must be at least 0, not {space}")
        self._context = context
        self._store = HostBlockStore(int(space * GIB), pinned=space > 0 and context.model.device.type == "cuda")
        self._copies: list[Callable[[], None]] = []
        self._reserved = 0  # bytes that copies not yet made will take
        self._lengths: dict[int, int] = {}  # by request id, positions kept

    def length(self, request_id: int) -> int:
        """Positions kept of a paused sequence; 0 if it was not swapped."""
        return self._lengths.get(request_id, 0)

    @property
    def bytes_used(self) -> int:
        """Host memory in use."""
        return self._store.bytes_used + self._reserved

    def out(self, request_id: int, seq_id: int) -> bool:
        """Keeps what a sequence holds; False when there is no room for it. The caller then frees the sequence."""
        tokens, blocks = self._context.kv.export(seq_id)
        runner, block_size = self._context.runner, self._context.kv.block_size
        size = sum(len(ids) * runner.bytes_per_block(group, block_size) for group, ids in enumerate(blocks))
        if not tokens or self.bytes_used + size > self._store.max_bytes:
            return False

        def copy() -> None:
            content = [runner.read_blocks(group, ids) for group, ids in enumerate(blocks)]
            kept = self._store.put(request_id, content)
            assert kept, "room was reserved"
            self._reserved -= size

        self._reserved += size
        self._lengths[request_id] = len(tokens)
        self._copies.append(copy)
        return True

    def back(self, request_id: int, seq_id: int, tokens: Sequence[int], key: bytes) -> int:
        """Gives an empty sequence what was kept of it; returns how many positions.

        Raises:
            OutOfBlocks: the pool has no room; it stays kept.
        """
        length = self._lengths[request_id]
        blocks = self._context.kv.import_(seq_id, tokens[:length], key)

        def copy() -> None:
            content: list[torch.Tensor] = self._store.take(request_id)
            for group, (ids, tensor) in enumerate(zip(blocks, content, strict=True)):
                self._context.runner.write_blocks(group, ids, tensor)

        self._copies.append(copy)
        del self._lengths[request_id]
        return length

    def forget(self, request_id: int) -> None:
        """Drops what was kept of a sequence that ended while it waited."""
        if self._lengths.pop(request_id, None) is not None:
            self._copies.append(lambda: _drop(self._store, request_id))

    def take_copies(self) -> list[Callable[[], None]]:
        """What the next step has to run first, in this order."""
        copies, self._copies = self._copies, []
        return copies


def run_copies(copies: Sequence[Callable[[], None]]) -> None:
    """Makes the copies.

    Raises:
        SwapFault: one failed.
    """
    try:
        for copy in copies:
            copy()
    except Exception as error:
        raise SwapFault(str(error)) from error


def _drop(store: HostBlockStore, request_id: int) -> None:
    store.drop(request_id)
