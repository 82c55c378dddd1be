"""Loads drawn models one after another in a process of its own: python -m tests.damaged.child GOOD SCRATCH FIRST COUNT

Writes a line "begin SEED" before each and "end SEED OUTCOME" after it. An outcome is "refused", "same", or what was
wrong. The process has a bound on its memory; its parent bounds its time.
"""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from genbatch.nif.context.engine import load_adapters, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import NativeError
from genbatch.nif.models.model_source import quiet_transformers
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from genbatch.nif.text import tokenizer_process
from genbatch.nif.text.detokenizer import TokenizerError
from tests.damaged.cases import LONG, Case, Good, damage

MEMORY = 3 << 30  # bytes beyond what the process has once it has loaded a good model
PROMPT, NUM_TOKENS = "The capital of France is", 4


def generated(path: Path, runner: str, adapter: Path | None = None) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, and what follows greedily."""
    engine = load_engine(EngineOptions(model_path=str(path), dtype="float32", runner=runner, n_ctx=64))
    if adapter is not None:
        load_adapters(engine, [f"x={adapter}"])
    # What a request with min_tokens makes of the ids that end a text.
    SamplerState(SamplingParams(seed=0, suppress=engine.model.eos_token_ids, min_tokens=1), ())
    prompt = engine.model.tokenizer.encode(PROMPT)[:32]
    for text in LONG:
        with contextlib.suppress(TokenizerError):  # of this text alone
            engine.model.tokenizer.encode(text)
    if not prompt:
        return [], []
    context = engine.open_context(n_parallel=1, n_held=0, n_batch=64)
    try:
        tokens, done = list(prompt), 0
        for _ in range(NUM_TOKENS):
            if len(tokens) > engine.model.max_position:
                break
            (logits,) = context.eval([Entry(0, tokens[done:], done)])
            done = len(tokens)
            if not torch.as_tensor(logits).isfinite().all():
                break  # the request ends with an error
            tokens.append(int(logits[-1].argmax()))
        engine.model.tokenizer.decode(tokens)
        return prompt, tokens[len(prompt) :]
    finally:
        context.close()


def by_transformers(path: Path, prompt: list[int], count: int) -> list[int] | None:
    """The same by transformers; None where it refuses."""
    try:
        with quiet_transformers():
            hf: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(count):
                    tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    except Exception:
        return None
    return tokens[len(prompt) :]


def outcome(case: Case) -> str:
    try:
        prompt, tokens = generated(case.path, "auto", case.adapter)
    except NativeError as refused:
        return "refused" if "\n" not in str(refused) else f"a refusal of several lines: {refused!r}"
    except BaseException as fault:
        return f"{case.what}: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
    if case.path.is_dir():
        wanted = by_transformers(case.path, prompt, len(tokens))
    else:
        with contextlib.suppress(NativeError):
            wanted = generated(case.path, "torch")[1]
            return "same" if wanted == tokens else f"{case.what}: {tokens}, in torch {wanted}"
        wanted = None
    return "same" if wanted in (None, tokens) else f"{case.what}: {tokens}, by transformers {wanted}"


def main(good: Good, scratch: Path, first: int, count: int) -> None:
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print of what they load
    transformers_logging.set_verbosity_error()
    tokenizer_process.LOAD_S, tokenizer_process.ENCODE_S = 2.0, 0.5
    generated(good.directory, "auto")
    generated(good.gguf, "torch")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))
    for seed in range(first, first + count):
        print("begin", seed, file=report)
        place = scratch / str(seed)
        place.mkdir(parents=True)
        print("end", seed, outcome(damage(seed, good, place)), file=report)
        shutil.rmtree(place)


if __name__ == "__main__":
    here = Path(sys.argv[1])
    main(
        Good(here / "model", here / "model.gguf", here / "adapter"),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
