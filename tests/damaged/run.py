"""Runs drawn models in child processes with limits, and collects those that end in another way than they may.

A model is refused by a typed error, or its text is that of transformers (of a GGUF file that of torch). A child that
dies or takes too long is another fault; the next child goes on behind its model.
"""

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from tests.damaged.cases import Good
from tests.lora_adapters import make_adapter
from tests.nif.models.gguf_files import write_llama

PER_MODEL_S = 60.0  # on a busy machine; one takes half a second


def make_good(tiny_models: ModuleType, folder: Path) -> Good:
    """Writes the files that all drawn ones are made of."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    directory = folder / "model"
    LlamaForCausalLM(LlamaConfig(**{**tiny_models._GROUPED, "head_dim": 16})).save_pretrained(directory)
    tiny_models.build_tokenizer(directory)
    write_llama(folder / "model.gguf", "Q8_0")
    return Good(directory, folder / "model.gguf", make_adapter(directory, folder / "adapter", ["q_proj", "down_proj"]))


def run(folder: Path, scratch: Path, first: int, count: int, until: float | None = None) -> tuple[int, list[str]]:
    """Runs the seeds from `first` on.

    Args:
        folder: what `make_good` has written.
        until: when to stop, by time.monotonic(); None: after `count`.

    Returns:
        How many models were refused, and what was wrong with others.
    """
    refused, wrong, seed = 0, [], first
    while seed < first + count and (until is None or time.monotonic() < until):
        lines, end = _child(folder, scratch / f"from-{seed}", seed, first + count - seed, until)
        for line in lines:
            word, number, *rest = line.split(" ", 2)
            seed = int(number) + 1
            if word == "begin":
                last = line
            elif rest == ["refused"]:
                refused += 1
            elif rest != ["same"]:
                wrong.append(f"seed {number}: {rest[0]}")
        if lines and lines[-1].startswith("begin") and end != "stopped":
            wrong.append(f"seed {last.split()[1]}: the process {end}")
        elif not lines:
            wrong.append(f"seed {seed}: the process {end} before it began")
            break
    return refused, wrong


def _child(folder: Path, scratch: Path, first: int, count: int, until: float | None) -> tuple[list[str], str]:
    """The lines of one child, and how it ended."""
    command = [sys.executable, "-m", "tests.damaged.child", str(folder), str(scratch), str(first), str(count)]
    environment = {**os.environ, "RUST_BACKTRACE": "0", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    lines: list[str] = []
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector, child:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if until is not None and time.monotonic() > until:
                child.kill()
                return lines, "stopped"
            if not selector.select(PER_MODEL_S):
                child.kill()
                return lines, f"took more than {PER_MODEL_S:g} seconds"
            line = child.stdout.readline()
            if not line:
                return lines, f"ended with {child.wait()}"
            lines.append(line.strip())
