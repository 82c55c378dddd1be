"""Tile sizes of the attention kernels: fixed tables, since a captured graph forbids trying variants."""

import triton

_MIN_DOT_ROWS = 16  # the smallest extent that tl.dot takes
_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 128  # below this the reduction costs more than the parallelism brings


def head_pad(head_size: int) -> int:
    """The extent of a tile along the head."""
    return max(_MIN_DOT_ROWS, int(triton.next_power_of_2(head_size)))


def tile_shape(group: int, head_size: int, element_size: int, *, decode: bool) -> tuple[int, int, int, int]:
    """(rows, keys, num_warps, num_stages) of an attention tile."""
    needed = max(_MIN_DOT_ROWS, triton.next_power_of_2(group))
    if element_size > 2:
        return needed, 16, 4, 1  # float32 has no fast dot product: larger tiles only spill registers
    wide = head_size > 128  # such tiles must stay small to fit shared memory
    if decode:
        return needed, 32 if wide else 64, 4, 2 if wide else 3
    return max(needed, 32 if wide else 64), 32 if wide else 64, 4, 2


def choose_num_splits(num_sequences: int, num_kv_heads: int, max_kv_len: int, num_processors: int) -> int:
    """Into how many shares to cut each decode's keys so that every multiprocessor has work; a power of two."""
    programs = max(1, num_sequences * num_kv_heads)
    wanted = min(2 * num_processors // programs, max_kv_len // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
