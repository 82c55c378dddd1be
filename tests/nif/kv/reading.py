"""What tests read of a cache's tables."""

from genbatch.nif.kv.block_tables import sequence_of
from genbatch.nif.kv.kv_cache import KVCache


def num_evicted(kv: KVCache, group: int, seq_id: int) -> int:
    """Entries of a block table whose blocks are gone; they follow those of the sinks."""
    return kv._tables.gone(group, sequence_of(kv._tables, seq_id).evicted[group])
