"""The banner of a service: what runs, where, and how much it can hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.panel import Panel
from rich.table import Table

from genbatch.proto.service_messages import ModelCard

_MEBIBYTE = 2**20


def banner(card: ModelCard, stats: Mapping[str, Any], addresses: Sequence[str]) -> Panel:
    """The banner of a service of this model with these stats, reachable at `addresses`."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan")
    rows.add_column()
    rows.add_row("model", card.id)
    rows.add_row("device", f"{card.device}, {card.dtype}")
    rows.add_row("kernels", card.runner)
    rows.add_row("quantize", card.quantize)
    rows.add_row("KV cache", _kv_size(stats))
    rows.add_row("sequences", f"{card.n_parallel} at once, of {card.n_ctx} positions at most")
    for address in addresses:
        rows.add_row("listening", address)
    return Panel(rows, title="genbatch", title_align="left", border_style="cyan", expand=False)


def _kv_size(stats: Mapping[str, Any]) -> str:
    blocks, block_size = stats["kv_blocks_max"], stats["kv_block_size"]
    size = f"{blocks * block_size} positions in {blocks} blocks of {block_size}"
    return f"{size}, {stats['kv_bytes'] / _MEBIBYTE:.0f} MiB" if "kv_bytes" in stats else size
