"""Prompts drawn by seed, each with the prefix cache and without it: the logits are equal to the bit.

python -m tests.nif.native.cuts --cuts 10000
python -m tests.nif.native.cuts --family qwen3_5 --first 4711 --cuts 1

A world is one family's model in small pools, which evict. Its prompts begin with texts that others began with, cut
anywhere, for two tenants and with an adapter or without it. Each is evaluated after its hit, in chunks of a drawn size,
and goes on: it decodes, takes tokens back, moves to another slot as bytes or is copied there. After each of these the
logits are compared with those of its tokens alone, in one step, in a context that reuses nothing.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from transformers.utils.logging import disable_progress_bar

from genbatch.nif.context.context import Context
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import Entry, Logits
from tests.lora_adapters import ALL, make_adapter
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer

BLOCK = 8
CUTS_IN_WORLD = 16
ATTENTION = ("q_proj", "k_proj", "v_proj")
# What an adapter of the family adapts; None: it has none here.
FAMILIES: dict[str, Sequence[str] | None] = {
    "llama": ALL,
    "mistral": ALL,  # windows
    "gemma3": ALL,  # windows and full attention
    "gpt_oss": None,  # the same with sinks and experts
    "lfm2": ATTENTION,  # short convolutions
    "lfm2_moe": None,
    "lfm3": ATTENTION,  # convolutions, windows and full attention, with a gate for each head
    "qwen3_5": ALL,  # states and full attention
    "qwen3_next": None,
    "bamba": None,
    "granite_hybrid": ATTENTION,
    "falcon_h1": ATTENTION,  # both in one layer
    "nemotron_h": None,
    "mamba2": None,  # states alone
    "olmo_hybrid": None,
    "deepseek2": None,  # latents in place of keys and values
    "deepseek3": None,
    "gemma4": ATTENTION,  # layers that share keys and values
}
# Kinds of weights, and of keys and values; None: the weights' own.
KINDS = (("none", None), ("none", None), ("int8", None), ("none", "int8"))
Kind: TypeAlias = "tuple[str, str | None]"
TENANTS = ("one", "one", "one", "other")


@dataclass(slots=True)
class Family:
    """One family's model and its adapter.

    Args:
        directory: where both are written.
    """

    name: str
    directory: Path
    model: Model = field(init=False)
    adapter: Path | None = field(init=False, default=None)
    _plain: dict[Kind, Context] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        base = build_native_model(self.name, self.directory / "model", build_tokenizer)
        self.model = load_model(str(base), dtype="float32", n_gpu_layers=0)
        targets = FAMILIES[self.name]
        if targets is not None:
            self.adapter = make_adapter(base, self.directory / "adapter", targets)

    def open_context(self, kind: Kind, *, shares: bool, **memory: object) -> tuple[Context, int]:
        """A context, and the handle of its adapter; 0 without one."""
        quantize, kv_dtype = kind
        runner = native_runner(self.model, quantize=quantize, kv_dtype=kv_dtype, n_threads=1)
        context = Context(self.model, runner, block_size=BLOCK, allow_block_sharing=shares, **memory)  # type: ignore[arg-type]
        if self.adapter is None:
            return context, 0
        adapter = context.adapters.read("a", self.adapter)
        context.prepare_adapter(adapter)
        context.add_adapter(adapter)
        return context, adapter.handle

    def plain(self, kind: Kind, tokens: Sequence[int], adapted: bool) -> npt.NDArray[np.float32]:
        """The last token's logits, evaluated in one step by a context that reuses nothing."""
        if kind not in self._plain:
            self._plain[kind], _ = self.open_context(kind, shares=False, n_ctx=256, n_parallel=1, n_batch=256)
        context = self._plain[kind]
        [logits] = context.eval([Entry(0, tokens, 0, Logits.LAST, self._handle(context) if adapted else 0)])
        context.seq_rm(0)
        return logits[-1]

    def _handle(self, context: Context) -> int:
        return context.adapters["a"].handle

    def close(self) -> None:
        for context in self._plain.values():
            context.close()


class World:
    """One context, and what a seed does with it."""

    def __init__(self, seed: int, family: Family) -> None:
        self._rng = rng = random.Random(seed)
        self._family = family
        self._kind = rng.choice(KINDS)
        blocks = [rng.randint(20, 60) for _ in family.model.groups]
        self._context, self._handle = family.open_context(
            self._kind, shares=True, num_blocks=blocks, n_ctx=min(blocks) * BLOCK, n_parallel=2
        )
        self._stems = [rng.choices(range(3, 320), k=90) for _ in range(2)]
        self.num_compared = self.num_reused = 0

    def run(self) -> None:
        """Raises AssertionError where a bit differs."""
        with closing(self._context) as context:
            for _ in range(CUTS_IN_WORLD):
                self._cut()
                context.kv.check_integrity()
            for slot in range(2):
                context.seq_rm(slot)
            assert context.kv.counts().used == 0

    def _cut(self) -> None:
        rng, context = self._rng, self._context
        stem = rng.choice(self._stems)
        prompt = stem[: rng.randint(1, len(stem))] + rng.choices(range(3, 320), k=rng.randint(1, 30))
        adapted, tenant, slot = bool(self._handle) and rng.random() < 0.3, rng.choice(TENANTS), rng.randrange(2)
        adapter = context.adapters["a"] if adapted else None
        key = prefix_key(tenant, adapter.digest if adapter is not None else "")
        context.seq_rm(slot)
        if rng.random() < 0.5:
            context.seq_rm(1 - slot)
        done = context.attach_prefix(slot, prompt, key)
        self.num_reused += done
        chunk = rng.choice((1, 3, 13, 40))
        tokens = prompt[:done]
        while len(tokens) < len(prompt):
            self._evaluate(slot, tokens, prompt[len(tokens) : len(tokens) + chunk], adapted)
        for _ in range(rng.randint(0, 4)):
            match rng.randrange(4):
                case 0:  # a draft that is refused: tokens are taken back as far as the groups allow
                    least = max(context.kv.shortest_prefix(slot), len(tokens) - 3, 1)
                    if least < len(tokens):
                        context.seq_rm(slot, least)
                        del tokens[least:]
                case 1:
                    context.seq_rm(1 - slot)
                    context.seq_cp(slot, 1 - slot)
                    slot = 1 - slot
                case 2:
                    saved = context.seq_save(slot, adapter)
                    context.seq_rm(slot)
                    context.seq_rm(1 - slot)
                    slot = 1 - slot
                    context.seq_load(slot, saved, key, adapter)
                case _:
                    pass
            self._evaluate(slot, tokens, rng.choices(range(3, 320), k=rng.choice((1, 1, 1, 5))), adapted)

    def _evaluate(self, slot: int, tokens: list[int], more: list[int], adapted: bool) -> None:
        """Evaluate more tokens of a slot, and compare the last logits with a run of all its tokens alone."""
        entry = Entry(slot, more, len(tokens), Logits.LAST, self._handle if adapted else 0)
        try:
            [logits] = self._context.eval([entry])
        except OutOfBlocks:  # the other slot holds them
            self._context.seq_rm(1 - slot)
            [logits] = self._context.eval([entry])
        tokens += more
        assert np.array_equal(logits[-1], self._family.plain(self._kind, tokens, adapted)), f"after {len(tokens)}"
        self.num_compared += 1


def judge(seed: int, family: Family) -> World:
    """Runs a seed's world; AssertionError says how to run it again."""
    world = World(seed, family)
    try:
        world.run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        again = f"python -m tests.nif.native.cuts --family {family.name} --first {seed} --cuts 1"
        raise AssertionError(f"{family.name}: {again}") from error
    return world


def families_in(directory: Path, names: Sequence[str]) -> Callable[[int], Family]:
    """Says which family a seed is about, and makes it at its first use."""
    made: dict[str, Family] = {}

    def family_of(seed: int) -> Family:
        name = names[seed % len(names)]
        if name not in made:
            made[name] = Family(name, directory / name)
        return made[name]

    return family_of


def main() -> int:
    """Exit code 1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=10_000, help="how many prompts are drawn")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--first", type=int, help="the first seed; drawn unless given")
    chosen = parser.parse_args()
    disable_progress_bar()
    seed = first = random.SystemRandom().randrange(10**9) if chosen.first is None else chosen.first
    begun, done, compared, reused = time.perf_counter(), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        family_of = families_in(Path(directory), [chosen.family] if chosen.family else list(FAMILIES))
        while done.total() < chosen.cuts:
            family = family_of(seed)
            try:
                world = judge(seed, family)
            except AssertionError as error:
                print(f"{error}: {error.__cause__!r}")
                return 1
            done[family.name] += CUTS_IN_WORLD
            compared, reused, seed = compared + world.num_compared, reused + world.num_reused, seed + 1
    counts = ", ".join(f"{name} {count}" for name, count in sorted(done.items()))
    seconds = time.perf_counter() - begun
    print(f"{done.total()} cuts from seed {first} on ({counts}): {compared} logits compared, {reused} tokens reused,")
    print(f"0 differ; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
