"""GGUF files of every type of block through the engine: token for token what transformers generates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from genbatch.nif.context import Context
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError
from genbatch.nif.models.gguf_config import gguf_config
from genbatch.nif.models.gguf_file import GgufFile
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.models.weight_source import FP4_KINDS, FP8_KINDS, GROUP_KINDS
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.native.weights import STORED_KINDS
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.runners.torch_runner import ATTENTION_NAME
from tests.lora_adapters import PeftOracle, make_adapter
from tests.nif.models.gguf_files import dequantized, quantized, type_number

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS = 320, 256, 2, 4, 2
NEW_TOKENS = 14
KINDS = [*("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), "IQ4_NL", "IQ4_XS", "F16"]
KINDS += [
    "BF16",
    "MXFP4",
    "NVFP4",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
    "Q1_0",
    "Q2_0",
]
# Where blocks that the gguf package cannot make have their float16 factors: of the codes, and of the minima.
FACTORS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
NAMES["output.weight"] = "lm_head.weight"
for layer in range(LAYERS):
    NAMES |= {f"blk.{layer}.{name}.weight": f"model.layers.{layer}.{ours}.weight" for name, ours in PARTS.items()}


def blocks(kind: str, values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A matrix in blocks of `kind`: that of `values`, or where gguf only reads it, any of their size."""
    if kind == "NVFP4":
        raw = random.integers(0, 256, (len(values), values.shape[1] // 64, 36), dtype=np.uint8)
        raw[:, :, :4] = random.integers(0x0E, 0x16, (*raw.shape[:2], 4))  # scales of some 0.03
        return raw.reshape(len(raw), -1)
    if kind not in FACTORS:
        return quantized(values, kind)
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (len(values), values.shape[1] // per_block, size), dtype=np.uint8)

    spread = random.uniform(0.5, 1.5, raw.shape[:2]) * random.choice([-1, 1], raw.shape[:2])

    def values_with(*factors: float) -> np.ndarray:
        if kind == "IQ1_M":  # in the highest bits of four scales
            half = (factors[0] * spread).astype(np.float16).view(np.uint16)
            for i in range(4):
                raw[:, :, 49 + 2 * i] = raw[:, :, 49 + 2 * i] & 15 | (half >> (4 * i) & 15) << 4
            return np.asarray(gguf.quants.dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind]))
        for at, factor in zip(FACTORS[kind], factors, strict=True):
            raw[:, :, at : at + 2] = (factor * spread).astype(np.float16)[:, :, None].view(np.uint8)
        return np.asarray(gguf.quants.dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind]))

    factors: tuple[float, ...] = (1.0,)
    if len(FACTORS[kind]) == 2:  # a minimum that takes the mean away
        factors = (1.0, float(np.abs(values_with(1.0, 0.0)).mean() / np.abs(values_with(0.0, 1.0)).mean()))
    scale = float(values.std()) / float(values_with(*factors).std())
    values_with(*(factor * scale for factor in factors))
    return raw.reshape(len(raw), -1)


_PUT: dict[type, Any] = {
    str: gguf.GGUFWriter.add_string,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}


@dataclass
class File:
    """A Llama in a GGUF file, and the module of transformers that has the same weights."""

    hf: LlamaForCausalLM
    tensors: dict[str, tuple[str, np.ndarray]]  # by the file's names: type and bytes
    eos: int = VOCAB - 1
    numbers: dict[str, Any] = field(default_factory=dict)  # of the metadata, without the architecture

    def write(self, path: Path) -> Path:
        config: Any = self.hf.config
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_block_count(LAYERS)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = {"rope.dimension_count": HIDDEN // HEADS, "rope.freq_base": config.rope_parameters["rope_theta"]}
        for key, value in {**rope, **self.numbers}.items():
            put = _PUT[type(value)].__get__(writer)
            put(f"llama.{key}", value)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*(chr(ord("!") + i) for i in range(90)), "AB", *(f"<{i}>" for i in range(91, VOCAB))])
        writer.add_token_types([1] * 91 + [3] * (VOCAB - 91))
        writer.add_token_merges(["A B"])
        writer.add_eos_token_id(self.eos)
        for name, (kind, raw) in self.tensors.items():
            writer.add_tensor(name, raw, raw_dtype=type_number(kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def generate(self, prompt: Sequence[int], eos: int | None = None) -> list[int]:
        """What transformers adds, the end of sequence included."""
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        hf: Any = self.hf
        out = hf.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        return [int(token) for token in out[0, len(prompt) :]]


def halves_to_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of queries and keys."""
    return np.ascontiguousarray(matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape))


def pairs_to_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    return np.ascontiguousarray(matrix.reshape(heads, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape))


def make_file(kinds: Mapping[str, str] | str, seed: int = 0, **config: Any) -> File:
    """A random Llama whose matrices are of these types, by the end of their names in the file."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    settings = {"max_position_embeddings": 512, "initializer_range": 0.08, "tie_word_embeddings": False, **config}
    hf = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            **settings,
        )
    ).eval()
    state, tensors = hf.state_dict(), {}
    for name, ours in NAMES.items():
        if ours == "lm_head.weight" and hf.config.tie_word_embeddings:
            continue
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2], 0)
        values = state[ours].numpy()
        if "norm" in name:
            tensors[name] = ("F32", values)
            continue
        kind = kinds if isinstance(kinds, str) else next(kinds[end] for end in kinds if name.endswith(f"{end}.weight"))
        raw = blocks(kind, halves_to_pairs(values, heads) if heads else values, random) if kind != "F32" else values
        if kind == "F32" and heads:
            raw = halves_to_pairs(values, heads)
        tensors[name] = (kind, raw)
        exact = dequantized(raw, kind)
        state[ours] = torch.from_numpy(pairs_to_halves(exact, heads) if heads else exact.copy())
    hf.load_state_dict(state)
    return File(hf, tensors)


def served(source: Path | str) -> Context:
    options = EngineOptions(model_path=str(source), n_gpu_layers=0, runner="native", dtype="float32", n_ctx=2048)
    context = load_engine(options).open_context(n_parallel=3, n_held=0, n_batch=64)
    assert isinstance(context.runner, NativeRunner)
    return context


def greedy(context: Context, prompts: Sequence[Sequence[int]], count: int = NEW_TOKENS) -> list[list[int]]:
    """All prompts in one batch, each until its end; they begin one step after another."""
    answers: list[list[int]] = [[] for _ in prompts]
    ended, step = context.model.eos_token_ids, 0
    while batch := [
        Entry(i, answer[-1:] or list(prompts[i]), context.kv.length(i), Logits.LAST)
        for i, answer in enumerate(answers)
        if i <= step and len(answer) < count and not (answer and answer[-1] in ended)
    ]:
        for entry, logits in zip(batch, context.eval(batch), strict=True):
            answers[entry.seq_id].append(int(logits[-1].argmax()))
        step += 1
    for i in range(len(prompts)):
        context.seq_rm(i)
    return answers


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def check(file: File, path: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Serves the prompts alone and in one batch; the end of sequence is a token that the first of them comes to."""
    endless = file.generate(prompts[0])
    file.eos = next(token for at, token in enumerate(endless) if at > 3 and token not in endless[:at])
    wanted = [file.generate(prompt, file.eos) for prompt in prompts]
    assert wanted[0] == endless[: len(wanted[0])] and len(wanted[0]) < NEW_TOKENS
    context = served(file.write(path))
    try:
        assert context.model.eos_token_ids == {file.eos}
        assert [greedy(context, [prompt])[0] for prompt in prompts] == wanted
        assert greedy(context, prompts) == wanted
    finally:
        context.close()


# Types of blocks


def test_these_are_all_types_that_are_multiplied_as_they_are() -> None:
    assert set(KINDS) == set(STORED_KINDS) - {*GROUP_KINDS, *FP8_KINDS, *FP4_KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_one_type_equals_generate(tmp_path: Path, kind: str) -> None:
    check(make_file(kind), tmp_path / f"{kind}.gguf", prompts_of(5, 33, 90))


# As llama.cpp mixes them, and as nobody does.
MIXES = {
    "q4_k_m": {
        "token_embd": "Q6_K",
        "attn_v": "Q6_K",
        "1.ffn_down": "Q4_K",
        "ffn_down": "Q6_K",
        **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"), "Q4_K"),
    },
    "iq4_xs": {
        "token_embd": "Q8_0",
        "output": "Q6_K",
        "attn_v": "Q5_K",
        "attn_output": "IQ4_NL",
        **dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up", "ffn_down"), "IQ4_XS"),
    },
    "ud-iq1_m": {
        "token_embd": "Q4_K",
        "output": "Q5_K",
        "attn_q": "IQ2_XXS",
        "attn_k": "IQ3_XXS",
        "attn_v": "IQ4_XS",
        "attn_output": "IQ2_S",
        "0.ffn_gate": "TQ1_0",
        "0.ffn_up": "IQ1_S",
        "ffn_gate": "IQ1_M",
        "ffn_up": "IQ2_XS",
        "0.ffn_down": "MXFP4",
        "ffn_down": "IQ3_S",
    },
    "all": {
        "token_embd": "Q3_K",
        "output": "IQ4_XS",
        "attn_q": "Q2_K",
        "attn_k": "Q5_1",
        "attn_v": "F16",
        "attn_output": "Q4_0",
        "0.ffn_gate": "BF16",
        "0.ffn_up": "Q5_0",
        "ffn_gate": "Q4_1",
        "ffn_up": "Q5_K",
        "ffn_down": "F32",
    },
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_of_several_types_equals_generate(tmp_path: Path, mix: str) -> None:
    check(make_file(MIXES[mix], tie_word_embeddings=mix == "q4_k_m"), tmp_path / f"{mix}.gguf", prompts_of(5, 33, 90))


def test_smollm2_equals_generate(smollm2: Model) -> None:
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in ("Once upon a time, there lived a", "def fib(n):\n")]
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts.append(smollm2.tokenizer.encode(question))
    hf: Any = smollm2.hf
    hf.set_attn_implementation("sdpa")
    wanted = []
    try:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            eos = sorted(smollm2.eos_token_ids)
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos
            )
            wanted.append(out[0, len(prompt) :].tolist())
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    assert any(len(answer) < NEW_TOKENS for answer in wanted)  # one of them ends by itself
    context = served("smollm2")
    try:
        assert [greedy(context, [prompt])[0] for prompt in prompts] == wanted
        assert greedy(context, prompts) == wanted
    finally:
        context.close()


# Rotary embeddings


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 500.0}


def llama3_factors(rope: Mapping[str, Any], head_dim: int = HIDDEN // HEADS) -> np.ndarray:
    """The tensor rope_freqs as llama.cpp's converter computes it."""
    old, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    assert len(set(factors)) > 3
    return np.array(factors, np.float32)


def test_llama_3s_frequencies_equal_generate_beyond_the_original_context(tmp_path: Path) -> None:
    file = make_file("F32", rope_parameters=dict(LLAMA3))
    prompts = prompts_of(200, 70, 400)
    plain = make_file("F32", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert [plain.generate(prompt) for prompt in prompts] != [file.generate(prompt) for prompt in prompts]
    file.tensors["rope_freqs.weight"] = ("F32", llama3_factors(LLAMA3))
    check(file, tmp_path / "llama3.gguf", prompts)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("rope", "numbers"),
    [
        (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (LINEAR, {"rope.scale_linear": 4.0}),  # before it had a type
        (YARN, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}),
    ],
)
def test_a_scaling_in_the_metadata_equals_generate(
    tmp_path: Path, rope: Mapping[str, Any], numbers: dict[str, Any]
) -> None:
    file = make_file("Q8_0", rope_parameters=dict(rope))
    file.numbers = numbers
    prompts = prompts_of(200, 70, 400)
    plain = make_file("Q8_0", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert [plain.generate(prompt) for prompt in prompts] != [file.generate(prompt) for prompt in prompts]
    check(file, tmp_path / "scaled.gguf", prompts)


def test_frequencies_and_a_linear_scaling_both_divide(tmp_path: Path) -> None:
    file = make_file("F32", max_position_embeddings=512)
    file.numbers = {"rope.scaling.factor": 2.0}
    file.tensors["rope_freqs.weight"] = ("F32", np.full(HIDDEN // HEADS // 2, 3.0, np.float32))
    config: Any = gguf_config(GgufFile("m", file.write(tmp_path / "both.gguf")))
    assert config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"] == [6.0] * 32


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0, "rope.scaling.finetuned": 0},
    ],
)
def test_a_file_without_a_scaling_has_a_plain_embedding(tmp_path: Path, numbers: dict[str, Any]) -> None:
    file = make_file("F32")
    file.numbers = numbers
    config: Any = gguf_config(GgufFile("m", file.write(tmp_path / "plain.gguf")))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rope.scaling.type": "ntk"}, r"llama\.rope\.scaling\.type is 'ntk'; supported are none, linear and yarn"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type is 'longrope'"),
        ({"rope.scaling.type": 7}, r"llama\.rope\.scaling\.type is 7"),
        ({"rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ({"rope.scaling.factor": -2.0}, r"llama\.rope\.scaling\.factor is -2\.0, not a positive number"),
        ({"rope.scaling.factor": math.nan}, r"llama\.rope\.scaling\.factor is nan"),
        ({"rope.scaling.factor": "8"}, r"llama\.rope\.scaling\.factor is '8'"),
        ({"rope.scaling.attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor is 2\.0; without yarn only 1"),
        ({"rope.scaling.alpha": 1000.0}, r"llama\.rope\.scaling\.alpha is a scaling"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
            r"llama\.rope\.scaling\.yarn_log_multiplier is 0\.1\S*; only 0 is supported",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.freq_base": 1.0},
            r"llama\.rope\.freq_base is 1\.0; yarn needs a base above 1",
        ),
        ({"rope.freq_base": math.nan}, r"llama\.rope\.freq_base is nan, not a positive number"),
        ({"rope.dimension_count": "64"}, "its metadata do not describe a llama"),
        ({"attention.key_length": 32}, r"llama\.rope\.dimension_count is 64 in heads of 32"),
    ],
)
def test_a_scaling_that_cannot_be_had_is_refused_by_name(tmp_path: Path, numbers: dict[str, Any], reason: str) -> None:
    file = make_file("F32")
    file.numbers = numbers
    with pytest.raises(ModelError, match=rf"bad\.gguf: {reason}") as refused:
        served(file.write(tmp_path / "bad.gguf"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("factors", "kind", "reason"),
    [
        ([1.0] * 31, "linear", "has 31 factors for 64 rotated elements"),
        ([1.0] * 31 + [0.0], "linear", "has a factor that is no positive number"),
        ([1.0] * 31 + [math.inf], "linear", "has a factor that is no positive number"),
        ([1.0] * 32, "yarn", "and llama.rope.scaling.type yarn"),
    ],
)
def test_frequencies_that_cannot_be_are_refused_by_name(
    tmp_path: Path, factors: list[float], kind: str, reason: str
) -> None:
    file = make_file("F32")
    file.numbers = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0}
    file.tensors["rope_freqs.weight"] = ("F32", np.array(factors, np.float32))
    with pytest.raises(ModelError, match=rf"bad\.gguf: tensor rope_freqs\.weight {reason}"):
        served(file.write(tmp_path / "bad.gguf"))


def test_a_family_that_is_converted_is_refused_with_a_scaling(tmp_path: Path) -> None:
    file = make_file("F32")
    file.numbers = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    good = file.write(tmp_path / "good.gguf").read_bytes()
    name = b"\x05" + bytes(7)
    (tmp_path / "bad.gguf").write_bytes(good.replace(name + b"llama", name + b"bloom").replace(b"llama.", b"bloom."))
    with pytest.raises(ModelError, match=r"bad\.gguf: bloom\.rope\.scaling\.type is 'linear', which is not supported"):
        resolve_model(str(tmp_path / "bad.gguf"))


# Adapters


def test_an_adapter_over_types_of_blocks_equals_peft(tmp_path: Path) -> None:
    mix = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q5_0", "ffn_up": "Q4_K"}
    file = make_file({**mix, "ffn_down": "Q6_K", "attn_output": "Q4_K", "token_embd": "Q8_0", "output": "Q6_K"})
    file.hf.save_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "base", tmp_path / "adapter", rank=6)
    context = served(file.write(tmp_path / "model.gguf"))
    try:
        context.prepare_adapter(one := context.adapters.read("one", adapter))
        context.add_adapter(one)
        [prompt] = prompts_of(40)
        both = [Entry(slot, prompt, 0, Logits.ALL, handle) for slot, handle in enumerate((one.handle, 0))]
        adapted, plain = map(torch.as_tensor, context.eval(both))
    finally:
        context.close()
    hf: Any = file.hf
    with torch.inference_mode():
        assert torch.allclose(plain, hf(input_ids=torch.tensor([prompt]), use_cache=False).logits[0], atol=1e-3)
    expected = PeftOracle(hf, {"one": adapter}).logits("one", prompt)
    assert torch.allclose(adapted, expected, atol=1e-3)
    assert not torch.allclose(adapted, plain, atol=0.1)
