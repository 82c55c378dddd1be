"""GptStatistics: the JSON string that ReturnBatchManagerStatsCallback gets, with the documented field names."""

import json
import time
from collections.abc import Collection, Hashable, Mapping

from genbatch.actors.batching.iteration import Iteration
from genbatch.actors.scheduling.batching_type import BatchingType

TIMESTAMP = "%m-%d-%Y %H:%M:%S"


class GptStatistics:
    """Turns iterations into reports and keeps what outlives one: the counter and V1's group.

    Args:
        model_type: decides which fields there are.
        max_requests: the "Max Request Count".
    """

    def __init__(self, model_type: BatchingType, max_requests: int) -> None:
        self._model_type = model_type
        self._max_requests = max_requests
        self._counter = 0
        self._group: dict[Hashable, int] = {}  # of V1: widths by tag, those that have ended included

    def report(self, iteration: Iteration, widths: Mapping[Hashable, int], micro_batch: int) -> str:
        """The statistics of one iteration.

        Args:
            widths: beams of the requests that were active in it, by tag.
            micro_batch: which micro-batch it evaluated.
        """
        self._counter += 1
        fields: dict[str, str | int] = {
            "Timestamp": time.strftime(TIMESTAMP),
            "Iteration Counter": self._counter,
            "Active Request Count": len(widths),
            "Max Request Count": self._max_requests,
            "Max KV cache blocks": iteration.kv_blocks_max,
            "Free KV cache blocks": iteration.kv_blocks_free,
            "Used KV cache blocks": iteration.kv_blocks_used,
            "Tokens per KV cache block": iteration.kv_block_size,
            "Scheduled Requests": len(iteration.context) + len(iteration.generation),
            "Context Requests": len(iteration.context),
        }
        if self._model_type is BatchingType.V1:
            fields |= {
                "Total Generation Tokens": iteration.num_generated_tokens,
                "Total Context Tokens": iteration.num_context_tokens,
                "Empty Generation Slots": self._empty_slots(iteration, widths),
            }
        else:
            fields |= {
                "Generation Requests": len(iteration.generation),
                "Total Context Tokens": iteration.num_context_tokens,
                "MicroBatch ID": micro_batch,
            }
        return json.dumps(fields)

    def _empty_slots(self, iteration: Iteration, widths: Mapping[Hashable, int]) -> int:
        """Slots of the group's ended members, which nobody takes until the whole group has ended."""
        if not _overlaps(self._group, widths):
            self._group = {}
        for tag in iteration.context:
            self._group[tag] = widths[tag]
        if not iteration.generation:
            return 0
        return sum(self._group.values()) - sum(widths[tag] for tag in iteration.generation)


def _overlaps(group: Collection[Hashable], active: Collection[Hashable]) -> bool:
    return any(tag in active for tag in group)
