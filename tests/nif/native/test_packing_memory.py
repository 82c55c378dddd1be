"""What packing takes beside the packed model, measured as the system counts it."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

HIDDEN, INNER, LAYERS, HEADS = 1024, 4096, 8, 8
VOCAB = INNER
MIB = 1 << 20
# Of each kind, bytes of a weight as it is packed; the embedding keeps the 2 of its file, the head takes 8 bits.
PACKED = {"none": 2.0, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
KEPT = 4 * (3 * HIDDEN * HIDDEN + HIDDEN * INNER)  # weights to which int4 leaves 8 bits, in four of the eight layers
BESIDE = 130  # MiB at most: a stretch of floats and its merging, the pages of one layer, what the allocator keeps

# Each kind is packed in a forked child, since importing torch again takes 3 s. A child's peak includes the memory of
# its parent.
PROGRAM = """
import os, re, sys
from pathlib import Path
from genbatch.nif.models.model import describe_model
from genbatch.nif.native.library import native_library
from genbatch.nif.native.model_weights import ModelWeights

def memory(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

native_library()
model = describe_model(sys.argv[1], dtype="float32")
for quantize in sys.argv[2:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    before = memory("VmRSS")
    weights = ModelWeights(model, quantize)
    print(memory("VmHWM") - before, memory("VmRSS") - before, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tiny_models: ModuleType) -> Path:
    """A Llama of 138 million random weights in bfloat16: 276 MB."""
    made = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=True,
    )
    config.save_pretrained(made)
    tiny_models.build_tokenizer(made)
    square, tall = torch.randn(HIDDEN, HIDDEN).bfloat16(), torch.randn(INNER, HIDDEN).bfloat16()
    tensors = {"model.embed_tokens.weight": tall.clone(), "model.norm.weight": square[0].clone()}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        tensors |= {f"{start}self_attn.{name}_proj.weight": square.clone() for name in "qkvo"}
        tensors |= {f"{start}mlp.{name}_proj.weight": tall.clone() for name in ("gate", "up")}
        tensors[f"{start}mlp.down_proj.weight"] = tall.T.contiguous()
        tensors |= {f"{start}{name}_layernorm.weight": square[0].clone() for name in ("input", "post_attention")}
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def measured(directory: Path) -> dict[str, tuple[float, float]]:
    """By kind, the MiB at the peak and at the end."""
    command = [sys.executable, "-c", PROGRAM, str(directory), *PACKED]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    numbers = [[float(number) for number in line.split()] for line in lines]
    return {quantize: (peak, held) for quantize, (peak, held) in zip(PACKED, numbers, strict=True)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to ask")
@pytest.mark.parametrize("quantize", PACKED)
def test_packing_holds_the_packed_model_and_no_second_copy(
    measured: dict[str, tuple[float, float]], quantize: str
) -> None:
    layers = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    head = VOCAB * HIDDEN
    kept = KEPT * (PACKED["int8"] - PACKED["int4"]) if quantize == "int4" else 0
    packed = (layers * PACKED[quantize] + kept + head * (2 + (2 if quantize == "none" else 1.1))) / MIB
    peak, held = measured[quantize]
    assert packed * 0.9 < held < packed + BESIDE / 2
    assert peak < packed + BESIDE
