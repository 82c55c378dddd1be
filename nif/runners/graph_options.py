"""GraphOptions: how decode steps are captured as CUDA graphs."""

from dataclasses import dataclass

from genbatch.nif.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How decode steps are captured.

    Args:
        q_padding_interval_size: tokens of a step are padded to a multiple of it; 0 pads to 1, 2, 4, 8 and then
            multiples of 8.
        kv_padding_interval_size: the longest sequence's length is padded to a multiple of it; 0 means 1024.
        max_cached_graphs: the least recently used graph beyond it is dropped.
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
