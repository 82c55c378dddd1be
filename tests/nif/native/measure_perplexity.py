"""Perplexity of NativeRunner's modes on a text, by default the language reference that Python ships; a program.

python tests/nif/native/measure_perplexity.py --model smollm2 --modes float32 int8 float32/int8 --windows 12
python tests/nif/native/measure_perplexity.py --model model.gguf --text LICENSE

A mode is a dtype or "int8" or "int4"; behind a slash stand the numbers of keys and values.
"""

import argparse
import math
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

from genbatch.nif.models.model import describe_model, load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import Runner

# Loaded separately: the batch of one prompt is the same as when steps are timed.
from measure_steps import prefill_batch  # isort: skip

WINDOW = 512  # tokens that are scored together, each from what precedes it in the window
CHARACTERS = slice(20_000, 110_000)  # about 22,000 tokens of SmolLM2


def window_logits(runner: Runner, window: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[tokens, vocab] of one window as a prompt."""
    plain = prefill_batch(vocab_size, WINDOW)
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    batch = type(plain)(**{**fields, "input_ids": window.numpy(), "logit_rows": np.arange(WINDOW)})
    return torch.as_tensor(runner.forward(batch))


def mean_nll(runner: Runner, tokens: torch.Tensor, vocab_size: int) -> float:
    """Mean negative log-likelihood per token over whole windows."""
    losses = []
    for window in tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW):
        logits = window_logits(runner, window, vocab_size)
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], window[1:])))
    return sum(losses) / len(losses)


def main() -> None:
    """Prints each mode and its ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--modes", nargs="+", default=["bfloat16", "float32", "int8"], help="the first is compared with"
    )
    parser.add_argument("--windows", type=int, default=43, help=f"at most, of {WINDOW} tokens")
    parser.add_argument("--text", type=Path, help="a file in UTF-8")
    options = parser.parse_args()
    if options.text is None:
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[CHARACTERS]
    else:
        text = options.text.read_text(encoding="utf-8")
    base = None
    for mode in options.modes:
        weights, _, kv = mode.partition("/")
        dtype, quantize = ("float32", weights) if weights in ("int8", "int4") else (weights, "none")
        model = describe_model(options.model, dtype=dtype)  # as it is served: a GGUF file in its own blocks
        model = model or load_model(options.model, dtype=dtype, n_gpu_layers=0)
        runner = native_runner(model, quantize=quantize, kv_dtype=kv or None)
        runner.allocate([WINDOW // 16], 16)
        tokens = torch.tensor(model.tokenizer.encode(text))[: options.windows * WINDOW]
        if len(tokens) < WINDOW:
            parser.error(f"the text has {len(tokens)} tokens; a window has {WINDOW}")
        nll = mean_nll(runner, tokens, model.vocab_size)
        runner.close()
        base = nll if base is None else base
        ratio, kept = math.exp(nll - base), runner.bytes_per_block(0, 16) // 16
        print(
            f"{mode:14} nll {nll:.5f}  perplexity {math.exp(nll):.4f}  ratio {ratio:.5f}, KV {kept} bytes a token",
            flush=True,
        )


if __name__ == "__main__":
    main()
