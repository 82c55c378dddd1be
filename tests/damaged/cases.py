"""Damaged and forged model files, drawn by seed: a good file, and one to three changes of a kind.

    case = damage(seed, Good(...), scratch)      # case.path is the file or the directory, case.adapter a LoRA or None

Changes put nasty values in the place of values (numbers without an end, negative ones, other types, deep nests), take
keys away, rename tensors, and flip bytes of headers.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.nif.models.gguf_files import write_llama

NASTY: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**12, 10**30, 10**400, -(2**63)),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e39, -1e39, 1e308, float("inf"), float("-inf"), float("nan")),
    *(True, False, None, "", "x", "a" * 5000, "\0", "../x", "(.*.*)*z", "(", "gelu", "default", "gptq"),
    *([], [[]], [0], [1.5], [2**63], ["x"], [None], {}, {"a": 1}, {"rope_type": "yarn"}, {"factor": 0}),
)
_BYTES = (b"\xff" * 8, bytes(8), b"\x01", b"\xff" * 4, b"\0\0\0\x80", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\x7f")


# Texts that are hard to cut up.
LONG = ("x" * 20_000 + " y", "x" * 3_000 + " y", " " * 20_000 + "x", "xy" * 10_000)


@dataclass(frozen=True, slots=True)
class Good:
    """Files that load.

    Args:
        directory: a Llama with safetensors.
        gguf: a GGUF file of a Llama.
        adapter: a LoRA adapter of the directory's model.
    """

    directory: Path
    gguf: Path
    adapter: Path


@dataclass(frozen=True, slots=True)
class Case:
    """One drawn model.

    Args:
        what: the kind of change, for a report.
        path: what is loaded.
        adapter: what is loaded on top; None: nothing.
    """

    what: str
    path: Path
    adapter: Path | None = None


def damage(seed: int, good: Good, scratch: Path) -> Case:
    """Writes the model of a seed into the empty folder `scratch`."""
    draw = random.Random(seed)
    what = draw.choice(sorted(_KINDS))
    return _KINDS[what](draw, what, good, scratch)


def _fields(name: str) -> Callable[[random.Random, str, Good, Path], Case]:
    """Changes of a JSON file of the directory."""

    def change(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
        directory = Path(shutil.copytree(good.directory, scratch / "model"))
        path = directory / name
        fields = json.loads(path.read_text()) if path.is_file() else {"bits": 4, "group_size": 32, "desc_act": False}
        if "eos_token_id" in fields and draw.random() < 0.3:  # of many fields it is the one that every request uses
            fields["eos_token_id"] = draw.choice(NASTY)
            path.write_text(json.dumps(fields))
        else:
            path.write_text(spoiled_json(draw, fields))
        return Case(what, directory)

    return change


# Pieces of expressions. Repeats of repeats, and repeats side by side, may take any time.
_PIECES = ("x", ".", "[a-y]", r"\w", r"\s", " ?", "(?:x|xx)", "(?=z)", r"\p{L}", "|", "y", "$", "(?i:X)", "(")
_REPEATS = ("", "", "*", "+", "?", "{2,}", "{1,9}")


def _expressions(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
    """A tokenizer with an expression in its normalizer, its pre-tokenizer or its decoder, and a long token."""
    directory = Path(shutil.copytree(good.directory, scratch / "model"))
    path = directory / "tokenizer.json"
    fields = json.loads(path.read_text())
    expression = ""
    for _ in range(draw.randint(1, 6)):
        expression += draw.choice(_PIECES) + draw.choice(_REPEATS)
        if draw.random() < 0.3:
            expression = f"({expression})" + draw.choice(_REPEATS)
    part = draw.choice(("normalizer", "pre_tokenizer", "pre_tokenizer", "decoder"))
    step: dict[str, Any] = {"type": "Replace", "pattern": {"Regex": expression}, "content": "x"}
    if part == "pre_tokenizer":
        behaviours = ("Isolated", "Removed", "MergedWithNext", "Contiguous")
        step = {"type": "Split", "pattern": {"Regex": expression}, "behavior": draw.choice(behaviours), "invert": False}
    fields[part] = {"type": "Sequence", f"{part}s".replace("pre_tokenizer", "pretokenizer"): [step, fields[part]]}
    if part != "pre_tokenizer" or fields["pre_tokenizer"] is None:
        fields[part] = step
    if draw.random() < 0.3:
        token = {"id": len(fields["model"]["vocab"]), "content": draw.choice(LONG), "special": False}
        fields["added_tokens"].append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
        fields["added_tokens"][-1]["normalized"] = True
    path.write_text(json.dumps(fields))
    return Case(what, directory)


def _safetensors(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
    directory = Path(shutil.copytree(good.directory, scratch / "model"))
    path = directory / "model.safetensors"
    path.write_bytes(spoiled_safetensors(draw, path.read_bytes()))
    return Case(what, directory)


def _adapter(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
    adapter = Path(shutil.copytree(good.adapter, scratch / "adapter"))
    path = adapter / "adapter_model.safetensors"
    if draw.random() < 0.7:
        config = adapter / "adapter_config.json"
        config.write_text(spoiled_json(draw, json.loads(config.read_text())))
    else:
        path.write_bytes(spoiled_safetensors(draw, path.read_bytes()))
    return Case(what, good.directory, adapter)


def _gguf(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
    raw = bytearray(good.gguf.read_bytes())
    for _ in range(draw.randint(1, 3)):
        # Most numbers of a header lie right behind a name, and names end in letters.
        at = draw.randrange(len(raw) if draw.random() < 0.2 else 2600)
        if draw.random() < 0.6:
            while at < len(raw) - 20 and not (chr(raw[at]).isalpha() and raw[at + 1] < 32):
                at += 1
            at += draw.choice((1, 5, 9, 13, 17))
        value = draw.choice(_BYTES)
        raw[at : at + len(value)] = value
    path = scratch / "model.gguf"
    path.write_bytes(raw)
    return Case(what, path)


_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_TYPES = gguf.GGUFValueType
_KEYS: dict[str, tuple[str, ...]] = {
    "u": (
        *("attention.key_length", "attention.sliding_window", "nextn_predict_layers", "pooling_type", "vocab_size"),
        *("expert_count", "expert_used_count", "rope.scaling.original_context_length", "attention.value_length"),
    ),
    "f": ("rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear"),
    "s": ("rope.scaling.type", "attention.layer_norm_epsilon"),
    "t": ("eos_token_id", "eot_token_id", "bos_token_id", "padding_token_id", "unknown_token_id", "add_bos_token"),
}


_MORE_TENSORS = ("blk.0.attn_q.bias", "rope_freqs.weight", "output.weight", "blk.1.attn_norm.weight", "v.blk.0.x")


def _gguf_values(draw: random.Random, what: str, good: Good, scratch: Path) -> Case:
    """A whole file with other values, and tensors that no Llama has."""
    del good
    keys: dict[str, tuple[Any, gguf.GGUFValueType]] = {}
    changed: dict[str, Any] = {}
    for _ in range(draw.randint(1, 2)):
        kind = draw.choice("uufst")
        name = draw.choice(_KEYS[kind])
        full = f"tokenizer.ggml.{name}" if kind == "t" else f"llama.{name}"
        number = draw.choice([value for value in NASTY if type(value) is int and 0 <= value < 2**64])
        values: tuple[tuple[Any, gguf.GGUFValueType], ...] = (
            (number, _TYPES.UINT64),
            (-1, _TYPES.INT32),
            (draw.choice([value for value in NASTY if type(value) is float]), _TYPES.FLOAT64),
            (draw.choice(("yarn", "linear", "longrope", "none", "x", "")), _TYPES.STRING),
            (True, _TYPES.BOOL),
            ([1, 2], _TYPES.ARRAY),
        )
        likely = {"u": values[0], "t": values[0], "f": values[2], "s": values[3]}[kind]
        keys[full] = likely if draw.random() < 0.7 else draw.choice(values)
    if draw.random() < 0.4:
        changed[draw.choice(_SIZES)] = draw.choice((0, 1, 2, 3, 5, 32, 63, 2**31, 2**32 - 1))
    extra = {}
    if draw.random() < 0.3:
        name = draw.choice(_MORE_TENSORS)
        fill = draw.choice((0.0, 1.0, np.nan))
        extra[name] = np.full(draw.choice(((8,), (64,), (40, 64))), fill, np.float32)
    write_llama(scratch / "model.gguf", draw.choice(("Q8_0", "F16", "Q4_0")), keys=keys, tensors=extra, **changed)
    return Case(what, scratch / "model.gguf")


_KINDS: dict[str, Callable[[random.Random, str, Good, Path], Case]] = {
    **{f"fields {name}": _fields(name) for name in ("config.json", "generation_config.json", "quantize_config.json")},
    **{f"fields {name}": _fields(name) for name in ("tokenizer.json", "tokenizer_config.json")},
    "expressions": _expressions,
    "safetensors": _safetensors,
    "adapter": _adapter,
    "gguf": _gguf,
    "gguf values": _gguf_values,
}


def spoiled_json(draw: random.Random, content: Any) -> str:
    """The text of a JSON document after one or two changes."""
    for _ in range(draw.randint(1, 2)):
        _change(draw, content)
    text = json.dumps(content)
    if draw.random() < 0.05:
        return text[: draw.randrange(len(text))]
    if draw.random() < 0.05:
        return text.replace("1", draw.choice(("[" * 5000, "1" + "0" * 5000, "-")), 1)
    return text


def _change(draw: random.Random, content: Any) -> None:
    """Walks down to some place and changes that."""
    here = content
    while True:
        keys = sorted(here) if isinstance(here, dict) else range(min(len(here), 200))
        if not keys:
            return
        key = draw.choice(list(keys))
        if isinstance(here[key], dict | list) and here[key] and draw.random() < 0.7:
            here = here[key]
            continue
        kind = draw.random()
        if kind < 0.15:
            del here[key]
        elif kind < 0.25 and isinstance(here, dict):
            here[draw.choice(("num_hidden_layers", "eos_token_id", "r", f"{key}x"))] = here.pop(key)
        else:
            alike = [value for value in NASTY if type(value) is type(here[key])]
            here[key] = draw.choice(alike if alike and draw.random() < 0.7 else NASTY)
        return


def spoiled_safetensors(draw: random.Random, raw: bytes) -> bytes:
    """A safetensors file with another header, or with values that are no numbers."""
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    match draw.randrange(6):
        case 0:
            header[draw.choice((f"{name}x", name.replace(".0.", ".9."), "model.norm.bias"))] = header.pop(name)
        case 1:
            header[name] = header[draw.choice(names)]
        case 2:
            del header[name]
        case 3:
            first, end = header[name]["data_offsets"]
            at = draw.randrange(first, end, 4)
            data[at : at + 4] = draw.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f"))
        case 4:
            return raw[: draw.randrange(len(raw))]
        case _:
            text = spoiled_json(draw, header).encode()
            return struct.pack("<Q", len(text)) + text + bytes(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)
