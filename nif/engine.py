"""Engine: a loaded model and how contexts over it are made; what survives a restart of the Batcher."""

import logging
from dataclasses import dataclass

from genbatch.nif.context import Context
from genbatch.nif.model import Model, load_model
from genbatch.nif.quiet_transformers import Progress
from genbatch.nif.runner import Runner
from genbatch.nif.torch_runner import TorchRunner

log = logging.getLogger("genbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, where, and how much KV memory.

    Args:
        model_path: a name ("smollm2"), a Hugging Face directory or id, or a .gguf file.
        dtype: "auto", "float32", "bfloat16" or "float16".
        n_gpu_layers: -1 puts all layers on the GPU if there is one, 0 keeps all on the CPU.
        n_ctx: positions in the KV pool, all sequences together.
        block_size: positions a KV block holds.
        cap_per_sequence: whether one sequence may take at most n_ctx / n_parallel positions.
        allow_block_sharing: whether finished blocks are reused by content (the prefix cache).
    """

    model_path: str = "smollm2"
    dtype: str = "auto"
    n_gpu_layers: int = -1
    n_ctx: int = 8192
    block_size: int = 16
    cap_per_sequence: bool = False
    allow_block_sharing: bool = True


@dataclass(frozen=True, slots=True)
class Engine:
    """A model in memory; `open_context` gives each new Batcher a fresh KV pool."""

    model: Model
    options: EngineOptions

    def open_context(self, *, n_parallel: int, n_held: int, n_batch: int) -> Context:
        """A context with no sequences.

        Raises:
            OptionError: an option is out of range.
        """
        options = self.options
        return Context(
            self.model,
            open_runner(self.model),
            n_ctx=options.n_ctx,
            n_parallel=n_parallel,
            n_held=n_held,
            block_size=options.block_size,
            n_batch=n_batch,
            max_per_sequence=options.n_ctx // n_parallel if options.cap_per_sequence else None,
            allow_block_sharing=options.allow_block_sharing,
        )


def load_engine(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Loads the model that the options name; raises as `load_model` does."""
    model = load_model(options.model_path, dtype=options.dtype, n_gpu_layers=options.n_gpu_layers, progress=progress)
    return Engine(model, options)


def open_runner(model: Model) -> Runner:
    """The fastest way to run the model here."""
    return TorchRunner(model)
