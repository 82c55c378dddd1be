"""A reservation: the blocks of one step, taken but not yet final."""

from collections.abc import Callable, Sequence

from genbatch.nif.kv_sequence import KVSequence

# (sequence, group, its table's length before, the shared last block that was replaced by a copy)
Growth = tuple[KVSequence, int, int, int | None]


class Reservation:
    """What `KVCache.reserve` returns; ends with exactly one `commit` or `rollback`.

    Meanwhile the block tables already show the new blocks, while lengths and tokens are the old ones.
    """

    __slots__ = ("_finish", "copies", "entries", "growth")

    def __init__(
        self,
        entries: Sequence[tuple[int, Sequence[int], int]],
        copies: list[list[tuple[int, int]]],
        growth: list[Growth],
        finish: Callable[["Reservation", bool], None],
    ) -> None:
        self.entries = entries
        self.copies = copies  # per group (source, destination) blocks to copy before the forward pass
        self.growth = growth  # what to undo
        self._finish = finish

    def commit(self) -> None:
        """The step succeeded: the sequences hold the new positions."""
        self._finish(self, True)

    def rollback(self) -> None:
        """The step failed: everything is as it was before.

        Only cached content of blocks that were taken is gone, since the failed step may have written there.
        """
        self._finish(self, False)
