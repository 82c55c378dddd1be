"""Random options and requests over small models of 27 families, each request compared with itself alone.

python -m tests.simulation.differential --minutes 30
python -m tests.simulation.differential --family gemma3 --first 4711 --seeds 1
"""

import argparse
import gc
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from genbatch.actors.batcher.drafting import DraftCosts
from genbatch.nif.context.context import Context
from genbatch.nif.context.draft_model import NUM_SLOTS, DraftModel
from genbatch.nif.context.drafters import Drafter
from genbatch.nif.context.engine import choose_runner, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.runner import Runner
from tests.nif import assistant_models
from tests.nif.mtp_models import random_pair, right_pair
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_model, build_tokenizer
from tests.simulation.crowd import Crowd

FAMILIES = (
    *("llama", "mistral", "gemma3", "qwen3", "gpt_neox", "qwen3_5", "granite_hybrid"),
    *("falcon_h1", "mamba2", "nemotron_h", "lfm2_moe", "olmo_hybrid", "kimi_linear"),
)
# Those that the C kernels run: the others' heads are too small for them.
NATIVE = (
    *("native-llama_odd", "native-gemma3", "native-qwen3_moe"),
    *("native-lfm2", "native-qwen3_5", "native-granite_hybrid"),
    *("native-falcon_h1", "native-mamba2", "native-nemotron_h", "native-lfm2_moe", "native-olmo_hybrid"),
    *("native-gemma3n", "native-gemma4", "native-deepseek3"),
)
# With a drafter in the crowd: a model's own multi-token head, or a draft model with other weights or the same.
DRAFTED = (
    *("head-qwen3_5", "head-qwen3_5_moe", "head-qwen3_next", "head-right"),
    *("assisted-gemma4", "assisted-gemma4_unified", "assisted-gemma4_experts", "assisted-right"),
    *("drafted-llama_odd", "copied-llama_odd"),
)
# The simulated model over all kinds of layer groups: a thousand times as many worlds in the same time.
SIMULATED = "history"
MAX_TOLD = 5


def main() -> int:
    """Exit code 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long, unless --seeds says how many")
    parser.add_argument("--family", choices=(*FAMILIES, *NATIVE, *DRAFTED, SIMULATED), help="only this one")
    parser.add_argument("--first", type=int, help="the first seed; drawn unless given")
    parser.add_argument("--seeds", type=int, help="how many worlds")
    chosen = parser.parse_args()
    logging.disable(logging.ERROR)  # the worlds' schedulers fail on purpose, thousands of times
    first = random.SystemRandom().randrange(10**9) if chosen.first is None else chosen.first
    families = (chosen.family,) if chosen.family else (*FAMILIES, *NATIVE, *DRAFTED, SIMULATED)
    ends = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory() as directory:
        models = {family: load(family, Path(directory) / family) for family in families}
    gc.collect()
    gc.freeze()
    done, failed = Counter[str](), 0
    seed = first
    while (time.monotonic() < ends) if chosen.seeds is None else seed < first + chosen.seeds:
        family = families[seed % len(families)]
        done[family] += 1
        fault = judge(seed, models[family])
        if fault:
            failed += 1
            print(
                f"{fault}\nreplay: python -m tests.simulation.differential --family {family} --first {seed} --seeds 1"
            )
            if failed >= MAX_TOLD:
                break
        seed += 1
    worlds = ", ".join(f"{family} {count}" for family, count in sorted(done.items()))
    print(f"{done.total()} worlds from seed {first} on ({worlds}), {failed} failed")
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class Served:
    """A small model, and what makes a Batcher's runners and drafter."""

    model: Model
    open_runner: Callable[[], Runner] | None = None
    open_plain: Callable[[], Runner] | None = None
    open_drafter: Callable[[], Drafter] | None = None


def load(family: str, directory: Path) -> Served:
    """A small model of the family."""
    kind, _, name = family.partition("-")
    if kind == "head":
        pair = right_pair(directory) if name == "right" else random_pair(name, directory)
        model = describe_model(str(pair.path), dtype="float32")
        assert model is not None
        heads = choose_runner(model, EngineOptions(n_threads=1, draft="self"))
        return Served(model, partial(heads, 8, 512), partial(choose_runner(model, EngineOptions(n_threads=1)), 8, 512))
    if kind == "assisted":
        assisted = (
            assistant_models.right_pair(directory) if name == "right" else assistant_models.random_pair(name, directory)
        )
        options = EngineOptions(model_path=str(assisted.path), dtype="float32", n_gpu_layers=0, n_threads=1)
        engine = load_engine(replace(options, draft=str(assisted.draft)))
        plain = load_engine(options)
        return Served(engine.model, partial(engine._new_runner, 8, 512), partial(plain._new_runner, 8, 512))
    if kind in ("drafted", "copied"):
        model = load_model(str(build_native_model(name, directory, build_tokenizer)), dtype="float32", n_gpu_layers=0)
        draft = load_model(str(_draft_of(directory, noise=0.02 if kind == "drafted" else 0.0)), dtype="float32")
        open_plain = partial(choose_runner(model, EngineOptions(n_threads=1)), 8, 512)
        open_guesser = partial(choose_runner(draft, EngineOptions(n_threads=1)), NUM_SLOTS, 128)

        def open_drafter() -> DraftModel:
            context = Context(draft, open_guesser(), n_parallel=NUM_SLOTS, n_batch=128, n_ctx=4096)
            return DraftModel(context, model.vocab_size)

        return Served(model, open_plain, open_drafter=open_drafter)
    if family in NATIVE:
        built = build_native_model(family.removeprefix("native-"), directory, build_tokenizer)
    else:
        built = build_model("llama" if family == SIMULATED else family, directory)
    model = load_model(str(built), dtype="float32", n_gpu_layers=0)
    if family == SIMULATED:
        return Served(model)
    return Served(model, partial(choose_runner(model, EngineOptions(n_threads=1)), 8, 512))


def _draft_of(directory: Path, noise: float) -> Path:
    """Copy a model and add noise to its weights, a share of their spread, so that some of its guesses are wrong."""
    draft = directory.with_name(f"{directory.name}-draft")
    shutil.copytree(directory, draft)
    weights = load_file(draft / "model.safetensors")
    torch.manual_seed(0)
    for weight in weights.values():
        weight += noise * weight.std() * torch.randn_like(weight)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


def judge(seed: int, served: Served) -> str:
    """What is wrong with a seed's world; "" if every promise holds."""
    crowd = Crowd(seed, served.model, served.open_runner, served.open_plain, served.open_drafter)
    has_drafter = served.open_plain is not None or served.open_drafter is not None
    # A guess costs little: the small models' own times would end the drafts.
    price = mock.patch.object(DraftCosts, "price", lambda *_: 0.05) if has_drafter else nullcontext()
    try:
        with price:
            crowd.check()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = "".join(traceback.format_exception(error)[-12:])
        return f"seed {seed}: {crowd.memory}, {crowd.options}\n{lines}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
