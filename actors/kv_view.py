"""KVView: what a scheduler may ask of the KV memory, answered from the context's bookkeeping."""

from genbatch.actors.llm_request import LlmRequest
from genbatch.actors.sequence import Slotted
from genbatch.nif.kv_cache import KVCache


class KVView:
    """The `kv_cache_manager` that schedulers are given.

    With several layer groups the counts are those of the group with the least room, so that a fit there is a
    fit everywhere.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    @property
    def block_size(self) -> int:
        return self._kv.block_size
