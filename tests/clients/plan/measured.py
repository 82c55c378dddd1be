"""A report as `genbatch bench -w w5 --out` writes it, of a machine whose step times are known exactly."""

from typing import Any

from genbatch.actors.scheduling.plan import StepTime, StepWork

MACHINE = StepTime(base=0.02, decode=0.0015, key=2e-6, prefill=0.0015, prefill_key=1e-7)


def report() -> dict[str, Any]:
    """W5 with three batches and two contexts."""
    return {"runs": [_run(batch, context) for context in (128, 1024) for batch in (1, 4, 16)]}


def _run(batch: int, context: int) -> dict[str, Any]:
    output = 64 + -(-batch * context // 512)
    keys = batch * (context + output / 2)
    decode_s = MACHINE.seconds(StepWork(decodes=batch, keys=keys))
    tokens = batch * context
    steps = -(-tokens // 512)
    prefill_s = (
        steps * MACHINE.base + MACHINE.prefill * tokens + MACHINE.prefill_key * tokens * context / 2
    ) + MACHINE.decode * batch * (tokens // 512) / 2
    return {
        "workload": f"W5 B={batch} context {context}",
        "num_prompts": batch,
        "total_input_tokens": tokens,
        "total_output_tokens": batch * output,
        "cached_tokens": 0,
        "prefill_tok_s": tokens / prefill_s,
        "decode_tok_s": batch / decode_s,
    }
