"""Where `quantize=int8` loses: a model's logits with one kind of linear, or one layer, left exact at a time; a program.

    python tests/nif/native/measure_int8.py --model smollm2 --windows 2

Prints for each the Kullback-Leibler divergence from the exact logits, its 99th percentile and largest over the tokens,
and how often another token is the likeliest.
"""

import argparse
from collections.abc import Callable, Sequence
from pydoc_data import topics
from typing import Any

import torch

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import describe_model
from genbatch.nif.models.weight_source import StoredTensor
from genbatch.nif.native import layer_loader, model_weights
from genbatch.nif.native.library import WEIGHT_F32, WEIGHT_I8, Linear
from genbatch.nif.native.runner import NativeRunner

# Loaded separately: it is a program, too.
from measure_perplexity import CHARACTERS, WINDOW, window_logits  # isort: skip

Chosen = Callable[[str], bool]  # by a tensor's name
LINEARS = {"queries, keys, values": "q_proj", "attention's output": "o_proj", "gate, up": "gate_proj"}
LINEARS |= {"down": "down_proj", "head": "embed_tokens"}


class LeavesExact(layer_loader.LayerLoader):
    """Packs as int8 does, but what was chosen stays as exact as without it."""

    chosen: Chosen = staticmethod(lambda name: False)

    def _pack(self, matrices: Sequence[StoredTensor], biases: Any, **options: Any) -> Linear:
        if (options.get("kind") or self._kind) == WEIGHT_I8 and self.chosen(matrices[0].name):
            options["kind"] = WEIGHT_F32
        return super()._pack(matrices, biases, **options)


def log_probabilities(model: Model, windows: torch.Tensor, mode: str, kv: str | None = None) -> torch.Tensor:
    """[tokens, vocab] of whole windows."""
    runner = NativeRunner(model_weights.ModelWeights(model, mode), kv_dtype=kv)
    runner.allocate([WINDOW // 16], 16)
    found = [window_logits(runner, window, model.vocab_size) for window in windows]
    runner.close()
    return torch.cat(found).log_softmax(-1)


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=2, help=f"of {WINDOW} tokens")
    options = parser.parse_args()
    model = describe_model(options.model, dtype="float32")
    assert model is not None, "a family that the native runner does not know"
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[CHARACTERS]
    windows = torch.tensor(model.tokenizer.encode(text))[: options.windows * WINDOW].view(-1, WINDOW)
    exact = log_probabilities(model, windows, "none")
    layer_loader.LayerLoader = LeavesExact  # type: ignore[misc]

    def report(name: str, chosen: Chosen = lambda name: False, kv: str | None = None) -> None:
        LeavesExact.chosen = staticmethod(chosen)
        found = log_probabilities(model, windows, "int8", kv)
        loss = (exact.exp() * (exact - found)).sum(-1)
        other = 100 * (found.argmax(-1) != exact.argmax(-1)).float().mean()
        spread = f"p99 {loss.quantile(0.99):.4f}, most {loss.max():.3f}"
        print(f"{name:26} {loss.mean():.5f}, {spread}, other token {other:.2f} %", flush=True)

    report("int8")
    report("keys and values exact", kv="float32")
    for name, part in LINEARS.items():
        report(f"{name} exact", lambda tensor, part=part: part in tensor)
    for layer in range(model.config.num_hidden_layers):
        report(f"layer {layer} exact", lambda tensor, layer=layer: f".layers.{layer}." in tensor)


if __name__ == "__main__":
    main()
