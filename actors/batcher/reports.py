"""Reports: the models that a Batcher serves, and its statistics as plain data."""

from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.open_requests import BatchState
from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.thinking import Thinking
from genbatch.nif.context import Context
from genbatch.proto.messages import ModelCard


def model_cards(ctx: Context, n_parallel: int) -> tuple[ModelCard, ...]:
    """Return the card of the model, for `n_parallel` sequences at once, and the cards of its adapters."""
    model, runner, pooling = ctx.model, ctx.runner, ctx.model.pooling
    card = ModelCard(
        id=model.name,
        n_ctx=ctx.max_positions,
        n_parallel=n_parallel,
        vocab_size=model.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=runner.quantize,
        runner=runner.name,
        device=str(runner.device),
        embedding_size=pooling.size if pooling is not None and pooling.embeds else None,
        generates=model.generates,
        labels=pooling.scoring.labels if pooling is not None and pooling.scoring is not None else (),
        sampling=dict(model.sampling),
        thinks=model.generates and Thinking(model).takes_effort,
    )
    adapted = msgspec.structs.replace(card, parent=card.id, embedding_size=None, labels=())
    return card, *(msgspec.structs.replace(adapted, id=one.name) for one in ctx.adapters.serving())


# The most slots in a report; more do not fit on a screen.
MAX_SLOTS = 64


def stats_report(state: BatchState, now: float) -> dict[str, Any]:
    """Return all statistics at the time `now`, in seconds on the event loop's clock."""
    ctx, slots = state.ctx, state.slots
    kv, cache = ctx.kv, ctx.kv.prefix_cache
    counts = kv.counts()
    running = list(slots.sequences.items())[:MAX_SLOTS]
    return {
        **state.journal.stats.snapshot(now),
        "model": ctx.model.name,
        "runner": ctx.runner.name,
        "requests_running": len(slots.sequences),
        "requests_waiting": len(slots.pending),
        "n_parallel": slots.n_parallel,
        "slots": [_slot(seq_id, sequence, now) for seq_id, sequence in sorted(running)],
        "held_prompts": len(state.held),
        "prefix_cache_queries": cache.num_query_tokens if cache else 0,
        "prefix_cache_hits": cache.num_hit_tokens if cache else 0,
        "prefix_recomputed": dict(cache.num_recomputed) if cache else {},
        "kv_blocks_max": counts.max,
        "kv_blocks_free": counts.free,
        "kv_blocks_used": counts.used,
        "kv_block_size": kv.block_size,
        "kv_bytes": sum(
            count * ctx.runner.bytes_per_block(group, kv.block_size) for group, count in enumerate(kv.num_blocks)
        ),
        "adapters": list(ctx.adapters),
        "adapter_bytes": sum(adapter.nbytes for adapter in ctx.adapters.values()),
        "swapped_bytes": state.swap.bytes_used,
        "tasks": trio.lowlevel.current_statistics().tasks_living,  # of this process's event loop
    }


def _slot(seq_id: int, sequence: Sequence, now: float) -> dict[str, Any]:
    request = sequence.request
    first = request.first_token_at
    seconds = 0.0 if first is None or sequence.last_token_at is None else sequence.last_token_at - first
    return {
        "slot": seq_id,
        "request_id": request.request_id,
        "client": request.client,
        "tenant": request.tenant,
        "adapter": None if request.adapter is None else request.adapter.name,
        "phase": sequence.phase.value,
        "prompt_tokens": sequence.num_prompt_tokens,
        "computed_tokens": sequence.num_computed,
        "generated_tokens": sequence.num_generated,
        "max_tokens": sequence.max_new_tokens,
        "seconds": now - request.accepted_at,
        "tokens_per_s": (sequence.num_generated - 1) / seconds if seconds else None,
    }
