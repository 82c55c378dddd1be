"""Tile sizes of the attention kernels: fixed tables, since a captured graph forbids trying variants."""

from dataclasses import dataclass

import triton

_MIN_DOT_ROWS = 16  # the smallest extent that tl.dot takes
_MAX_SHARES = 64  # of one sequence's keys
_MIN_SHARE = 256  # keys; with fewer, joining costs more than the parallelism brings


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def head_pad(head_size: int) -> int:
    """The extent of a tile along the head."""
    return max(_MIN_DOT_ROWS, int(triton.next_power_of_2(head_size)))


def tile_shape(group: int, head_size: int, element_size: int, *, decode: bool, in_order: bool = False) -> Tile:
    """The tile for `group` query heads a KV head, whose elements take `element_size` bytes.

    Args:
        decode: of one token a sequence; else of chunks.
        in_order: chunks round as decodes do: the decodes' tile, with fewer stages, as chunks keep more beside it in
            registers. Stages change no sum.
    """
    needed = max(_MIN_DOT_ROWS, triton.next_power_of_2(group))
    if element_size > 2:
        return Tile(needed, 16, 4, 1)  # float32 has no fast dot product: larger tiles only spill registers
    wide = head_size > 128  # such tiles must stay small to fit shared memory
    if decode or in_order:
        # The block ids, which addresses wait for, take stages too: what is left doubles the keys' and values' buffers.
        return Tile(needed, 32 if wide else 64, 8 if wide else 4, 3 if in_order else 5)
    return Tile(max(needed, 32 if wide else 64), 32 if wide else 64, 8 if head_size > 64 else 4, 2)


def share_size(max_positions: int) -> int:
    """Keys that one program takes of a decode; a power of two.

    It depends on how long sequences may be and on nothing of the batch, so that what is summed with what, and so every
    rounding, is a matter of the sequence alone.
    """
    return max(_MIN_SHARE, int(triton.next_power_of_2(-(-max_positions // _MAX_SHARES))))


def max_shares(num_sequences: int, max_kv_len: int, share: int) -> int:
    """Most shares that decodes of so many sequences have; none has fewer than one."""
    return num_sequences * max(1, -(-max_kv_len // share))
