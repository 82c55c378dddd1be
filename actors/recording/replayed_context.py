"""A context without a model: the real KV cache, over blocks that hold nothing."""

from collections.abc import Sequence
from typing import cast

import torch
from tokenizers import Tokenizer, models

from genbatch.actors.recording.records import Header
from genbatch.nif.batch import Entry, RaggedBatch
from genbatch.nif.context import Context
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.models.model import Model


class ReplayedContext(Context):
    """Has the recorded shape; a forward only books its blocks, and fails as `fault` says."""

    def __init__(self, header: Header) -> None:
        shape = header.context
        self._runner = HollowRunner(header)
        super().__init__(
            # The few fields of it that are read without a forward.
            cast(Model, HollowModel(header)),
            self._runner,
            num_blocks=shape.num_blocks,
            n_parallel=shape.num_sequences,
            block_size=shape.block_size,
            n_batch=shape.n_batch,
            max_per_sequence=shape.max_per_sequence,
            allow_block_sharing=shape.allow_block_sharing,
        )
        self.n_ctx = shape.n_ctx

    def replay(self, entries: Sequence[Entry], fault: BaseException | None) -> None:
        """One forward over the entries.

        Raises:
            BaseException: the fault; as in any forward that fails, nothing was changed.
            OutOfBlocks: the pool cannot hold the new positions.
        """
        self._runner.fault = fault
        try:
            self._evaluate(entries, lambda *_: None, with_logits=False)
        finally:
            self._runner.fault = None


class HollowRunner:
    """Has the methods of a Runner and no KV."""

    name = "replay"
    quantize = "none"
    device = torch.device("cpu")

    def __init__(self, header: Header) -> None:
        self.vocab_size = header.context.vocab_size
        self.groups = tuple(LayerGroup((index,), window) for index, window in enumerate(header.context.windows))
        self.fault: BaseException | None = None
        self._bytes_per_block = header.context.bytes_per_block

    def bytes_per_block(self, group: int, block_size: int) -> int:
        return self._bytes_per_block[group]

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        pass

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        if self.fault is not None:
            raise self.fault
        return torch.zeros(1, 1).expand(len(batch.logit_rows), 1)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def read_blocks(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=torch.uint8).expand(len(blocks), self._bytes_per_block[group])

    def write_blocks(self, group: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        pass


class HollowModel:
    """What a Batcher reads of a Model between two forwards."""

    def __init__(self, header: Header) -> None:
        self.name = header.model
        self.device = HollowRunner.device
        self.vocab_size = header.context.vocab_size
        self.eos_token_ids = frozenset(header.context.eos_token_ids)
        self.max_position = header.context.max_position
        self.tokenizer = HollowTokenizer()


class HollowTokenizer:
    """No text goes in or out."""

    def __init__(self) -> None:
        self.backend = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
