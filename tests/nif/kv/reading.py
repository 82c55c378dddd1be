"""What tests read of a cache's tables."""

from genbatch.nif.kv.block_tables import sequence_of
from genbatch.nif.kv.kv_cache import KVCache


def num_evicted(kv: KVCache, group: int, seq_id: int) -> int:
    """Leading entries of a block table whose blocks are gone."""
    return sequence_of(kv._tables, seq_id).evicted[group]
