"""transformers as an engine of the comparison: `generate_batch`'s manager for loads, `generate` for fixed batches.

python -m tests.benchmarks.compare.transformers_engine --dtype bfloat16
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from genbatch.nif.models.model_source import resolve_model
from tests.benchmarks.compare.command_lines import CommandLines
from tests.benchmarks.compare.peers import MODEL

_NO_END = -1
# One of the two best of what was tried on the first half minute of the 64 chats: 50 and 51 tokens a second. With 4, 6,
# 12 and 16 requests at once it made 40, 40, 46 and 45; with blocks of 16 positions and 64 or 256 tokens a step 52 and
# 41; with its own blocks of 256 43; with six times the blocks 41; with its own num_blocks, which takes all memory, 34,
# and with its own everything none; compiled 3.5. On those with a shared prompt twice and four times the blocks made no
# difference. Its attention here is one product over the keys of all requests with a mask: more of them cost more than
# they bring.
_REQUESTS = 8
_BATCH_TOKENS = 256
_PAGE_SIZE = 32
_PAGES = 64


class Commands:
    """A model and what it is asked for; greedy, no answer ends early."""

    def __init__(self, dtype: str) -> None:
        directory = resolve_model(MODEL).directory
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model.eval()

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """The answers of `generate`, each alone."""
        return {"answers": [self._generate([prompt], max_tokens)[0] for prompt in prompts]}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Answer tokens a second of one static batch, its prefill included."""
        started_at = time.perf_counter()
        self._generate(prompts, max_tokens)
        return {"tok_s": len(prompts) * max_tokens / (time.perf_counter() - started_at)}

    def load(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], limit_s: float) -> dict[str, Any]:
        """Answer tokens a second of `generate_batch`'s manager with all requests at once.

        Args:
            limit_s: after it no more is waited for; the rate is that of all tokens until then, unfinished answers'
                too.
        """
        self._model.set_attn_implementation("sdpa")
        longest = max(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True))
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_END, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=_REQUESTS,
                max_batch_tokens=_BATCH_TOKENS,
                page_size=_PAGE_SIZE,
                num_blocks=max(_PAGES, -(-longest // _PAGE_SIZE)),
            ),
        )
        manager.start()
        try:
            started_at = time.perf_counter()
            for prompt, count in zip(prompts, max_tokens, strict=True):
                # Streaming tells of tokens before the end.
                manager.add_request(list(prompt), max_new_tokens=count, eos_token_id=_NO_END, streaming=True)
            done, tokens = 0, {}
            elapsed = 0.0
            while done < len(prompts) and elapsed < limit_s:
                result = manager.get_result(timeout=1)
                elapsed = time.perf_counter() - started_at
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("its generation thread ended")
                    continue
                if result.error:
                    raise RuntimeError(result.error)
                tokens[result.request_id] = len(result.generated_tokens)
                done += result.is_finished()
        finally:
            manager.stop(block=True, hard_stop=True)  # else it would first finish what was cut off
        return {"tok_s": sum(tokens.values()) / elapsed, "done": done, "of": len(prompts)}

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        self._model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=_NO_END,  # min_new_tokens would forbid the end's token, not ignore it
                do_sample=False,
                pad_token_id=0,
            )
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    lines = CommandLines()
    commands = Commands(options.dtype)
    lines.reply({})
    lines.serve({"greedy": commands.greedy, "generate": commands.generate, "load": commands.load})


if __name__ == "__main__":
    main()
