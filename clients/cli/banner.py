"""The banner of a service: what runs, where, and how much it can hold."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.table import Table

if TYPE_CHECKING:  # imports torch, which takes seconds
    from genbatch.nif.engine import Engine

_MEBIBYTE = 2**20


def banner(engine: "Engine", stats: Mapping[str, Any], addresses: Sequence[str]) -> Panel:
    """The banner of a service over `engine` with these stats, reachable at `addresses`."""
    model = engine.model
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan")
    rows.add_column()
    rows.add_row("model", model.name)
    rows.add_row("device", f"{_device(str(model.device))}, {str(model.dtype).removeprefix('torch.')}")
    rows.add_row("runner", str(stats["runner"]))
    rows.add_row("KV cache", _kv_size(stats))
    rows.add_row("sequences", f"{stats['n_parallel']} at once")
    for address in addresses:
        rows.add_row("listening", address)
    return Panel(rows, title="genbatch", title_align="left", border_style="cyan", expand=False)


def _device(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def _kv_size(stats: Mapping[str, Any]) -> str:
    blocks, block_size = stats["kv_blocks_max"], stats["kv_block_size"]
    size = f"{blocks * block_size} positions in {blocks} blocks of {block_size}"
    return f"{size}, {stats['kv_bytes'] / _MEBIBYTE:.0f} MiB" if "kv_bytes" in stats else size
