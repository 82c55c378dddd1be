"""The tables of rotary embeddings: as long as is asked for, made anew only when they are too short."""

import numpy as np
from transformers import LlamaConfig

from genbatch.nif.models.rope import RopeTables


def test_tables_grow_with_the_positions_and_not_before() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2)
    tables = RopeTables(config, partial=False, max_position=20_000)
    [first] = tables.up_to(1)
    rows = first.cosines.shape[0]
    assert rows < 10_000 and tables.up_to(rows)[0] is first
    [longer] = tables.up_to(rows + 1)
    assert longer.cosines.shape[0] > rows
    assert np.array_equal(longer.cosines[:rows], first.cosines) and np.array_equal(longer.sines[:rows], first.sines)
    assert tables.up_to(30_000)[0].cosines.shape[0] == 20_000, "no more than the model has"
    assert tables.up_to(30_000)[0] is tables.up_to(20_000)[0]
