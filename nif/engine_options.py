"""EngineOptions: which model, how it is run, and over how much memory, with the defaults in one place. No torch."""

import os
from dataclasses import dataclass

from genbatch.nif.errors import OptionError
from genbatch.nif.runners.graph_options import GraphOptions

RUNNERS = ("auto", "native", "triton", "torch")
QUANTIZE = ("auto", "none", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, how it is run, and how much KV memory it gets.

    Args:
        model_path: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        served_model_name: the name that clients see and ask for; "" is the model's own.
        chat_template: a file with the chat template to use; "" is the model's own.
        dtype: "auto", "float32", "bfloat16" or "float16".
        n_gpu_layers: -1 puts all layers on the GPU if there is one, 0 keeps all on the CPU.
        runner: "auto" takes the fastest that can run the model here; "native" (C, CPU), "triton" (GPU) and "torch"
            insist on one.
        quantize: "none" computes in the dtype; "int8" quantises weights, activations and KV of the native runner;
            "auto" is int8 where that runner runs and dtype is "auto", too: who names a dtype gets its numbers.
        n_threads: threads of a step on the CPU; 0 takes the cores this process may use.
        tensor_parallel: processes that share the model, each with a part of every layer, one a GPU where there are
            any; 1: this one alone. Needs a model of the Llama family, and computes in torch.
        use_cuda_graph: whether decode steps are captured at the start and replayed; needs a GPU and a model of the
            Llama family. None does it where it can be done.
        batch_invariant: whether, on a GPU, a request's logits are the same bit for bit whatever else is in the batch;
            slower. Without it the last bits may differ. On a CPU they never do.
        q_padding_interval_size, kv_padding_interval_size, max_cached_graphs: see GraphOptions.
        n_ctx: positions in the KV pool, all sequences together.
        num_blocks: blocks of the KV pool, where that is to be pinned instead.
        max_tokens_in_cache: positions at most, whatever the other limits say (TensorRT-LLM's maxTokens).
        max_memory_percent: fraction of the free memory, once the model is loaded, that the pool and a step may take.
        block_size: positions a KV block holds; transformers calls it page_size.
        cap_per_sequence: whether one sequence may take at most n_ctx / n_parallel positions.
        allow_block_sharing: whether finished blocks are reused by content (the prefix cache).
    """

    model_path: str = "smollm2"
    served_model_name: str = ""
    chat_template: str = ""
    dtype: str = "auto"
    n_gpu_layers: int = -1
    runner: str = "auto"
    quantize: str = "none"
    n_threads: int = 0
    tensor_parallel: int = 1
    use_cuda_graph: bool | None = None
    batch_invariant: bool = False
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 64
    n_ctx: int = 8192
    num_blocks: int | None = None
    max_tokens_in_cache: int | None = None
    max_memory_percent: float = 0.9
    block_size: int = 16
    cap_per_sequence: bool = False
    allow_block_sharing: bool = True

    def __post_init__(self) -> None:
        """Raises:
        OptionError: a value out of range; the error names it.
        """
        if self.runner not in RUNNERS:
            raise OptionError("runner", f"{self.runner!r} is none of {', '.join(RUNNERS)}")
        if self.quantize not in QUANTIZE:
            raise OptionError("quantize", f"{self.quantize!r} is none of {', '.join(QUANTIZE)}")
        for option in ("n_ctx", "block_size", "tensor_parallel"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be at least 1, not {getattr(self, option)}")
        if self.n_threads < 0:
            raise OptionError("n_threads", f"must be at least 0, not {self.n_threads}")
        self.graphs(1)

    def graphs(self, num_sequences: int) -> GraphOptions:
        """How decode steps of at most so many sequences are captured.

        Raises:
            OptionError: a padding or a count is out of range.
        """
        return GraphOptions(
            q_padding_interval_size=self.q_padding_interval_size,
            kv_padding_interval_size=self.kv_padding_interval_size,
            max_cached_graphs=self.max_cached_graphs,
            max_batch_size=num_sequences,
        )


def is_torchrun() -> bool:
    """Whether `torchrun`, or what does the same, has started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def torchrun_rank(options: EngineOptions) -> int:
    """This process's rank, 0 where nobody started it as one.

    Raises:
        OptionError: torchrun started another number of ranks than the option says.
    """
    if options.tensor_parallel == 1 or not is_torchrun():
        return 0
    size = int(os.environ["WORLD_SIZE"])
    if size != options.tensor_parallel:
        raise OptionError("tensor_parallel", f"{options.tensor_parallel}, and torchrun started {size} ranks")
    return int(os.environ["RANK"])
