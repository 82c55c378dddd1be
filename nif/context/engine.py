"""Engine: holds a loaded model and opens contexts over it. An Engine survives a restart of the Batcher."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from genbatch.nif.context.context import Context
from genbatch.nif.context.draft_model import MAX_CATCH_UP, NUM_SLOTS, DraftModel
from genbatch.nif.context.drafters import DRAFTED_SEQUENCES
from genbatch.nif.cuda_device import choose_device, has_gpu
from genbatch.nif.engine_options import FLOAT8, GPU_ONLY, OWN_DRAFT, EngineOptions, check_dtype
from genbatch.nif.errors import AdapterError, ModelError, OptionError
from genbatch.nif.host import available_cores, free_host_memory
from genbatch.nif.kv.cache_size import CacheLimits, CacheSize, FreeMemory, StepShape, cache_size, gpu_memory
from genbatch.nif.kv.disk_cache import DiskCache
from genbatch.nif.kv.offload import fingerprint
from genbatch.nif.models.architecture import heads_of, widest_mlp
from genbatch.nif.models.assistants import describe_assistant, is_assistant, layers_read
from genbatch.nif.models.hub import Progress
from genbatch.nif.models.loaded_model import DTYPES, Model
from genbatch.nif.models.lora import AdapterLimits, Adapters
from genbatch.nif.models.model_names import written_path
from genbatch.nif.models.model_source import ModelSource, no_progress, resolve_model
from genbatch.nif.models.warm_model import files_identity, keep_model, kept_model
from genbatch.nif.native.build import NativeUnavailable, build_library
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.pooling import RANK
from genbatch.nif.runner import HoldsMemory, KnowsStep, ReadsBlocks, Runner
from genbatch.nif.sampling.choice import choice_bytes
from genbatch.nif.text.templates import ChatTemplateError
from genbatch.nif.text.tokenizer import check_template
from genbatch.nif.trusted_files import NotOurs

log = logging.getLogger("genbatch")


class Engine:
    """A model in memory; `open_context` gives each new Batcher a fresh KV pool."""

    def __init__(
        self, model: Model, options: EngineOptions, new_runner: Callable[[int, int], Runner] | None = None
    ) -> None:
        options = options.on_device(model.device.type)
        self.model = model
        self.options = options
        self._new_runner = new_runner or choose_runner(model, options)
        refusal = None if options.tensor_parallel == 1 else "the ranks of tensor_parallel compute no adapters"
        limits = AdapterLimits(
            max_loras=options.max_loras,
            max_lora_rank=options.max_lora_rank,
            max_memory_percent=options.max_memory_percent,
        )
        # Do not empty torch's cache here: a running service may be in the middle of a step.
        self.adapters = Adapters(model, limits, refusal, partial(self._free_memory, collect=False))
        self.draft: Engine | None = None  # the draft model

    def rename(self, name: str) -> None:
        """Rename the model. Call this before opening the first context."""
        self.model = replace(self.model, name=name)
        self.adapters.base = name

    def open_context(self, *, n_parallel: int, n_held: int, n_batch: int) -> Context:
        """Open a context without sequences.

        Args:
            n_parallel: number of sequences for callers.
            n_held: number of sequences for held prompts.
            n_batch: most tokens of one forward.

        Raises:
            OptionError: an option is out of range, or the pool does not fit into memory.
        """
        if n_parallel < 1:
            raise OptionError("n_parallel", f"must be at least 1, not {n_parallel}")
        drafter, reserved = self._open_drafter(n_batch)
        try:
            context = self._open_context(n_parallel, n_held, n_batch, drafter, reserved)
            if self.options.draft and not (context.can_verify and context.drafter is not None):
                context.runner.close()
                lacks = "has no multi-token head" if context.can_verify else "cannot verify drafts exactly"
                raise OptionError("draft", f"the runner {context.runner.name} {lacks}")
        except BaseException:
            if drafter is not None:
                drafter.close()
            raise
        return context

    def _open_drafter(self, n_batch: int) -> tuple[DraftModel | None, int]:
        """Open the draft model's context; return it with the host memory to reserve for it."""
        if self.draft is None:
            return None, 0
        draft, n_batch = self.draft, min(n_batch, MAX_CATCH_UP * DRAFTED_SEQUENCES)
        context = draft._open_context(NUM_SLOTS, 0, n_batch, None, 0)
        size = draft._cache_size(context.runner, NUM_SLOTS, 0, n_batch)
        # A GPU's free memory shows the draft model's pool at once, the host's only once it is used.
        reserved = size.footprint.total if draft.model.device.type == "cpu" else 0
        return DraftModel(context, self.model.vocab_size), reserved

    def _open_context(
        self, n_parallel: int, n_held: int, n_batch: int, drafter: DraftModel | None, reserved: int
    ) -> Context:
        options = self.options
        runner = self._new_runner(n_parallel, n_batch)
        size = self._cache_size(runner, n_parallel, n_held, n_batch, reserved)
        is_free = options.positions is None and options.num_blocks is None and options.max_tokens_in_cache is None
        if size.limited_by not in ("n_ctx", "num_blocks") and not is_free:
            log.warning("the KV pool is limited by %s to %d blocks", size.limited_by, max(size.num_blocks))
        if self.model.max_position < (options.positions or 0):
            told = "%s was made for %d positions a sequence; n_ctx, %d, is for all sequences together"
            log.info(told, self.model.name, self.model.max_position, options.positions)
        return Context(
            self.model,
            runner,
            n_ctx=size.positions,
            num_blocks=size.num_blocks,
            n_parallel=n_parallel,
            n_held=n_held,
            block_size=options.block_size,
            n_batch=n_batch,
            max_per_sequence=max(1, (options.positions or size.positions) // n_parallel)
            if options.cap_per_sequence
            else None,
            allow_block_sharing=options.allow_block_sharing,
            adapters=self.adapters,
            drafter=drafter,
            disk=self._open_disk(runner),
        )

    def _open_disk(self, runner: Runner) -> DiskCache | None:
        """Open the prefix cache on disk; logs the reason if there is none in spite of the option."""
        options, groups = self.options, runner.groups
        if not options.prefix_cache_dir:
            return None
        reason: object = None
        if not options.allow_block_sharing:
            reason = "allow_block_sharing is off"
        elif not isinstance(runner, ReadsBlocks):
            reason = f"it needs the native runner, and {self.model.name} runs in {runner.name}"
        elif len(groups) > 1 or groups[0].window is not None:
            reason = f"{self.model.name} has layers with windows or states"
        else:
            digest = hashlib.sha256(fingerprint(self.model, runner, options.block_size).encode())
            digest.update(f"{runner.kernels} {self.model.identity}".encode())
            max_bytes = int(options.prefix_cache_space * 2**30)
            num_bytes = runner.bytes_per_block(0, options.block_size)
            try:
                return DiskCache(written_path(options.prefix_cache_dir), digest.hexdigest(), max_bytes, num_bytes)
            except (NotOurs, OSError) as fault:
                reason = fault
        log.warning("there is no prefix cache on disk: %s", reason)
        return None

    def _cache_size(self, runner: Runner, n_parallel: int, n_held: int, n_batch: int, reserved: int = 0) -> CacheSize:
        options = self.options
        own = reserved
        own += runner.own_bytes(n_parallel, options.block_size) if isinstance(runner, HoldsMemory) else 0
        own += sum(adapter.nbytes for adapter in self.adapters.values())  # as the runner will pack them
        step = self._step_shape(runner, n_parallel, n_held, n_batch)
        limits = CacheLimits(
            max_memory_percent=options.max_memory_percent,
            max_tokens=options.max_tokens_in_cache,
            n_ctx=options.positions if options.num_blocks is None else None,
            num_blocks=options.num_blocks,
        )
        groups = range(len(runner.groups))
        return cache_size(
            replace(step, runner_bytes=own),
            runner.groups,
            [runner.bytes_per_block(group, options.block_size) for group in groups],
            block_size=options.block_size,
            memory=FreeMemory(self._free_memory, self._describe_memory),
            limits=limits,
        )

    def _free_memory(self, *, collect: bool = True) -> int | None:
        """Return the bytes that the pool and a step may use. Ranks have a GPU each, or share this host."""
        if self.model.device.type == "cuda":
            return self.options.tensor_parallel * gpu_memory(self.model.device, collect=collect).usable
        return free_host_memory()

    def _describe_memory(self) -> str:
        """Describe the device's memory for an error message."""
        return str(gpu_memory(self.model.device, collect=False)) if self.model.device.type == "cuda" else ""

    def _step_shape(self, runner: Runner, n_parallel: int, n_held: int, n_batch: int) -> StepShape:
        config = self.model.config
        attending = [layer for layer in self.model.layers if layer.value_dim]  # short convolutions have no values
        hidden, num_sequences = config.hidden_size, n_parallel + n_held
        # A request for a prompt's log-probabilities needs the logits of every token of a step.
        logit_rows = max(num_sequences, n_batch)
        shape = StepShape(
            hidden_size=hidden,
            intermediate_size=widest_mlp(config),
            num_heads=heads_of(config),
            num_kv_heads=max((layer.num_kv_heads for layer in attending), default=1),
            head_dim=max((max(layer.key_dim, layer.value_dim) for layer in attending), default=1),
            vocab_size=self.model.vocab_size,
            dtype_bytes=DTYPES[self.model.dtype],
            max_batch_tokens=n_batch,
            num_sequences=num_sequences,
            logit_rows=logit_rows,
            max_positions=min(self.model.max_position, self.options.positions or self.model.max_position),
            choice_bytes=choice_bytes(n_parallel, logit_rows, self.model.vocab_size),
        )
        if isinstance(runner, KnowsStep):
            # Such a runner computes in float32 for every dtype of the weights.
            return replace(shape, dtype_bytes=4, step_bytes=runner.step_bytes(n_batch, num_sequences))
        from genbatch.nif.runners.torch_runner import TorchRunner

        if isinstance(runner, TorchRunner):
            return replace(shape, score_bytes=runner.score_bytes)
        return shape if self.options.tensor_parallel > 1 else replace(shape, score_bytes=0)


def load_engine(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Load the model that the options name; raises the errors of `load_model` and `choose_runner`."""
    template = read_template(options.chat_template)
    engine = _load_engine(options, progress)
    if options.served_model_name:
        engine.rename(options.served_model_name)
    if template is not None:
        engine.model.tokenizer.set_template(template)
    if engine.model.tokenizer.has_chat_template:
        engine.model.tokenizer.renderer.prepare()
    load_adapters(engine, options.lora)
    if options.draft not in ("", OWN_DRAFT):
        assistant = _find_assistant(options.draft, progress)
        if assistant is not None:
            _add_assistant(engine, assistant)
        else:
            engine.draft = _load_draft(engine.model, options, progress)
    return engine


def _find_assistant(source: str, progress: Progress | None) -> ModelSource | None:
    """Return the files that the option `draft` names if they are an assistant's."""
    try:
        found = resolve_model(source, progress or no_progress)
        return found if is_assistant(found) else None
    except ModelError as error:
        raise OptionError("draft", str(error)) from error


def _add_assistant(engine: Engine, found: ModelSource) -> None:
    """Let an assistant predict for the engine's model, in the model's own numbers.

    Raises:
        OptionError: the runner is not native, or the assistant cannot be read or was made for another model.
    """
    options, new_runner = engine.options, engine._new_runner
    if not isinstance(new_runner, NativeRunners):
        reason = f"{found.name} is an assistant, which needs the native runner; {engine.model.name} runs without it"
        raise OptionError("draft", reason)
    try:
        assistant = describe_assistant(options.draft, found, engine.model, files_identity(found))
        layers_read(assistant, engine.model)  # before anything is packed
        cache_bytes = int(options.weights_cache * 2**30)
        new_runner.weights.add_assistant(ModelWeights(assistant, _quantize(options), cache_bytes=cache_bytes))
    except (ModelError, NativeUnavailable) as error:
        raise OptionError("draft", str(error)) from error


# The share of token ids that may mean other texts in the draft model's vocabulary.
_OTHER_TOKENS = 0.01


def _load_draft(model: Model, options: EngineOptions, progress: Progress | None) -> Engine:
    """Load the draft model, in the fastest numbers: a draft changes no answer.

    Raises:
        OptionError: the draft model cannot be loaded, draws no tokens, or has another vocabulary.
    """
    if options.tensor_parallel > 1:
        raise OptionError("draft", "a model that tensor_parallel shares out has no draft model")
    try:
        draft = _load_engine(
            EngineOptions(
                model_path=options.draft,
                n_gpu_layers=options.n_gpu_layers,
                main_gpu=options.main_gpu,
                quantize="auto",
                n_threads=options.n_threads,
                n_ctx=options.n_ctx,
                max_memory_percent=options.max_memory_percent,
                block_size=options.block_size,
                weights_cache=options.weights_cache,
            ),
            progress,
        )
    except ModelError as error:
        raise OptionError("draft", str(error)) from error
    if not draft.model.generates:
        raise OptionError("draft", f"{draft.model.name} draws no tokens")
    ours, theirs = model.tokenizer.backend.get_vocab(), draft.model.tokenizer.backend.get_vocab()
    num_others = sum(theirs.get(text) != token_id for text, token_id in ours.items())
    if num_others > _OTHER_TOKENS * len(ours):
        reason = f"{draft.model.name} has another vocabulary: {num_others} of {len(ours)} tokens differ"
        raise OptionError("draft", reason)
    return draft


def load_adapters(engine: Engine, sources: Sequence[str]) -> None:
    """Load adapters from sources of the form NAME=DIR.

    Raises:
        OptionError: an adapter cannot be served; the reason names the adapter, its file, and the field or the tensor.
    """
    for source in sources:
        name, _, directory = source.partition("=")
        try:
            engine.adapters.add(engine.adapters.read(name, Path(directory)))
        except AdapterError as error:
            raise OptionError("lora", str(error)) from error


def read_template(path: str) -> str | None:
    """Read a chat template's file; the path "" gives None.

    Raises:
        OptionError: the file cannot be read, or is no chat template.
    """
    if not path:
        return None
    try:
        template = written_path(path).read_text(encoding="utf-8-sig")
        check_template(template)
    except (OSError, UnicodeDecodeError, ChatTemplateError) as error:
        raise OptionError("chat_template", f"{path} is not a chat template: {error}") from error
    return template


def _load_engine(options: EngineOptions, progress: Progress | None) -> Engine:
    if options.tensor_parallel > 1:
        if options.pooling:
            raise OptionError("pooling", "a model that tensor_parallel shares out gives no embeddings and no scores")
        _refuse_kv_dtype(options, "the ranks of tensor_parallel keep keys and values in the model's dtype")
        from genbatch.nif.context.tensor_parallel import open_ranks

        # Each rank keeps only its share, so no GPU ever holds the whole model.
        load = partial(_load_model, options.model_path, dtype=options.dtype, n_gpu_layers=0, progress=progress)
        shard, new_runner = open_ranks(options, load)
        return Engine(shard, options, lambda *_: new_runner())
    on_cpu, reason = options.n_gpu_layers == 0 or not has_gpu(), None
    if on_cpu and options.runner in ("auto", "native") and options.pooling in ("", RANK):
        report = progress or no_progress
        found = resolve_model(options.model_path, report)
        # Before anything is read, so that files that change meanwhile have another identity.
        identity = "" if options.pooling else files_identity(found)
        model = _described(options, found, report)
        if model is not None:
            model = replace(model, identity=identity)
            try:
                build_library(progress=report)
                report("pack", 0, 0)
                engine = Engine(model, options)
                if model.shape is None and model.pooling is None:
                    keep_model(found, model)
                return engine
            except NativeUnavailable as unavailable:
                reason = unavailable.reason
    packs = not on_cpu and options.runner in ("auto", "triton") and packs_weights(options)
    try:
        # Packed weights go to the GPU layer by layer, so the unpacked model need not fit there.
        n_gpu_layers = 0 if packs else options.n_gpu_layers
        model = _load_model(
            options.model_path,
            dtype=options.dtype,
            n_gpu_layers=n_gpu_layers,
            main_gpu=options.main_gpu,
            pooling=options.pooling,
            progress=progress,
        )
    except ModelError as error:
        if reason is None:
            raise
        raise ModelError(error.model, f"{error.reason}; natively: {reason}") from error
    if packs:
        lean_llama = import_module("genbatch.nif.runners.lean_llama")  # needs Triton
        model = lean_llama.pack_model(model, options.quantize, choose_device(-1, options.main_gpu))
    return Engine(model, options)


def _described(options: EngineOptions, found: ModelSource, report: Progress) -> Model | None:
    """Return the model without its weights, from an earlier start's description if one was kept.

    Returns None if `describe_model` does.
    """
    source, dtype = options.model_path, options.dtype
    check_dtype(dtype)

    def describe() -> Model | None:
        from genbatch.nif.models.model import describe_model

        return describe_model(source, dtype=dtype, pooling=options.pooling, progress=report, resolved=found)

    if options.pooling:
        return describe()
    kept = kept_model(source, found, "float32" if dtype == "auto" else dtype, describe)
    if kept is None:
        return describe()
    report("load", 1, 1)
    return kept


def _load_model(source: str, **settings: Any) -> Model:
    """Call `load_model`. It is imported here because it imports transformers for two seconds."""
    from genbatch.nif.models.model import load_model

    return load_model(source, **settings)


def _torch_runner(model: Model, options: EngineOptions) -> Runner:
    from genbatch.nif.runners.torch_runner import TorchRunner

    _limit_threads(model, options)
    return TorchRunner(model)


def _limit_threads(model: Model, options: EngineOptions) -> None:
    """Let torch compute on as many threads as the options say."""
    import torch

    if model.device.type == "cpu":
        torch.set_num_threads(options.n_threads or min(torch.get_num_threads(), available_cores()))


def packs_weights(options: EngineOptions) -> bool:
    """Whether the options ask for packed weights on a GPU."""
    return options.quantize not in ("auto", "none")


def choose_runner(model: Model, options: EngineOptions) -> Callable[[int, int], Runner]:
    """Return a function that makes a new context's runner from the most sequences that decode at once.

    The weights are packed once, during this call.

    Raises:
        OptionError: the runner or the quantisation asked for cannot run this model here.
        NativeUnavailable: the model's weights are in its files, and the native runner cannot pack them.
    """
    if options.tensor_parallel > 1:
        raise OptionError("tensor_parallel", f"{model.name} is loaded whole in this process; load it with load_engine")
    on_gpu = model.device.type == "cuda"
    if model.pooling is not None and model.pooling.needs_states:
        return _pooling_runner(model, options)
    if options.use_cuda_graph and not (on_gpu and options.runner in ("auto", "triton")):
        where = f"{model.name} is on {model.device} with runner {options.runner}"
        raise OptionError("use_cuda_graph", f"CUDA graphs need the triton runner on a GPU, and {where}")
    if options.runner == "triton" or (options.runner == "auto" and on_gpu):
        return _triton(model, options)
    if options.runner == "torch" or on_gpu:
        _refuse_formats(options, "the torch runner computes in the model's dtype")
        return lambda *_: _torch_runner(model, options)
    if options.quantize in GPU_ONLY:
        raise OptionError("quantize", f"{options.quantize} is for the triton runner on a GPU; a CPU has int8 and int4")
    if options.kv_cache_dtype == FLOAT8:
        raise OptionError("kv_cache_dtype", f"{FLOAT8} is for the triton runner on a GPU; a CPU has int8")
    try:
        cache_bytes = int(options.weights_cache * 2**30)
        weights = ModelWeights(model, _quantize(options), cache_bytes=cache_bytes, mtp=options.draft == OWN_DRAFT)
    except NativeUnavailable as unavailable:
        if model.weights is not None:
            raise  # the caller loads the weights into a module and calls this function again
        if options.runner == "native":
            raise OptionError("runner", f"native cannot run {model.name}: {unavailable.reason}") from unavailable
        _refuse_formats(options, f"the native runner cannot run {model.name}: {unavailable.reason}")
        log.warning("%s runs in torch, about three times slower than natively: %s", model.name, unavailable.reason)
        return lambda *_: _torch_runner(model, options)
    kv_dtype = None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    return NativeRunners(weights, kv_dtype, options.n_threads or None)


@dataclass(frozen=True, slots=True)
class NativeRunners:
    """Makes the native runners of successive contexts, over the same packed weights."""

    weights: ModelWeights
    kv_dtype: str | None
    n_threads: int | None

    def __call__(self, *_: int) -> NativeRunner:
        """Return a new runner."""
        return NativeRunner(self.weights, kv_dtype=self.kv_dtype, n_threads=self.n_threads)


def _pooling_runner(model: Model, options: EngineOptions) -> Callable[[int, int], Runner]:
    """Return the runners for models that read hidden states: only these runners return the states."""
    gives = "embeddings" if model.pooling is None or model.pooling.embeds else "scores by a head of its own"
    reason = f"{model.name} gives {gives}, which torch computes"
    if options.runner not in ("auto", "torch"):
        raise OptionError("runner", f"{options.runner} cannot run it: {reason}")
    if options.use_cuda_graph:
        raise OptionError("use_cuda_graph", reason)
    _refuse_formats(options, reason)
    from genbatch.nif.runners.encoder_runner import EncoderRunner
    from genbatch.nif.runners.torch_runner import TorchRunner

    _limit_threads(model, options)
    runner = EncoderRunner if model.pooling is not None and model.pooling.reads_whole else TorchRunner
    return lambda *_: runner(model)


def _triton(model: Model, options: EngineOptions) -> Callable[[int, int], Runner]:
    if options.kv_cache_dtype != FLOAT8:
        _refuse_kv_dtype(options, f"a GPU keeps keys and values in the model's dtype or in {FLOAT8}")
    if model.device.type != "cuda":
        raise OptionError("runner", f"triton needs a CUDA device, and {model.name} is on {model.device}")
    try:
        from genbatch.nif.runners.lean_llama import is_packed, pack_model, why_not_lean
        from genbatch.nif.runners.triton_runner import Precision, TritonRunner, check_model

        check_model(model)
    except (ImportError, ModelError) as error:
        reason = "triton is not installed" if isinstance(error, ImportError) else error.reason
        if options.runner == "triton" or options.use_cuda_graph:
            raise OptionError("runner", f"triton cannot run {model.name}: {reason}") from error
        _refuse_formats(options, f"triton cannot run {model.name}: {reason}")
        log.info("%s runs in torch: %s", model.name, reason)
        return lambda *_: _torch_runner(model, options)
    quantize = options.quantize if packs_weights(options) else "none"
    if quantize != "none" and not is_packed(model):
        model = pack_model(model, quantize, model.device)
    captures = why_not_lean(model) is None if options.use_cuda_graph is None else options.use_cuda_graph
    # The pool has whole blocks only, so round n_ctx up.
    pinned = options.positions if options.num_blocks is None else None
    in_pool = model.max_position if pinned is None else -(-pinned // options.block_size) * options.block_size
    longest = min(model.max_position, in_pool)
    precision = Precision(quantize, FLOAT8 if options.kv_cache_dtype == FLOAT8 else None)
    return lambda n_parallel, n_batch: TritonRunner(
        model,
        graphs=options.graphs(n_parallel, n_batch) if captures else None,
        longest=longest,
        batch_invariant=options.batch_invariant,
        precision=precision,
    )


def _quantize(options: EngineOptions) -> str:
    """Resolve the option `quantize` for the native runner."""
    if options.quantize != "auto":
        return options.quantize
    return "int8" if options.dtype == "auto" else "none"


def _refuse_formats(options: EngineOptions, reason: str) -> None:
    """Refuse numbers that only another runner has."""
    _refuse_kv_dtype(options, reason)
    if packs_weights(options):
        raise OptionError("quantize", f"{options.quantize} is not possible: {reason}")


def _refuse_kv_dtype(options: EngineOptions, reason: str) -> None:
    if options.kv_cache_dtype != "auto":
        raise OptionError("kv_cache_dtype", f"{options.kv_cache_dtype} is not possible: {reason}")
