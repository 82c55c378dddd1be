"""Decoding with and without a multi-token head or an assistant, by the share of guesses that are right.

    python -m tests.benchmarks.multi_token_heads --quantize int8 --keep /tmp/heads
    python -m tests.benchmarks.multi_token_heads --assistant --vocab 262144 --keep /tmp/assisted

Makes a model of random weights in the shape of Qwen3.5-0.8B. Its layers add nothing to the residual, so that it draws
each token by the one before alone, and its head knows that rule: every guess is right. A guess is then replaced at
random, so that the given share stays right. So the costs are those of the real model, and the share is chosen.

With `--assistant` the model has the shape of Gemma 4 E2B without embeddings of the layers' own, and the assistant has
the shape of E2B's. Its guesses are replaced by what the model drew after the same token before.

Two Batchers, without and with the head, take turns, A-B-B-A, with the same prompts; answers are compared token by
token. A ratio is the time without the head divided by the time with it, of each round's pair. With `--prompt`, the
first figures are those of the time to the first token of a prompt of so many tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import trio
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.nif.context.drafters import Drafted, Drafter
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.messages import GenerateRequest
from tests.benchmarks.draft_model import Spoiled
from tests.benchmarks.prompt_lookup import open_batcher, take_turns, timed
from tests.nif.assistant_models import random_assistant, saved, silenced
from tests.nif.mtp_models import right_pair

SIZES: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


_MIXED = ["sliding_attention"] * 4 + ["full_attention"]
E2B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": _MIXED * 7,
    "sliding_window": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 8192,
}
ASSISTANT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "use_ordered_embeddings": True,
    "centroid_intermediate_top_k": 32,
}


def write(folder: Path, vocab_size: int) -> None:
    """Write the model in bfloat16."""
    right_pair(folder, torch.bfloat16, **{**SIZES, "vocab_size": vocab_size})


def write_assisted(folder: Path, vocab_size: int) -> None:
    """Write the model and the assistant in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    hf = silenced(Gemma4ForCausalLM(Gemma4TextConfig(**E2B, vocab_size=vocab_size)))
    saved(hf, random_assistant(hf, **ASSISTANT, num_centroids=vocab_size // 128), folder)
    torch.set_default_dtype(torch.float32)


class Known:
    """Replaces a drafter's guesses. The new guess is the token that the model drew earlier after the same token.

    Args:
        drafter: guesses anything, at its own cost.
        answers: of the model, which draws each token by the one before alone.
    """

    def __init__(self, drafter: Drafter, answers: Sequence[Sequence[int]]) -> None:
        self._drafter = drafter
        self._next = {token: after for answer in answers for token, after in pairwise(answer)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        drafts = self._drafter.propose(sequences, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            token = sequence.tokens[-1]
            for place in range(len(draft)):
                draft[place] = token = self._next.get(token, 0)
        return drafts


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(10, 300, length).tolist() for _ in range(count)]


async def first_token(batcher: Batcher, prompt: list[int]) -> float:
    """Return the seconds to the first token."""
    began = time.perf_counter()
    await batcher.ref.call(Generate(GenerateRequest(token_ids=prompt, max_tokens=1)), timeout=None)
    return time.perf_counter() - began


async def measure(folder: Path, chosen: argparse.Namespace) -> None:
    """Print a line for each share and each number of sequences."""
    common = {"model_path": str(folder), "quantize": chosen.quantize, "n_ctx": 8192}
    named = str(folder / "assistant") if chosen.assistant else "self"
    if chosen.assistant:
        common["model_path"] = str(folder / "model")
    engines = {drafts: load_engine(EngineOptions(draft=named if drafts else "", **common)) for drafts in (False, True)}
    async with trio.open_nursery() as nursery:
        pair = {drafts: await open_batcher(nursery, engine, drafts=drafts) for drafts, engine in engines.items()}
        if chosen.prompt:
            took: dict[bool, list[float]] = {False: [], True: []}
            for prompt in prompts(2 * chosen.rounds + 2, chosen.prompt):
                for drafts in (False, True) if len(took[False]) % 2 else (True, False):
                    took[drafts].append(await first_token(pair[drafts], prompt))
            seconds = {drafts: median(times[1:]) for drafts, times in took.items()}
            print(
                f"first token of {chosen.prompt}: {seconds[False]:.3f} s without, {seconds[True]:.3f} s with",
                flush=True,
            )
        drafter = pair[True].ctx.drafter
        assert drafter is not None
        print(f"a guess takes {drafter.forward_s * 1000:.1f} ms", flush=True)
        fields = {"max_tokens": chosen.tokens, "temperature": 0.0, "ignore_eos": True}
        if chosen.assistant:
            drafter = Known(drafter, (await timed(pair[False].ref, prompts(8, 32), **fields))[2])
        for share in chosen.shares:
            pair[True].ctx.drafter = Spoiled(drafter, share)
            for size in chosen.sequences:
                turns = await take_turns(pair, prompts(8, 32), size, chosen.rounds, **fields)
                print(f"{share:.2f} right, {size} at once: {turns}", flush=True)
        for batcher in pair.values():
            await batcher.ref.stop()


def main() -> None:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=SIZES["vocab_size"], help="a smaller one makes guesses cheaper")
    parser.add_argument("--assistant", action="store_true", help="measure an assistant of Gemma 4")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.8, 0.6, 0.3, 0.0])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 0: measures no prompts")
    parser.add_argument("--keep", type=Path, help="a folder for the model, which is made there if it is missing")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = chosen.keep or Path(made)
        if not list(folder.glob("**/model*.safetensors")):
            folder.mkdir(parents=True, exist_ok=True)
            (write_assisted if chosen.assistant else write)(folder, chosen.vocab)
        trio.run(measure, folder, chosen)


if __name__ == "__main__":
    main()
