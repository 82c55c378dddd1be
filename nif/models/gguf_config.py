"""Makes transformers' configuration and tokenizer from a GGUF file's metadata.

file = GgufFile("model.gguf", Path("model.gguf"))
config, tokenizer = gguf_config(file), gguf_tokenizer(file)
"""

import importlib.util
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from genbatch.nif.errors import ModelError, TensorError
from genbatch.nif.models.architecture import read_whole
from genbatch.nif.models.file_checks import check_counts, token_ids
from genbatch.nif.models.gguf_families import family_of
from genbatch.nif.models.gguf_family import GgufFamily
from genbatch.nif.models.gguf_file import GgufFile

if TYPE_CHECKING:  # a model with a kept description does not need transformers
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_MORE_SETTINGS = {"nextn_predict_layers": "num_nextn_predict_layers"}


def gguf_config(file: GgufFile) -> "PreTrainedConfig":
    """Build the configuration that transformers would make from the file's metadata.

    Raises:
        ModelError: the metadata are incomplete or contradictory.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    architecture = file.architecture
    family = family_of(architecture, file.metadata)
    known: Any = GGUF_CONFIG_MAPPING
    names = known.get(architecture) if family is None or not family.settings else family.settings
    if names is None:
        raise file.fault(f"transformers does not know the architecture {architecture!r}")
    present = {} if family is None else {setting: name in file.names() for setting, name in family.present.items()}
    named_mistral = "mistral" in str(file.metadata.get("general.name")).lower()
    # Mistral has no biases.
    kind = "mistral" if architecture == "llama" and named_mistral and not any(present.values()) else architecture
    settings: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind) or {}) | present
    if family is not None:
        kind = family.kind or kind
        settings.update(family.fixed)
    settings["tie_word_embeddings"] = "output.weight" not in file.names()
    for key, value in file.metadata.items():
        prefix, _, rest = key.partition(".")
        if prefix == architecture and (name := names.get(rest, _MORE_SETTINGS.get(rest))) not in (None, -1):
            settings[name] = value.tolist() if isinstance(value, np.ndarray) else value
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            settings[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token_id"] = token_id
    settings["vocab_size"] = file.tensor("token_embd.weight").shape[0]
    pattern = file.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if family is not None and family.windows_by_layer and isinstance(pattern, np.ndarray):
        settings["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
    if (head_dim := file.metadata.get(f"{architecture}.attention.key_length")) is not None:
        settings["head_dim"] = head_dim
    try:
        if family is not None:
            _settle_layers(file, family, settings)
        if family is not None and family.settle is not None:
            family.settle(file, settings)
        if "rope_parameters" not in settings:
            _settle_attention(file, settings)
        check_counts(file.model, file.path.name, settings)
        if extra := settings.get("num_nextn_predict_layers"):  # block_count counts these layers, too
            settings["num_hidden_layers"] -= extra
        config: PreTrainedConfig = AutoConfig.for_model(kind, **settings)
    except ModelError:
        raise
    except Exception as fault:
        raise file.fault(f"its metadata do not describe a {kind}: {fault}") from fault
    read_whole(config)
    return config


def _settle_layers(file: GgufFile, family: GgufFamily, settings: dict[str, Any]) -> None:
    """Translate the metadata about layers without attention to the configuration's settings."""
    heads = settings.get("num_key_value_heads")
    if family.other_layers is not None and isinstance(heads, list):
        if len({*heads} - {0}) != 1:
            raise file.fault(f"{file.architecture}.attention.head_count_kv is {heads}: layers differ in their KV heads")
        kinds = [family.other_layers if count == 0 else "full_attention" for count in heads]
        widths = settings.get("intermediate_size")
        if family.mlp_layers is not None and isinstance(widths, list):
            kinds = [family.mlp_layers if width else kind for width, kind in zip(widths, kinds, strict=True)]
            settings["intermediate_size"] = max(widths)
        settings["layer_types" if family.mlp_layers is None else "layers_block_type"] = kinds
        settings["num_key_value_heads"] = max(heads)
    if family.inner_size is not None:
        name, per = family.inner_size
        inner, count = file.metadata.get(f"{file.architecture}.ssm.inner_size"), settings.get(per)
        if not isinstance(inner, int) or not isinstance(count, int) or count < 1 or inner % count:
            raise file.fault(f"{file.architecture}.ssm.inner_size is {inner!r} for {per} {count!r}")
        settings[name] = inner // count
        if family.expands is not None:
            settings[family.expands] = inner // max(settings.get("hidden_size") or 1, 1)
    for key, (name, true, false) in family.choices.items():
        settings[name] = true if file.metadata.get(f"{file.architecture}.{key}") else false


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the model that scales its scores by its width


def _settle_attention(file: GgufFile, settings: dict[str, Any]) -> None:
    """Translate the scale of scores and the rotary embedding from the metadata to the configuration's settings."""
    head_dim = settings.get("head_dim")
    if head_dim is None and settings.get("hidden_size") and settings.get("num_attention_heads"):
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        settings.setdefault("head_dim", head_dim)
    if file.architecture in _LARGEST_GEMMA and head_dim:
        largest = file.metadata.get(f"{file.architecture}.block_count") == _LARGEST_GEMMA[file.architecture]
        settings["query_pre_attn_scalar"] = (
            settings["hidden_size"] // settings["num_attention_heads"] if largest else head_dim
        )
    if rope := _rope_parameters(file, settings, head_dim):
        # If kinds of layers have different rotary embeddings, transformers applies the scaling to the right ones.
        settings["rope_scaling" if file.architecture in _ROPES_BY_LAYER else "rope_parameters"] = rope


# The only values that transformers supports.
_YARN_DEFAULTS = {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
# llama.cpp's converter divides transformers' mscale_all_dim, a scale of scores and cosines, by these numbers.
_YARN_SCALES = {"deepseek2": 10.0, "mistral3": 1.0}
_YARN_KEYS = ("yarn_beta_fast", "yarn_beta_slow", *_YARN_DEFAULTS)
_ROPE_SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned", *_YARN_KEYS)
_ROPES_BY_LAYER = ("gemma3",)
_SCALED_BY_DEFAULT = ("apertus",)  # transformers scales these unless the configuration has a rope_type


def _rope_parameters(file: GgufFile, settings: dict[str, Any], head_dim: int | None) -> dict[str, Any] | None:
    """Return transformers' `rope_parameters`, including the base; None if the file has only the base.

    The tensor `rope_freqs` has divisors of the pairs' frequencies. Llama 3's files have it instead of the numbers from
    which transformers computes these divisors. So the result is a "longrope" with the same factors for every length.

    Raises:
        ModelError: transformers has no such embedding; the reason names the key or the tensor.
    """
    architecture, prefix = file.architecture, f"{file.architecture}.rope.scaling."
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_SCALING:
            raise file.fault(f"{key} is a scaling of rotary embeddings that is not supported")
    kind = file.metadata.get(f"{prefix}type", "linear")  # llama.cpp's default
    rotated = file.metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    family = family_of(architecture, file.metadata)
    rotates_part = family is not None and family.rotates_part
    if rotated != head_dim and head_dim and not rotates_part:
        raise file.fault(
            f"{architecture}.rope.dimension_count is {rotated!r} in heads of {head_dim}: only whole heads are rotated"
        )
    base = _positive(file, f"{architecture}.rope.freq_base", 10000.0)
    if kind == "yarn" and base <= 1:
        raise file.fault(f"{architecture}.rope.freq_base is {base}; yarn needs a base above 1")
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_factors_short.weight" in file.names() and architecture == "phi3":
        if kind not in ("linear", "longrope"):
            raise file.fault(f"{prefix}type is {kind!r} beside the tensor rope_factors_short.weight")
        rope["rope_type"] = "longrope"
        for length in ("short", "long"):
            rope[f"{length}_factor"] = _rope_factors(file, f"rope_factors_{length}.weight", rotated)
        if (original := file.metadata.get(f"{prefix}original_context_length")) is not None:
            settings["original_max_position_embeddings"] = original
        if f"{prefix}attn_factor" in file.metadata:
            rope["attention_factor"] = _positive(file, f"{prefix}attn_factor", 1.0)
    elif kind == "yarn":
        rope.update(_yarn(file, prefix, settings))
    elif kind in ("none", "linear"):
        rope.update(_divided(file, prefix, settings, rotated))
    else:
        raise file.fault(f"{prefix}type is {kind!r}; supported are none, linear and yarn, and longrope for phi3")
    if (beta := file.metadata.get(f"{architecture}.attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = beta
    if rotates_part and rotated and head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if architecture in _ROPES_BY_LAYER:
        if rope["rope_type"] not in ("default", "linear"):
            raise file.fault(f"{prefix}type or rope_freqs.weight: {architecture} supports linear scaling only")
        return rope if rope["rope_type"] == "linear" else None
    if len(rope) == 1 and not rotates_part and architecture not in _SCALED_BY_DEFAULT:
        return None
    return {**rope, "rope_theta": settings.pop("rope_theta", 10000.0)}


def _divided(file: GgufFile, prefix: str, settings: dict[str, Any], rotated: Any) -> dict[str, Any]:
    """Return parameters that divide frequencies by one common factor, by a factor for each frequency, or by both."""
    factor = 1.0
    if file.metadata.get(f"{prefix}type") != "none":
        old = f"{file.architecture}.rope.scale_linear"
        key = old if old in file.metadata and f"{prefix}factor" not in file.metadata else f"{prefix}factor"
        factor = 1.0 if file.metadata.get(key) == 0 else _positive(file, key, 1.0)  # in llama.cpp 0 means no scaling
    if (scale := _positive(file, f"{prefix}attn_factor", 1.0)) != 1.0:
        raise file.fault(f"{prefix}attn_factor is {scale}; without yarn only 1 is supported")
    if "rope_freqs.weight" in file.names():
        factors = [base_factor * factor for base_factor in _rope_factors(file, "rope_freqs.weight", rotated)]
        length = _positive(file, f"{file.architecture}.context_length", settings.get("max_position_embeddings", 2048))
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": int(length),
        }
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, prefix: str, settings: dict[str, Any]) -> dict[str, Any]:
    if "rope_freqs.weight" in file.names():
        raise file.fault(f"tensor rope_freqs.weight and {prefix}type yarn contradict; only one of them is supported")
    for name, usual in _YARN_DEFAULTS.items():
        if (value := file.metadata.get(prefix + name, usual)) != usual and not (
            name == "yarn_log_multiplier" and file.architecture in _YARN_SCALES
        ):
            raise file.fault(f"{prefix}{name} is {value!r}; only {usual:g} is supported")
    if f"{prefix}factor" not in file.metadata:
        raise file.fault(f"{prefix}factor is missing, and {prefix}type yarn needs it")
    factor = _positive(file, f"{prefix}factor", 1.0)
    original = _positive(file, f"{prefix}original_context_length", settings.get("max_position_embeddings", 2048))
    usual_scale = 1.0 + 0.1 * math.log(max(factor, 1.0))
    scales = {}
    if scale := file.metadata.get(f"{prefix}yarn_log_multiplier"):
        usual_scale, scale = 1.0, scale * _YARN_SCALES[file.architecture]
        scales = {"mscale": scale, "mscale_all_dim": scale}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "attention_factor": _positive(file, f"{prefix}attn_factor", 1.0) * usual_scale,
        "beta_fast": _positive(file, f"{prefix}yarn_beta_fast", 32.0),
        "beta_slow": _positive(file, f"{prefix}yarn_beta_slow", 1.0),
        **scales,
        **({"truncate": False} if file.architecture == "gpt-oss" else {}),
    }


def _rope_factors(file: GgufFile, name: str, rotated: Any) -> list[float]:
    try:
        factors = file.tensor(name).whole().flatten().tolist()
    except TensorError as fault:
        raise file.fault(f"tensor {name} has a factor that is no positive number") from fault
    if rotated is not None and len(factors) * 2 != rotated:
        raise file.fault(f"tensor {name} has {len(factors)} factors for {rotated} rotated elements")
    if not all(0 < factor < math.inf for factor in factors):
        raise file.fault(f"tensor {name} has a factor that is no positive number")
    return factors


def _positive(file: GgufFile, key: str, default: float) -> float:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise file.fault(f"{key} is {value!r}, not a positive number")
    return float(value)


def check_unscaled(file: GgufFile) -> None:
    """Refuse a file with a scaled rotary embedding that transformers would silently read as an unscaled one.

    Raises:
        ModelError: the reason names the key or the tensor.
    """
    key = f"{file.architecture}.rope.scaling.type"
    if (kind := file.metadata.get(key, "none")) != "none":
        raise file.fault(f"{key} is {kind!r}, which is not supported for files of this architecture")
    for name in ("rope_freqs.weight", "rope_factors_short.weight"):
        if name in file.names():
            raise file.fault(f"tensor {name} is not supported for files of the architecture {file.architecture}")


_TOKENIZER_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WORDS = {
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("hunyuan", "stablelm2"), (_LLAMA3.replace("{1,3}", ""),)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}+",
    ),
    "seed-coder": (_LLAMA3.replace("{1,3}", "").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),),
    **dict.fromkeys(
        ("smollm", "command-r", "starcoder", "refact", "codeshell", "exaone"),
        (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    ),
}
"""By tokenizer.ggml.pre, the expressions that split text before merges. For these names transformers has no entry, and
would split text as GPT-2 does."""
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_tokenizer(file: GgufFile) -> "PreTrainedTokenizerBase":
    """Build transformers' tokenizer from the file's vocabulary, with the file's chat template.

    Raises:
        ModelError: the vocabulary is missing, or transformers cannot read it.
    """
    from transformers import PreTrainedTokenizerFast

    described: dict[str, Any] = {}
    for key, name in _TOKENIZER_KEYS.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            described[name] = value.tolist() if isinstance(value, np.ndarray) else value
    tokens = described.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.fault("the metadata lack the vocabulary, tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for role, name in _SPECIAL.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        token_ids(file.model, f"{file.path.name}: tokenizer.ggml.{role}_token_id", token_id, len(tokens))
        settings[name] = None if token_id is None else tokens[token_id]
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    sentencepiece = described.get("tokenizer_type") == "llama"
    settings["add_bos_token"] = bool(file.metadata.get("tokenizer.ggml.add_bos_token", sentencepiece))
    settings["add_eos_token"] = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False))
    name = "gguf" if importlib.util.find_spec("transformers.integrations.gguf") else "ggml"  # it moved in 5.23
    reader: Any = importlib.import_module(f"transformers.integrations.{name}")
    fast: Any = PreTrainedTokenizerFast
    try:
        backend, more = reader.convert_gguf_tokenizer(file.architecture, described)
        if described.get("tokenizer_type") == "gpt2":
            _split_words(backend, described.get("pre_tokenizer_type"))
        tokenizer: PreTrainedTokenizerBase = fast(tokenizer_object=backend, **{**settings, **more})
    except Exception as fault:
        raise file.fault(f"its tokenizer cannot be read: {fault}") from fault
    return tokenizer


def _split_words(backend: Any, pre: str | None) -> None:
    """Let a tokenizer split text into words as its training did."""
    from tokenizers import Regex, pre_tokenizers

    if pre in _WORDS:
        splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in _WORDS[pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def gguf_end_tokens(file: GgufFile, vocab_size: int) -> frozenset[int]:
    """Return the ids that end a generation: the end of the text, and the end of the turn if the file has it.

    Harmony's turns have several messages, each with its own end. Only the last message or a call ends the answer.

    Raises:
        ModelError: an id is not an integer below `vocab_size`, the width of the logits.
    """
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot")]
    named = [token_ids(file.model, f"{file.path.name}: {key}", file.metadata.get(key), vocab_size) for key in keys]
    ends: frozenset[int] = frozenset().union(*named)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and file.architecture == "gpt-oss":
        ids = {token: at for at, token in enumerate(tokens[:vocab_size]) if token in _HARMONY_ENDS}
        ends = ends - {ids.get("<|end|>")} | {at for token, at in ids.items() if token != "<|end|>"}
    return ends
