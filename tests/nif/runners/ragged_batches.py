"""Ragged batches for runners that are tested without a Context."""

from collections.abc import Sequence

import numpy as np

from genbatch.nif.runner import RaggedBatch


def ragged_batch(
    groups: int, parts: Sequence[tuple[int, Sequence[int], int]], *, capacity: int, block_size: int
) -> RaggedBatch:
    """A batch of (sequence, tokens, n_past); sequence s owns the s-th `capacity` blocks, back to front."""
    table = np.array([[(s + 1) * capacity - 1 - b for b in range(capacity)] for s, _, _ in parts])
    positions = [np.arange(past, past + len(tokens)) for _, tokens, past in parts]
    slots = [row[at // block_size] * block_size + at % block_size for row, at in zip(table, positions, strict=True)]
    lengths = [len(tokens) for _, tokens, _ in parts]
    return RaggedBatch(
        input_ids=np.array([token for _, tokens, _ in parts for token in tokens]),
        positions=np.concatenate(positions),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        kv_lens=np.array([past + len(tokens) for _, tokens, past in parts], np.int32),
        slots=(np.concatenate(slots),) * groups,
        block_tables=(table.astype(np.int32),) * groups,
        logit_rows=np.arange(sum(lengths)),
        max_query_len=max(lengths),
        max_kv_len=max(past + len(tokens) for _, tokens, past in parts),
    )
