"""Decoding with and without a draft model, by the share of drafted tokens that are right.

    python -m tests.benchmarks.draft_model --shape 3072,28,8192,24,8,128 --draft-layers 2 --quantize int8

Makes two models of random weights: a large one, and the large one's first layers alone. The large model's other layers
add nothing to the residual, so both draw the same tokens, and every draft is right. A drafted token is then replaced at
random, so that the given share stays right. So the costs are those of real models, and the share is chosen.

Two Batchers over one loaded model take turns, A-B-B-A, with the same prompts; answers are compared token by token. A
ratio is the time without drafts divided by the time with drafts, of each round's pair.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import trio

from genbatch.nif.context.drafters import Drafted, Drafter
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.model_source import no_progress, resolve_model
from tests.benchmarks.prompt_lookup import CHAT, open_batcher, take_turns


class Spoiled:
    """A drafter of which a share of the tokens stays right; the rest of a draft after a wrong token is kept.

    Args:
        drafter: drafts tokens that are always right.
        share: the probability that a token stays right.
    """

    def __init__(self, drafter: Drafter, share: float) -> None:
        self._drafter = drafter
        self._share = share
        self._random = random.Random(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        drafts = self._drafter.propose(sequences, lengths)
        return [[token if self._random.random() < self._share else token ^ 1 for token in draft] for draft in drafts]


def write(path: Path, shape: Sequence[int], num_layers: int, num_silent: int) -> None:
    """Write a Llama in Q8_0 with the default model's tokenizer.

    Args:
        shape: hidden, layers, intermediate, heads, KV heads, elements of a head.
        num_layers: the number of layers to write.
        num_silent: how many of them, the last ones, add nothing to the residual.
    """
    hidden, _, intermediate, heads, kv_heads, head_dim = shape
    source = gguf.GGUFReader(str(resolve_model("smollm2", no_progress).path))
    writer = gguf.GGUFWriter(path, "llama")
    changed = {
        "llama.block_count": num_layers,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": intermediate,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.dimension_count": head_dim,
    }
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        of_items = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], of_items)
    for kind in ("key_length", "value_length"):
        writer.add_key_value(f"llama.attention.{kind}", head_dim, gguf.GGUFValueType.UINT32)
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, scale: float) -> None:
        drawn = rng.standard_normal((rows, columns), dtype=np.float32) * scale
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(drawn, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    matrix("token_embd.weight", 49152, hidden, 0.02)
    norm("output_norm.weight")
    for layer in range(num_layers):
        block, heard = f"blk.{layer}.", float(layer < num_layers - num_silent)
        norm(f"{block}attn_norm.weight")
        norm(f"{block}ffn_norm.weight")
        matrix(f"{block}attn_q.weight", heads * head_dim, hidden, hidden**-0.5)
        matrix(f"{block}attn_k.weight", kv_heads * head_dim, hidden, hidden**-0.5)
        matrix(f"{block}attn_v.weight", kv_heads * head_dim, hidden, hidden**-0.5)
        matrix(f"{block}attn_output.weight", hidden, heads * head_dim, heard * (heads * head_dim) ** -0.5)
        matrix(f"{block}ffn_gate.weight", intermediate, hidden, hidden**-0.5)
        matrix(f"{block}ffn_up.weight", intermediate, hidden, hidden**-0.5)
        matrix(f"{block}ffn_down.weight", hidden, intermediate, heard * intermediate**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def measure(large: Path, small: Path, chosen: argparse.Namespace) -> None:
    """Print a line for each share and each number of sequences."""
    engine = load_engine(EngineOptions(model_path=str(large), draft=str(small), quantize=chosen.quantize, n_ctx=4096))
    draft, options = engine.draft, engine.options
    async with trio.open_nursery() as nursery:
        pair = {}
        for drafts in (False, True):
            engine.draft = draft if drafts else None
            engine.options = options if drafts else replace(options, draft="")
            pair[drafts] = await open_batcher(nursery, engine, drafts=drafts)
        drafter = pair[True].ctx.drafter
        assert drafter is not None
        fields = {"max_tokens": chosen.tokens, "temperature": 0.0, "ignore_eos": True}
        for share in chosen.shares:
            pair[True].ctx.drafter = Spoiled(drafter, share)
            for size in chosen.sequences:
                turns = await take_turns(pair, CHAT, size, chosen.rounds, **fields)
                print(f"{share:.2f} right, {size} at once: {turns}", flush=True)
        for batcher in pair.values():
            await batcher.ref.stop()


def main() -> None:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,16,8192,32,8,64", help="hidden, layers, intermediate, heads, KV, head")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.8, 0.6, 0.3])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--keep", type=Path, help="a folder with the models, which are made there if they are missing")
    chosen = parser.parse_args()
    shape = [int(size) for size in chosen.shape.split(",")]
    with tempfile.TemporaryDirectory() as made:
        folder = chosen.keep or Path(made)
        large, small = folder / "large.gguf", folder / "small.gguf"
        if not small.exists():
            write(large, shape, shape[1], shape[1] - chosen.draft_layers)
            write(small, shape, chosen.draft_layers, 0)
        trio.run(measure, large, small, chosen)


if __name__ == "__main__":
    main()
