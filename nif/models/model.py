"""Loading: finds a model's files, checks them, and returns a Model that passed the self-check.

model = load_model("smollm2")
runner = TorchRunner(model)
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from genbatch.nif.cuda_device import CPU, Device, choose_device
from genbatch.nif.engine_options import check_dtype, check_gpu_layers
from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line, read_object
from genbatch.nif.models.architecture import ExpertNames, LatentNames, read_whole
from genbatch.nif.models.architectures import (
    ARCHITECTURES,
    LACKING,
    described,
    layer_groups,
    layer_shapes,
    max_position,
)
from genbatch.nif.models.assistants import ASSISTANT_KINDS, NO_MODEL
from genbatch.nif.models.encoders import GROUPS, LAYERS, encoder_class, encoder_positions, is_encoder, load_encoder
from genbatch.nif.models.file_checks import (
    check_all_used,
    check_complete,
    check_finite,
    check_numbers,
    check_size,
    left_out,
    read_config,
    token_ids,
)
from genbatch.nif.models.gguf_config import gguf_config, gguf_end_tokens, gguf_tokenizer
from genbatch.nif.models.gguf_families import ASSISTANT
from genbatch.nif.models.gguf_file import GgufFile, GgufWeights
from genbatch.nif.models.hub import Progress
from genbatch.nif.models.loaded_model import DTYPES, Model
from genbatch.nif.models.model_source import ModelSource, no_progress, quiet_transformers, resolve_model
from genbatch.nif.models.quantisation import quantisation_of
from genbatch.nif.models.quantised_checkpoint import QuantisedWeights
from genbatch.nif.models.self_check import check_paged_path, probe_layers
from genbatch.nif.models.weight_source import SafetensorsWeights, TextWeights, WeightSource, joined
from genbatch.nif.pooling import (
    CLS,
    RANK,
    Pooling,
    directory_pooling,
    gguf_pooling,
    plain_pooling,
    scoring_pooling,
)
from genbatch.nif.runner import LayerShape
from genbatch.nif.runners.recurrence import RECURRENT, page_convolutions, page_recurrences
from genbatch.nif.runners.torch_runner import ATTENTION_NAME, register_attention
from genbatch.nif.sampling.sampler import FILE_SAMPLING
from genbatch.nif.scoring import (
    GGUF_RANK,
    classifier_scoring,
    gguf_scoring,
    head_of,
    is_classifier,
    scores_by_tokens,
    token_scoring,
)
from genbatch.nif.text.detokenizer import raised
from genbatch.nif.text.pairs import KNOWN_FORMS, PairReader, template_form
from genbatch.nif.text.tokenizer import Tokenizer
from genbatch.nif.text.tokenizer_process import check_loading

log = logging.getLogger("genbatch")

_LOAD_STEPS = 3  # tokenizer, weights, check


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    n_gpu_layers: int = -1,
    main_gpu: int = 0,
    pooling: str = "",
    progress: Progress | None = None,
) -> Model:
    """Find, load and check a model.

    Args:
        source: a name ("smollm2"), a Hugging Face directory, a .gguf file, or a Hugging Face id.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU that has it, else float32.
        n_gpu_layers: -1 puts every layer on the GPU if there is one; 0 keeps all on the CPU.
        main_gpu: the number of that GPU.
        pooling: "last", "mean" or "cls" is the way to make embeddings, and "rank" scores documents; "" takes the
            pooling from the model's files.
        progress: called as progress(stage, done, total) with the stages "download", "convert" and "load".

    Raises:
        ModelError: the model cannot be found, read, or served over a paged KV cache.
        OptionError: `dtype` or `n_gpu_layers` has another value, or there is no GPU of this number.
    """
    report = progress or no_progress
    check_gpu_layers(n_gpu_layers)
    device = choose_device(n_gpu_layers, main_gpu)
    dtype = _dtype(dtype, device)
    resolved = resolve_model(source, report)
    register_attention()
    with quiet_transformers():
        report("load", 0, _LOAD_STEPS)
        files = _open_files(source, resolved)
        pooled = _pooling(source, files, pooling)
        if files.is_encoder:
            return _encoder(resolved, files, pooled, dtype, device, report)
        if not _is_replaceable(files.model_class):
            raise ModelError(source, _not_replaceable(files.model_class))
        text_config = files.config.get_text_config(decoder=True)
        groups = layer_groups(source, text_config)
        check_size(source, lambda: files.model_class(files.config), files.weights())
        tokenizer = files.tokenizer()
        report("load", 1, _LOAD_STEPS)
        pooled, pairs = _open_pairs(source, files, pooled, tokenizer)
        has_head = pooled is None or _has_head(files)
        if not has_head:
            files.config.tie_word_embeddings = True  # so that transformers needs no head, which is never used
        hf = _load_weights(source, files, dtype, device)
        report("load", 2, _LOAD_STEPS)
        layers, vocab_size = probe_layers(source, hf, groups)
        _log_expanded(resolved.name, text_config, layers, DTYPES[dtype])
        model = Model(
            name=resolved.name,
            hf=hf,
            config=text_config,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            groups=groups,
            layers=layers,
            vocab_size=vocab_size,
            eos_token_ids=files.end_tokens(tokenizer, vocab_size),
            max_position=max_position(source, text_config),
            pooling=pooled,
            pairs=pairs,
            generates=has_head,
            sampling=files.sampling(),
            codes=files.weights() if isinstance(files, _Directory) and files.quantisation is not None else None,
        )
        check_paged_path(source, model)
        report("load", _LOAD_STEPS, _LOAD_STEPS)
    return model


def describe_model(
    source: str,
    *,
    dtype: str = "auto",
    pooling: str = "",
    progress: Progress | None = None,
    resolved: ModelSource | None = None,
) -> Model | None:
    """Load a model for the CPU, but leave the weights in their files: `Model.weights` reads them, `Model.hf` has none.

    Args:
        resolved: the result of `resolve_model`; None resolves the source here.

    Returns:
        The model, or None if only `load_model` can load it: its configuration does not describe the layers completely,
        or the model returns hidden states.

    Raises:
        ModelError: the model cannot be found or read, or lacks a tensor.
        OptionError: `dtype` has another value.
    """
    report = progress or no_progress
    dtype = _dtype(dtype, CPU)
    resolved = resolved or resolve_model(source, report)
    register_attention()
    with quiet_transformers():
        report("load", 0, _LOAD_STEPS)
        files = _open_files(source, resolved)
        config: Any = files.config
        pooled = _pooling(source, files, pooling)
        if files.is_encoder or not described(files.model_class) or (pooled is not None and pooled.needs_states):
            return None
        weights = files.weights()
        groups = layer_groups(source, config)
        attention = ATTENTION_NAME if files.model_class.is_backend_compatible() else "eager"
        make = partial(
            files.model_class._from_config, config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        hf = check_complete(source, files.model_class.__name__, config, make, weights)
        tokenizer = files.tokenizer()
        report("load", 1, _LOAD_STEPS)
        pooled, pairs = _open_pairs(source, files, pooled, tokenizer)
        end_tokens = files.end_tokens(tokenizer, config.vocab_size)
        report("load", 2, _LOAD_STEPS)
        model = Model(
            name=resolved.name,
            hf=hf,
            config=config,
            tokenizer=tokenizer,
            dtype=dtype,
            device=CPU,
            groups=groups,
            layers=layer_shapes(config),
            vocab_size=config.vocab_size,
            eos_token_ids=end_tokens,
            max_position=max_position(source, config),
            weights=weights,
            pooling=pooled,
            pairs=pairs,
            sampling=files.sampling(),
        )
        report("load", _LOAD_STEPS, _LOAD_STEPS)
    return model


def _dtype(name: str, device: Device) -> str:
    check_dtype(name)
    if name == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if on_gpu else "float32"
    return name


class _Files(Protocol):
    """A model on disk: a directory, or one GGUF file."""

    config: PreTrainedConfig
    model_class: Any  # None for an encoder
    is_encoder: bool

    def pooling(self) -> Pooling | None:
        """Return the files' own pooling of embeddings; None if the files name none."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def weights(self) -> WeightSource: ...

    def end_tokens(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        """Return the ids that end a generation; each is below `vocab_size`, the width of the logits."""
        ...

    def sampling(self) -> Mapping[str, float]:
        """See Model."""
        ...


class _Directory:
    """A directory as `save_pretrained` writes it."""

    def __init__(self, source: str, directory: Path) -> None:
        self._source = source
        self.directory = directory
        _refuse_pipes(source, directory)
        config = read_config(source, directory)
        if config.model_type in ASSISTANT_KINDS:
            raise ModelError(source, NO_MODEL)
        _check_text_config(source, config)
        read_whole(config)
        self.config = config
        path = directory / "generation_config.json"
        self._generation: Mapping[str, Any] | None = read_object(source, path) if path.is_file() else None
        self.quantisation = quantisation_of(source, config, directory)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # transformers would need other packages to read the weights
        self._whole = config
        text = _text_model(config)
        self.is_part = text is not None
        if text is not None:
            _check_text_config(source, text)
            self.config = config = text
            config.tie_word_embeddings = "lm_head.weight" not in self.weights().names()
        self.is_encoder = is_encoder(config)
        if self.is_encoder and self.quantisation is not None:
            kind = f"quantised by {self.quantisation.method}"
            raise ModelError(source, f"it is an encoder {kind}; only encoders with plain numbers are read")
        self.model_class = None if self.is_encoder else _supported_class(source, config)
        check_numbers(source, "config.json", config.get_text_config(decoder=not self.is_encoder))

    def pooling(self) -> Pooling | None:
        config: Any = self.config.get_text_config()
        if is_classifier(config):
            return scoring_pooling(classifier_scoring(self._source, self.directory, config), config)
        if scores_by_tokens(self._source, self.directory):
            return plain_pooling(RANK, config)
        return directory_pooling(self._source, self.directory, config)

    def tokenizer(self) -> Tokenizer:
        try:
            check_loading(self.directory)
            loaded = AutoTokenizer.from_pretrained(self.directory, trust_remote_code=False)
            if loaded.is_fast:
                return Tokenizer(loaded)
        except BaseException as fault:
            raise _unread_tokenizer(self._source, fault) from fault
        raise ModelError(self._source, "its tokenizer has no fast form (tokenizer.json)")

    def weights(self) -> WeightSource:
        return self._weights

    @cached_property
    def _weights(self) -> WeightSource:
        files = SafetensorsWeights(self._source, self.directory)
        quantised = self.quantisation
        whole = files if quantised is None else QuantisedWeights(self._source, files, quantised)
        return TextWeights(whole) if self.is_part else joined(whole)

    def end_tokens(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        """Return the ids in generation_config.json or else config.json, and the tokenizer's own."""
        where = "generation_config.json" if self._generation is not None else "config.json"
        if self._generation is not None:
            named = self._generation.get("eos_token_id")
        else:
            named = getattr(self._whole, "eos_token_id", None)
            if named is None:
                named = getattr(self.config.get_text_config(decoder=True), "eos_token_id", None)
        own = token_ids(self._source, "the tokenizer's eos_token", tokenizer.eos_token_id, vocab_size)
        return own | token_ids(self._source, f"{where}: eos_token_id", named, vocab_size)

    def sampling(self) -> Mapping[str, float]:
        """Return the parameters in generation_config.json, unless they are greedy. The default temperature is 1."""
        stated = self._generation or {}
        if stated.get("do_sample") is False:
            return {}
        return ({"temperature": 1.0} if stated.get("do_sample") is True else {}) | own_sampling(stated)


def _log_expanded(name: str, config: Any, layers: Sequence[LayerShape], itemsize: int) -> None:
    """Log the size of keys and values that are stored for each head, though the model has a compressed row for them."""
    rank, rotated = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if isinstance(rank, int) and isinstance(rotated, int):
        kept = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * itemsize
        least = len(layers) * (rank + rotated) * itemsize
        log.info("%s keeps keys and values of every head: %d bytes a token, %d compressed", name, kept, least)


def own_sampling(stated: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that are in their range, because a file may have any value."""
    numbers = {name: stated[name] for name in FILE_SAMPLING if isinstance(stated.get(name), int | float)}
    return {name: value for name, value in numbers.items() if value is not True and FILE_SAMPLING[name](value)}


class _Gguf:
    """A GGUF file of a family that is read without a conversion."""

    def __init__(self, source: str, path: Path) -> None:
        self._source = source
        self._file = GgufFile(source, path)
        if self._file.architecture == ASSISTANT:
            raise ModelError(source, NO_MODEL)
        self.config = gguf_config(self._file)
        self.is_encoder = False
        self.model_class = _supported_class(source, self.config)
        check_numbers(source, path.name, self.config)

    def pooling(self) -> Pooling | None:
        file = self._file
        if file.metadata.get(f"{file.architecture}.pooling_type") != GGUF_RANK:
            return gguf_pooling(file.model, file.metadata, self.config)
        scoring = gguf_scoring(file)
        return plain_pooling(RANK, self.config) if scoring is None else scoring_pooling(scoring, self.config)

    def tokenizer(self) -> Tokenizer:
        try:
            return Tokenizer(gguf_tokenizer(self._file))
        except BaseException as fault:
            raise _unread_tokenizer(self._source, fault) from fault

    def weights(self) -> WeightSource:
        return GgufWeights(self._file, self.config)

    def end_tokens(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        del tokenizer  # the file names its end tokens
        return gguf_end_tokens(self._file, vocab_size)

    def sampling(self) -> Mapping[str, float]:
        """Return the sampling parameters in the file's metadata."""
        names = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
        stated = self._file.metadata
        return own_sampling({ours: stated.get(f"general.sampling.{names.get(ours, ours)}") for ours in FILE_SAMPLING})


def _unread_tokenizer(source: str, fault: BaseException) -> BaseException:
    """Return the error for a tokenizer that cannot be loaded; faults with another cause are returned unchanged."""
    typed = raised(fault)
    if isinstance(typed, ModelError) or not isinstance(typed, Exception):
        return typed
    return ModelError(source, f"its tokenizer cannot be read: {one_line(typed)}")


def _open_files(source: str, resolved: ModelSource) -> _Files:
    return _Gguf(source, resolved.path) if resolved.path.is_file() else _Directory(source, resolved.path)


def _pooling(source: str, files: _Files, pooling_kind: str) -> Pooling | None:
    """Return the pooling of embeddings: the requested one, or the files' own.

    Raises:
        ModelError: an encoder's files name no pooling, and none is requested; or a decoder would take the state of its
            first token, which reads no other token.
    """
    pooled = files.pooling()
    if pooling_kind and pooled is not None and pooled.scoring is not None:
        raise ModelError(source, f"its head scores texts, so it makes no embeddings for pooling {pooling_kind!r}")
    if pooling_kind == RANK and files.is_encoder:
        raise ModelError(source, "it is an encoder without a head; pooling rank needs a causal model, which answers")
    if pooling_kind:
        config = files.config.get_text_config()
        pooled = plain_pooling(pooling_kind, config) if pooled is None else replace(pooled, kind=pooling_kind)
    if files.is_encoder and pooled is None:
        kind = files.config.model_type
        raise ModelError(
            source,
            f"{kind} is an encoder, which generates no text, and its files name no pooling for embeddings "
            "(1_Pooling/config.json of sentence-transformers); set pooling to last, mean or cls",
        )
    if pooled is not None and pooled.kind == CLS and not files.is_encoder:
        raise ModelError(source, "pooling cls takes the first token's state, which reads no other token in a decoder")
    return pooled


def _open_pairs(
    source: str, files: _Files, pooled: Pooling | None, tokenizer: Tokenizer
) -> tuple[Pooling | None, PairReader | None]:
    """Complete a pooling that scores, from files and tokenizer; also returns the reader of pairs.

    Raises:
        ModelError: a causal model has no prompt for a query and a document, or a head or a token is missing.
    """
    if pooled is None or (pooled.embeds and pooled.kind != RANK):
        return pooled, None
    config: Any = files.config.get_text_config()
    scoring = pooled.scoring
    if scoring is None:
        directory = files.directory if isinstance(files, _Directory) else None
        scoring = token_scoring(source, directory, config, tokenizer)
        form = template_form(tokenizer, scoring.instruction) or KNOWN_FORMS.get(config.model_type)
        if form is None:
            raise ModelError(source, "its chat template has no place for a query and a document, so it scores no pairs")
        return replace(pooled, size=len(scoring.labels), scoring=scoring), PairReader(tokenizer, form)
    if files.is_encoder:
        tells_apart = getattr(config, "type_vocab_size", 0) > 1 and "token_type_ids" in tokenizer.hf.model_input_names
        return pooled, PairReader(tokenizer, second=config.vocab_size if tells_apart else 0)
    form = template_form(tokenizer, scoring.instruction)
    if scoring.weight is None:
        weight, bias = head_of(source, files.weights())
        scoring = replace(scoring, weight=weight, bias=bias)
    elif form is None:  # a GGUF file uses the prompt of its family
        form = KNOWN_FORMS.get(config.model_type)
    return replace(pooled, scoring=scoring), PairReader(tokenizer, form, padding_id=config.pad_token_id)


def _has_head(files: _Files) -> bool:
    """Return whether a decoder with a pooling can also generate text: files of embedding models often lack the head."""
    written = getattr(files.config, "architectures", None)
    if written and not written[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return False
    if getattr(files.config, "tie_word_embeddings", False):
        return True
    if not described(files.model_class):
        return True
    tensors, names = ARCHITECTURES[files.model_class.__name__](files.config).tensors, files.weights().names()
    return tensors.stored(f"{tensors.head}.weight", names) in names


def _encoder(
    resolved: ModelSource,
    files: _Files,
    pooled: Pooling | None,
    dtype: str,
    device: Device,
    report: Progress,
) -> Model:
    tokenizer = files.tokenizer()
    report("load", 1, _LOAD_STEPS)
    assert pooled is not None
    pooled, pairs = _open_pairs(resolved.name, files, pooled, tokenizer)
    assert pooled is not None
    model_class, weights = encoder_class(resolved.name, files.config), files.weights()
    check_size(resolved.name, lambda: model_class(files.config), weights)
    hf, unused = load_encoder(
        resolved.name, resolved.path, files.config, getattr(torch, dtype), torch.device(str(device))
    )
    check_all_used(resolved.name, files.config, weights, set(weights.names()) - unused, is_encoder=True)
    check_finite(resolved.name, hf)
    report("load", _LOAD_STEPS, _LOAD_STEPS)
    return Model(
        name=resolved.name,
        hf=hf,
        config=files.config,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        groups=GROUPS,
        layers=LAYERS,
        vocab_size=files.config.vocab_size,
        eos_token_ids=frozenset(),
        max_position=encoder_positions(resolved.name, hf, tokenizer.hf.model_max_length),
        pooling=replace(pooled, reads_whole=True),
        pairs=pairs,
        generates=False,
    )


# Text models that transformers has only as parts of larger models, and the text models that compute the same.
_SAME_AS = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
_OF_PICTURES = ("mrope_section", "mrope_interleaved")  # text has one position in all three directions


def _refuse_pipes(source: str, directory: Path) -> None:
    """Refuse a pipe or a device in the place of a file, because opening or reading it may never end."""
    for path in (*directory.glob("*"), *directory.glob("*/*.json")):
        # guard: pipes in the place of files
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(source, f"{path.relative_to(directory)} is neither a file nor a folder")


def _check_text_config(source: str, config: PreTrainedConfig) -> None:
    """Refuse a configuration with a text model's fields if its kind of model has no text model."""
    try:
        parts = [config.get_text_config(), config.get_text_config(decoder=True)]
    except Exception as fault:
        raise ModelError(source, f"config.json does not name one text model: {one_line(fault)}") from fault
    # guard: a text model's configuration
    if not all(isinstance(part, PreTrainedConfig) for part in parts):
        raise ModelError(source, f"config.json has a text_config; models of the kind {config.model_type} have none")


def _text_model(config: Any) -> Any:
    """Return the text model's configuration if the model also reads pictures and its text model can run alone."""
    text: Any = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder:
        return None
    if (same := _SAME_AS.get(text.model_type)) is not None:
        fields = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
        rope = {name: value for name, value in (text.rope_parameters or {}).items() if name not in _OF_PICTURES}
        text = AutoConfig.for_model(same, **{**fields, "rope_parameters": rope})
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    return text if kind is not None and described(kind) else None


def _supported_class(source: str, config: PreTrainedConfig) -> Any:
    """Return the model's subclass of PreTrainedModel, after checking that it can run here."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(source, f"{kind} is an encoder-decoder; only decoder-only causal models are served")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(source, f"transformers has no causal language model of the kind {kind}")
    written = getattr(config, "architectures", None) or [model_class.__name__]
    scoring: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if is_classifier(config) and scoring is not None:
        if not issubclass(scoring, GenericForSequenceClassification):
            raise ModelError(source, f"its weights are a {written[0]}, whose head is not one linear of the last state")
    elif any(name.endswith(("Classification", "Answering", "MaskedLM", "RewardModel")) for name in written):
        raise ModelError(source, f"its weights are a {written[0]}, which is not a causal language model")
    if getattr(model_class, "_is_stateful", False) and model_class.__name__ not in RECURRENT:
        served = ", ".join(sorted(RECURRENT))
        raise ModelError(source, f"{kind} has a recurrent state; the served models with a state are: {served}")
    if not _is_replaceable(model_class) and not described(model_class):
        raise ModelError(source, _not_replaceable(model_class))
    return model_class


def _is_replaceable(model_class: Any) -> bool:
    """Return whether a module's attention can be replaced; some modules allow that without declaring it."""
    return model_class.__name__ in RECURRENT or bool(model_class.is_backend_compatible())


def _not_replaceable(model_class: Any) -> str:
    """Return the reason why a module cannot attend over blocks of KV, and the missing feature."""
    name = model_class.__name__
    if described(model_class):
        return f"the attention of transformers' {name} cannot be replaced: only the native runner, on a CPU, runs it"
    return (
        f"the attention of transformers' {name} cannot be replaced, and the native runner does not know it: "
        f"{LACKING.get(name, 'it has no Architecture')} (nif/native/README.md says how to add one)"
    )


def _load_weights(source: str, files: _Files, dtype: str, device: Device) -> PreTrainedModel:
    """Return the module with its weights, from safetensors or from dequantised tensors."""
    numbers = getattr(torch, dtype)
    settings: dict[str, Any] = {"config": files.config, "dtype": numbers, "attn_implementation": ATTENTION_NAME}
    try:
        if isinstance(files, _Directory) and files.quantisation is None and not files.is_part:
            place, settings["use_safetensors"] = files.directory, True
        else:
            place, weights = None, files.weights()
            names = [name for name in weights.names() if not left_out(name)]
            stored = {name: weights.tensor(name).whole().to(numbers) for name in names}
            settings["state_dict"] = _merged(files, stored)
        hf, report = files.model_class.from_pretrained(place, output_loading_info=True, **settings)
    except ModelError:
        raise
    except Exception as fault:
        raise ModelError(source, f"its weights cannot be read: {one_line(fault)}") from fault
    # transformers fills missing tensors with random numbers, and ignores tensors that the module does not have.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    unused, config = set(report["unexpected_keys"]), files.config.get_text_config(decoder=True)
    unused |= {name for name in files.weights().names() if left_out(name)}
    unused -= {"score.weight", "score.bias"} if is_classifier(files.config) else set()
    check_all_used(source, config, files.weights(), set(files.weights().names()) - unused)
    check_finite(source, hf)
    page_convolutions(hf)
    page_recurrences(hf)
    model: PreTrainedModel = hf.eval().requires_grad_(False).to(str(device))
    return model


def _merged(files: _Files, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge tensors as the module has them, in place."""
    make = ARCHITECTURES.get(files.model_class.__name__)
    if make is not None:
        architecture = make(files.config)
        if architecture.experts is not None:
            _merge_experts(architecture.experts, tensors)
        if architecture.latent is not None:
            _merge_latents(architecture.latent, tensors)
    return tensors


def _merge_experts(experts: ExpertNames, tensors: dict[str, torch.Tensor]) -> None:
    """Merge each layer's gates and ups."""
    if experts.transposed:
        _stack_experts(experts, tensors)
    for suffix, whole in ((".weight", experts.whole), (".bias", [f"{name}_bias" for name in experts.whole])):
        *inputs, downs = (name + suffix for name in experts.stacked)
        for name in [name for name in tensors if name.endswith(inputs[0])]:
            start = name.removesuffix(inputs[0])
            parts = [tensors.pop(start + part) for part in inputs]
            down = tensors.pop(start + downs)
            if experts.transposed:  # gates and ups alternate, and inputs come before outputs
                merged = torch.stack(parts, dim=2).flatten(1, 2)
                is_matrix = merged.dim() == 3
                merged, down = (x.transpose(1, 2).contiguous() if is_matrix else x for x in (merged, down))
            else:
                merged = torch.cat(parts, dim=1)
            tensors[start + whole[0]], tensors[start + whole[1]] = merged, down


def _merge_latents(latent: LatentNames, tensors: dict[str, torch.Tensor]) -> None:
    """Merge each layer's matrices of keys and of values."""
    ends = f"{latent.keys}.weight", f"{latent.values}.weight"
    for name in [name for name in tensors if name.endswith(ends[0])]:
        start = name.removesuffix(ends[0])
        keys, values = (tensors.pop(start + end) for end in ends)
        whole = torch.cat((keys.transpose(1, 2), values), dim=1)  # head by head
        tensors[f"{start}{latent.keys_values}.weight"] = whole.flatten(0, 1)


def _stack_experts(experts: ExpertNames, tensors: dict[str, torch.Tensor]) -> None:
    """Stack the matrices of separate experts into one tensor, in place."""
    for single, stacked in zip(experts.single, experts.stacked, strict=True):
        first = f"{single.format(0)}.weight"
        for name in [name for name in tensors if name.endswith(first)]:
            start = name.removesuffix(first)
            parts = [tensors.pop(f"{start}{single.format(i)}.weight") for i in range(experts.count)]
            tensors[f"{start}{stacked}.weight"] = torch.stack(parts)
