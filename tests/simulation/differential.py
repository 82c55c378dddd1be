"""Random options and requests over small models of 24 families, each request compared with itself alone.

python -m tests.simulation.differential --minutes 30
python -m tests.simulation.differential --family gemma3 --first 4711 --seeds 1
"""

import argparse
import gc
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Runner
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
)
# The simulated model over all kinds of layer groups: a thousand times as many worlds in the same time.
SIMULATED = "history"
MAX_TOLD = 5


def main() -> int:
    """Exit code 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long, unless --seeds says how many")
    parser.add_argument("--family", choices=(*FAMILIES, *NATIVE, SIMULATED), help="only this one")
    parser.add_argument("--first", type=int, help="the first seed; drawn unless given")
    parser.add_argument("--seeds", type=int, help="how many worlds")
    chosen = parser.parse_args()
    logging.disable(logging.ERROR)  # the worlds' schedulers fail on purpose, thousands of times
    first = random.SystemRandom().randrange(10**9) if chosen.first is None else chosen.first
    families = (chosen.family,) if chosen.family else (*FAMILIES, *NATIVE, SIMULATED)
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
        fault = judge(seed, *models[family])
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


def load(family: str, directory: Path) -> tuple[Model, Callable[[], Runner] | None]:
    """A small model of the family, and what makes its runner."""
    if family in NATIVE:
        built = build_native_model(family.removeprefix("native-"), directory, build_tokenizer)
    else:
        built = build_model("llama" if family == SIMULATED else family, directory)
    model = load_model(str(built), dtype="float32", n_gpu_layers=0)
    if family == SIMULATED:
        return model, None
    return model, partial(choose_runner(model, EngineOptions(n_threads=1)), 8)


def judge(seed: int, model: Model, open_runner: Callable[[], Runner] | None) -> str:
    """What is wrong with a seed's world; "" if every promise holds."""
    crowd = Crowd(seed, model, open_runner)
    try:
        crowd.check()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = "".join(traceback.format_exception(error)[-12:])
        return f"seed {seed}: {crowd.memory}, {crowd.options}\n{lines}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
