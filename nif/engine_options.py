"""EngineOptions: the model, its runner and its memory, with all defaults in one place. Imports no torch.

GraphOptions, a part of them, sets how decode steps are captured as CUDA graphs, and in which sizes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from genbatch.nif.errors import OptionError

RUNNERS = ("auto", "native", "triton", "torch")
QUANTIZE = ("auto", "none", "int8", "fp8", "int4")
# Formats that only the GPU's kernels multiply; all others exist on CPUs, too.
GPU_ONLY = ("fp8",)
OWN_DRAFT = "self"
"""The value of the option `draft` for the multi-token head in the model's own files."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "float8")
FLOAT8 = "float8"
"""The format of keys and values that only a GPU has."""
POOLING = ("", "last", "mean", "cls", "rank")


class CpuDefault(int):
    """The default of an option on a CPU. A GPU has another one, and replaces this value only.

    `on_device` of the options leaves plain numbers.
    """


def sent_fields(options: Any) -> dict[str, Any]:
    """Return the fields of an options dataclass that another process needs to make equal options.

    Defaults of a CPU are left out: the other process has the same ones, and must know that they were not given.
    """
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.init}
    return {name: value for name, value in values.items() if not isinstance(value, CpuDefault)}


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The padded size of a step.

    Args:
        num_tokens: rows of one token each.
        kv_len: the positions that every row's block table covers.
    """

    num_tokens: int
    kv_len: int


MOST_CAPTURED_TOKENS = 2048
"""Of a step with prompts: with more, the GPU takes longer than the host takes to launch the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Settings for capturing steps.

    Args:
        q_padding_interval_size, kv_padding_interval_size, max_cached_graphs: as in EngineOptions.
        max_batch_size: larger steps run eagerly.
        max_prompt_tokens: steps with prompts of more tokens run eagerly; 0 captures none.
    """

    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 64
    max_batch_size: int = 256
    max_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        for option, least in (
            ("q_padding_interval_size", 0),
            ("kv_padding_interval_size", 0),
            ("max_cached_graphs", 1),
            ("max_batch_size", 1),
            ("max_prompt_tokens", 0),
        ):
            if getattr(self, option) < least:
                raise OptionError(option, f"must be at least {least}, not {getattr(self, option)}")

    def row_sizes(self) -> list[int]:
        """Return the padded numbers of rows, ascending: at most `max_cached_graphs`."""
        limit, interval = self.max_batch_size, self.q_padding_interval_size
        sizes = list(range(interval, limit, interval)) if interval else [1, 2, 4, *range(8, limit, 8)]
        sizes = [size for size in sizes if size < limit] + [limit]
        # The largest stays, so that every step has a size.
        return sizes[::-1][:: -(-len(sizes) // self.max_cached_graphs)][::-1]

    def prompt_sizes(self) -> list[int]:
        """Return the padded numbers of tokens of steps with prompts, ascending; padding is a fifth at most from 256."""
        limit = self.max_prompt_tokens
        sizes = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, limit, 256)]
        return [size for size in sizes if size < limit] + ([limit] if limit else [])

    def key(self, num_tokens: int, max_kv_len: int, longest: int) -> GraphKey | None:
        """Return the size that a step is padded to; None for a step with more rows than any size.

        Args:
            max_kv_len: the positions of the step's longest sequence.
            longest: the most positions that a sequence may have.
        """
        if num_tokens > self.max_batch_size:
            return None
        rows = next(size for size in self.row_sizes() if size >= num_tokens)
        interval = self.kv_padding_interval_size or longest
        return GraphKey(rows, min(-(-max_kv_len // interval) * interval, longest))

    def captured_keys(self, longest: int) -> list[GraphKey]:
        """Return the sizes to capture at the start, the largest first: smaller graphs then fit into its memory."""
        kv_len = min(self.kv_padding_interval_size or longest, longest)
        return [GraphKey(rows, kv_len) for rows in reversed(self.row_sizes())]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The model, its runner and its KV memory.

    Args:
        model_path: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        served_model_name: the name that clients see and ask for; the default is the model's own name.
        chat_template: a file with the chat template to use; the default is the model's own template.
        dtype: "auto", "float32", "bfloat16" or "float16"; "auto" is bfloat16 where the GPU has it, else float32.
        n_gpu_layers: -1 puts all layers on the GPU if there is one, 0 keeps all on the CPU.
        main_gpu: the number of the GPU to use, on a machine with several.
        runner: "auto" takes the fastest runner that supports the model on this machine; "native" (C, CPU), "triton"
            (GPU) and "torch" take that runner or refuse to start.
        quantize: "none" computes in the dtype. "int8" and "int4" store weights in that many bits; the native runner
            then also computes with 8-bit activations and 8-bit KV. "auto" is "int8" on the native runner with dtype
            "auto", and "none" elsewhere. On a GPU "int8", "fp8" and "int4" pack only the weights, and need a model of
            the Llama family.
        kv_cache_dtype: the numbers of cached keys and values: "float32", "bfloat16" or "int8" on the native runner,
            "float8" (E4M3, without scales) on a GPU. "auto" is 8 bits on the native runner with quantize "int8" and
            "int4", else the dtype. "int8" beside exact weights fits 3.7 times as many positions into the same memory
            as "float32", and "float8" twice as many as "bfloat16".
        pooling: how hidden states become an embedding: "last", "mean" or "cls"; "rank" scores documents by the
            probability of the answer "yes", as Qwen3-Reranker does. The default follows the model's files; most files
            name no pooling.
        n_threads: threads of a step on the CPU; 0 takes all cores that this process may use.
        tensor_parallel: number of processes that share the model, each with a part of every layer, and each with a GPU
            of its own if the machine has any. Needs a model of the Llama family, and computes in torch.
        use_cuda_graph: capture decode steps at the start and replay them; needs a GPU and a model of the Llama family.
            The default captures where that is possible.
        batch_invariant: on a GPU, make a request's logits independent of the rest of the batch, bit for bit; slower.
            Without it the last bits may differ. On a CPU, native kernels are always independent, and torch may differ.
        q_padding_interval_size: pad the tokens of a captured step to a multiple of this number; 0 pads to 1, 2, 4, 8
            and then to multiples of 8.
        kv_padding_interval_size: 0 captures at the start, for every length. Otherwise the longest sequence's length is
            padded to a multiple of this number, and a graph for a longer length is captured when it is needed.
        max_cached_graphs: most graphs to keep. With fewer graphs than sizes, steps are padded further. If lengths are
            padded, too, the least recently used graph is dropped.
        n_ctx: positions in the KV pool, for all sequences together; 0 takes as many as fit into `max_memory_percent` of
            the free memory, as a GPU does if nothing is given.
        num_blocks: blocks of the KV pool, in place of `n_ctx`.
        max_tokens_in_cache: an upper bound on the positions in the KV pool (TensorRT-LLM's maxTokens).
        max_memory_percent: the fraction of the free memory that the pool and a step may take, after the model is
            loaded.
        block_size: positions in a KV block; transformers calls it page_size.
        cap_per_sequence: limit a sequence to n_ctx / n_parallel positions.
        allow_block_sharing: reuse finished blocks by content (the prefix cache).
        prefix_cache_dir: a folder for the prefix cache's blocks, so that prompts of before a restart are not evaluated
            again. Only this user may write to it. Off if not given. For the native runner, and models without windows
            and recurrent layers.
        prefix_cache_space: GiB that the folder may take; the blocks that were used longest ago are removed.
        lora: a LoRA adapter to load, as NAME=DIR: the name that requests give as their model, and a directory that PEFT
            wrote. More adapters can be loaded while the service runs.
        max_loras: most adapters at the same time.
        max_lora_rank: the largest rank of an adapter.
        weights_cache: GiB on disk for packed weights, all models together; 0 keeps none. The next engine maps them and
            so starts at once, and engines of the same model share them in memory. The files that were used longest ago
            are removed. They are in the cache directory ($GENBATCH_CACHE), for the native runner alone.
        draft: a smaller model with the same vocabulary, named like `model_path`; or Gemma 4's assistant for the model;
            or "self" for the multi-token head (MTP) in the model's own files (Qwen3.5 and 3.6, Qwen3-Next, GLM-4.5,
            DeepSeek-V3). It guesses several tokens while at most four requests decode, and a step of the model verifies
            them. Answers do not change. Drafting stops where it does not pay. Needs the native runner.
    """

    model_path: str = "smollm2"
    served_model_name: str = ""
    chat_template: str = ""
    dtype: str = "auto"
    n_gpu_layers: int = -1
    main_gpu: int = 0
    runner: str = "auto"
    quantize: str = "none"
    kv_cache_dtype: str = "auto"
    pooling: str = ""
    n_threads: int = 0
    tensor_parallel: int = 1
    use_cuda_graph: bool | None = None
    batch_invariant: bool = False
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 64
    n_ctx: int | None = CpuDefault(8192)
    num_blocks: int | None = None
    max_tokens_in_cache: int | None = None
    max_memory_percent: float = 0.9
    block_size: int = 16
    cap_per_sequence: bool = False
    allow_block_sharing: bool = True
    prefix_cache_dir: str = ""
    prefix_cache_space: float = 8.0
    lora: Sequence[str] = ()
    max_loras: int = 32
    max_lora_rank: int = 128
    weights_cache: float = 8.0
    draft: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value out of range; the error names it.
        """
        if self.runner not in RUNNERS:
            raise OptionError("runner", f"{self.runner!r} is none of {', '.join(RUNNERS)}")
        if self.quantize not in QUANTIZE:
            raise OptionError("quantize", f"{self.quantize!r} is none of {', '.join(QUANTIZE)}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise OptionError("kv_cache_dtype", f"{self.kv_cache_dtype!r} is none of {', '.join(KV_DTYPES)}")
        check_dtype(self.dtype)
        check_gpu_layers(self.n_gpu_layers)
        if self.pooling not in POOLING:
            raise OptionError("pooling", f"{self.pooling!r} is none of {', '.join(filter(None, POOLING))}")
        if self.n_ctx is not None and self.n_ctx < 0:
            raise OptionError("n_ctx", f"must be at least 1, or 0 for what the memory holds, not {self.n_ctx}")
        for option in ("block_size", "tensor_parallel", "max_loras", "max_lora_rank"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be at least 1, not {getattr(self, option)}")
        for option in ("n_threads", "main_gpu", "weights_cache", "prefix_cache_space"):
            if not getattr(self, option) >= 0:  # also refuses NaN
                raise OptionError(option, f"must be at least 0, not {getattr(self, option)}")
        if isinstance(self.lora, str):
            raise OptionError("lora", f"must be a list of NAME=DIR, not {self.lora!r}")
        for source in self.lora:
            if not all(source.partition("=")):
                raise OptionError("lora", f"{source!r} is not NAME=DIR")
        self.graphs(1, 1)

    def on_device(self, kind: str) -> "EngineOptions":
        """Return the options with the defaults of a kind of device: "cpu" or "cuda"."""
        if not isinstance(self.n_ctx, CpuDefault):
            return self
        return replace(self, n_ctx=0 if kind == "cuda" else int(self.n_ctx))

    @property
    def positions(self) -> int | None:
        """Return the positions that `n_ctx` sets; None if only memory and the other limits bound the pool."""
        return self.n_ctx or None

    def graphs(self, num_sequences: int, num_tokens: int) -> GraphOptions:
        """Return the settings for capturing steps of at most `num_sequences` sequences and `num_tokens` tokens.

        Raises:
            OptionError: a padding or a count is out of range.
        """
        return GraphOptions(
            q_padding_interval_size=self.q_padding_interval_size,
            kv_padding_interval_size=self.kv_padding_interval_size,
            max_cached_graphs=self.max_cached_graphs,
            max_batch_size=num_sequences,
            max_prompt_tokens=min(num_tokens, MOST_CAPTURED_TOKENS),
        )


def check_dtype(name: str) -> None:
    """Check that the dtype exists.

    Raises:
        OptionError: the dtype does not exist; the message suggests the likely one.
    """
    if name not in DTYPES:
        meant = _OTHER_DTYPES.get(name.lower())
        hint = f"; did you mean {meant}?" if meant else ""
        raise OptionError("dtype", f"{name!r} is none of {', '.join(DTYPES)}{hint}")


_OTHER_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float", "full"), "float32"),
    **dict.fromkeys(("bf16", "bfp16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
}


def check_gpu_layers(n_gpu_layers: int) -> None:
    """Check that all layers run on one device.

    Raises:
        OptionError: the layers would be split between GPU and CPU; the message names the alternatives.
    """
    if n_gpu_layers not in (-1, 0) or isinstance(n_gpu_layers, bool):
        raise OptionError(
            "n_gpu_layers",
            f"{n_gpu_layers!r} is not possible: layers are not split between GPU and CPU. Take -1 for all of them on "
            "the GPU, or 0 for none: a model too large for the GPU runs on the CPU, smaller with quantize=int8",
        )


def is_torchrun() -> bool:
    """Return whether `torchrun`, or a similar launcher, started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def torchrun_rank(options: EngineOptions) -> int:
    """Return this process's rank; 0 without a launcher.

    Raises:
        OptionError: torchrun started another number of ranks than `tensor_parallel`.
    """
    if options.tensor_parallel == 1 or not is_torchrun():
        return 0
    size = int(os.environ["WORLD_SIZE"])
    if size != options.tensor_parallel:
        raise OptionError("tensor_parallel", f"{options.tensor_parallel}, and torchrun started {size} ranks")
    return int(os.environ["RANK"])
