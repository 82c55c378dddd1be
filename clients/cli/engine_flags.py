"""The flags that say which model a service runs, how, and over how much memory."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from genbatch.nif.engine_options import EngineOptions

DEFAULT_MODEL = "smollm2"

_MODEL = "Model"
_POOL = "KV pool"
_GRAPHS = "CUDA graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Where and how a model runs: the fields of EngineOptions that every command has."""

    served_model_name: Annotated[
        str,
        typer.Option(metavar="NAME", help="The name that clients see, if not its own.", rich_help_panel=_MODEL),
    ] = ""
    chat_template: Annotated[
        str,
        typer.Option(metavar="FILE", help="A chat template in the place of the model's own.", rich_help_panel=_MODEL),
    ] = ""
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="auto, float32, bfloat16 or float16; auto is bfloat16 where the GPU has it, else float32.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    n_gpu_layers: Annotated[
        int, typer.Option(help="-1: all layers on the GPU if there is one; 0: all on the CPU.", rich_help_panel=_MODEL)
    ] = -1
    runner: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, native (C, CPU), triton (GPU) or torch; auto is the fastest that runs the model here.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    quantize: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="none, int8 (weights and activations of the native runner), or auto: int8 unless --dtype names one.",
            rich_help_panel=_MODEL,
        ),
    ] = "none"
    n_threads: Annotated[
        int, typer.Option(help="Threads of a step on the CPU; 0: the cores there are.", rich_help_panel=_MODEL)
    ] = 0
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that share the model, one a GPU where there are any; needs the Llama family.",
            rich_help_panel=_MODEL,
        ),
    ] = 1
    n_ctx: Annotated[
        int, typer.Option(help="Positions in the KV pool, all sequences together.", rich_help_panel=_MODEL)
    ] = 8192

    def by_name(self) -> dict[str, Any]:
        """Keyword arguments of EngineOptions."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFlags:
    """The KV pool and CUDA graphs: the other fields of EngineOptions."""

    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV pool, instead of n_ctx.", rich_help_panel=_POOL)
    ] = None
    max_tokens_in_cache: Annotated[
        int | None, typer.Option(help="Positions at most, whatever the other limits say.", rich_help_panel=_POOL)
    ] = None
    max_memory_percent: Annotated[
        float, typer.Option(help="Fraction of the free memory for the KV pool and a step.", rich_help_panel=_POOL)
    ] = 0.9
    block_size: Annotated[
        int, typer.Option("--block-size", "--page-size", help="Positions in a KV block.", rich_help_panel=_POOL)
    ] = 16
    cap_per_sequence: Annotated[
        bool,
        typer.Option(
            "--cap-per-sequence",
            help="Let one sequence take at most n_ctx / n_parallel positions.",
            rich_help_panel=_POOL,
        ),
    ] = False
    no_block_sharing: Annotated[
        bool,
        typer.Option(
            "--no-block-sharing",
            help="Do not reuse evaluated blocks by content (the prefix cache).",
            rich_help_panel=_POOL,
        ),
    ] = False

    use_cuda_graph: Annotated[
        bool | None,
        typer.Option(
            "--use-cuda-graph/--no-cuda-graph",
            help="Capture decode steps on the GPU at the start and replay them; by default where it can be done.",
            rich_help_panel=_GRAPHS,
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="On a GPU: the same logits to the last bit whatever else is in the batch; slower.",
            rich_help_panel=_GRAPHS,
        ),
    ] = False
    q_padding_interval_size: Annotated[
        int,
        typer.Option(
            help="A step's tokens are padded to a multiple of it; 0: 1, 2, 4, then eights.", rich_help_panel=_GRAPHS
        ),
    ] = 0
    kv_padding_interval_size: Annotated[
        int,
        typer.Option(
            help="The longest sequence's length is padded to a multiple of it; 0: graphs serve every length.",
            rich_help_panel=_GRAPHS,
        ),
    ] = 0
    max_cached_graphs: Annotated[
        int, typer.Option(help="Graphs kept; with fewer, steps are padded further.", rich_help_panel=_GRAPHS)
    ] = 64

    def by_name(self) -> dict[str, Any]:
        """Keyword arguments of EngineOptions."""
        named = asdict(self)
        named["allow_block_sharing"] = not named.pop("no_block_sharing")
        return named


def engine_options(model: str, flags: ModelFlags, pool: PoolFlags | None = None) -> EngineOptions:
    """The engine's options for `model`.

    Raises:
        OptionError: a value is out of range; the message names the option.
    """
    return EngineOptions(model_path=model, **flags.by_name(), **(pool.by_name() if pool else {}))
