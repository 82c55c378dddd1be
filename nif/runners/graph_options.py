"""GraphOptions: how decode steps are captured as CUDA graphs, and which sizes there are. No torch."""

from dataclasses import dataclass

from genbatch.nif.errors import OptionError


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The padded size of a step.

    Args:
        num_tokens: rows, one token each.
        kv_len: positions that every row's block table covers.
    """

    num_tokens: int
    kv_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How decode steps are captured.

    Args:
        q_padding_interval_size: tokens of a step are padded to a multiple of it; 0 pads to 1, 2, 4, 8 and then
            multiples of 8.
        kv_padding_interval_size: 0 captures graphs for every length, all at the start. Otherwise the longest
            sequence's length is padded to a multiple of it, and a longer one's graph is captured when it comes.
        max_cached_graphs: with fewer than there are sizes, steps are padded further; the least recently used graph
            beyond it is dropped where lengths are padded, too.
        max_batch_size: larger steps run eagerly.
    """

    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 64
    max_batch_size: int = 256

    def __post_init__(self) -> None:
        for option, least in (
            ("q_padding_interval_size", 0),
            ("kv_padding_interval_size", 0),
            ("max_cached_graphs", 1),
            ("max_batch_size", 1),
        ):
            if getattr(self, option) < least:
                raise OptionError(option, f"must be at least {least}, not {getattr(self, option)}")

    def row_sizes(self) -> list[int]:
        """The padded numbers of rows, ascending, no more than may be kept."""
        limit, interval = self.max_batch_size, self.q_padding_interval_size
        sizes = list(range(interval, limit, interval)) if interval else [1, 2, 4, *range(8, limit, 8)]
        sizes = [size for size in sizes if size < limit] + [limit]
        # The largest stays, so that every step has a size.
        return sizes[::-1][:: -(-len(sizes) // self.max_cached_graphs)][::-1]

    def key(self, num_tokens: int, max_kv_len: int, longest: int) -> GraphKey | None:
        """The size that a step is padded to; None where it has more rows than any.

        Args:
            max_kv_len: of its sequences.
            longest: positions that a sequence may have at most.
        """
        if num_tokens > self.max_batch_size:
            return None
        rows = next(size for size in self.row_sizes() if size >= num_tokens)
        interval = self.kv_padding_interval_size or longest
        return GraphKey(rows, min(-(-max_kv_len // interval) * interval, longest))

    def captured_keys(self, longest: int) -> list[GraphKey]:
        """What is captured at the start, the largest first: smaller graphs then fit into its memory."""
        kv_len = min(self.kv_padding_interval_size or longest, longest)
        return [GraphKey(rows, kv_len) for rows in reversed(self.row_sizes())]
