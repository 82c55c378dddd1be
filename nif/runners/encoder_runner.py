"""EncoderRunner: runs bidirectional models such as BERT behind the same interface as decoders.

A decoder caches keys and values. An encoder cannot, because every later token changes every earlier state. So the
EncoderRunner stores token ids in the paged pool instead of keys. A chunk before the last only writes its token ids.
With the last chunk the whole text runs through the model's own modules, in a batch with texts of similar length. So
chunked prefill, preemption and prefix sharing work as for decoders, without special cases.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from genbatch.nif.pooling import CLS, MEAN
from genbatch.nif.runner import Content, RaggedBatch, Rows
from genbatch.nif.runners.torch_runner import TensorBatch, rows_of, tensors

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

# Most tokens of one forward, padding included, unless a single text has more. This bounds a step's memory.
MAX_TOKENS = 4096
# The longest text of a forward may exceed the shortest by this factor and a few tokens: padding is wasted work.
MAX_PADDING = 1.25
SPARE_TOKENS = 8


class EncoderRunner:
    """Runs the model's own modules over whole texts. Implements `Runner` and `StateRunner`; it returns no logits.

    Args:
        model: an encoder, with its pooling.
    """

    name = "encoder"
    quantize = "none"

    def __init__(self, model: "Model") -> None:
        assert model.pooling is not None, "an encoder is served for its embeddings or its scores"
        self.device = model.torch_device
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        self._model = model
        self._pooling = model.pooling
        self._second = 0 if model.pairs is None else model.pairs.second
        self._pool = torch.empty(0, dtype=torch.int32)  # [num_blocks, block_size] token ids, in host memory

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Return the bytes of one block of `group`."""
        return block_size * self._pool.element_size()

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Allocate the pool: `num_blocks[0]` zeroed blocks."""
        self._pool = torch.zeros((num_blocks[0], block_size), dtype=torch.int32)

    def forward(self, batch: RaggedBatch) -> Rows:
        """Write the batch's tokens to its slots; returns empty logits, [0, vocab_size]."""
        return rows_of(self._write(tensors(batch)))

    def _write(self, batch: TensorBatch) -> torch.Tensor:
        assert not batch.logit_rows.numel(), "an encoder has no logits"
        self._pool.view(-1)[batch.slots[0]] = batch.input_ids.int()
        return torch.empty(0, self.vocab_size)

    @torch.inference_mode()
    def forward_states(self, batch: RaggedBatch) -> tuple[Rows, Rows]:
        """Run `forward`, and return pooled states [S, hidden] for the texts that end at `state_rows`.

        Other texts of the batch change a text's states by rounding only.
        """
        step = tensors(batch)
        logits = self._write(step)
        assert step.state_rows is not None, "no states are requested"
        entries = torch.searchsorted(step.query_starts, step.state_rows, right=True) - 1
        texts = [self._text(step, entry) for entry in entries.tolist()]
        pooled = torch.empty(len(texts), self._pooling.size)
        for together in alike([len(text) for text in texts]):
            pooled[together] = self._pooled([texts[index] for index in together])
        return rows_of(logits), rows_of(pooled)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any block is written."""
        sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
        self._pool[destinations] = self._pool[sources]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """Return the blocks' content."""
        return self._pool[list(blocks)].view(torch.uint8).numpy()

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Write the content that `read_blocks` returned into blocks, which may be other blocks than before."""
        self._pool[list(blocks)] = torch.as_tensor(content).contiguous().view(torch.int32)

    def close(self) -> None:
        """Release the pool."""
        self._pool = torch.empty(0, dtype=torch.int32)

    def _text(self, batch: TensorBatch, entry: int) -> torch.Tensor:
        """Return all token ids of an entry's sequence, [L]."""
        length = int(batch.kv_lens[entry])
        blocks = batch.block_tables[0][entry].long()
        return self._pool[blocks[: -(-length // self._pool.shape[1])]].flatten()[:length].long()

    def _pooled(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Run some texts in one forward; returns pooled states [len(texts), hidden] float32 on the CPU."""
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self._padding_id)
        mask = (torch.arange(ids.shape[1], device=self.device)[None] < lengths[:, None]).long()
        kinds = {}
        if self._second:
            kinds["token_type_ids"] = (ids // self._second).to(self.device)
            ids = ids % self._second
        output = self._model.hf(input_ids=ids.to(self.device), attention_mask=mask, **kinds)
        if not self._pooling.embeds:
            scores: torch.Tensor = output.logits.float()
            return scores.cpu()
        states: torch.Tensor = output.last_hidden_state.float()
        if self._pooling.kind == CLS:
            pooled = states[:, 0]
        elif self._pooling.kind == MEAN:
            pooled = (states * mask[..., None]).sum(1) / lengths[:, None]
        else:
            pooled = states[torch.arange(len(texts), device=self.device), lengths - 1]
        return pooled.cpu()

    @property
    def _padding_id(self) -> int:
        """Return the padding id. Families like RoBERTa count only other ids as positions."""
        padding: int | None = self._model.config.pad_token_id
        return 0 if padding is None else padding


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of texts by length, so that little is padded and no batch is too large."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        batch = batches[-1] if batches else []
        fits = batch and lengths[index] <= MAX_PADDING * lengths[batch[0]] + SPARE_TOKENS
        if fits and (len(batch) + 1) * lengths[index] <= MAX_TOKENS:
            batch.append(index)
        else:
            batches.append([index])
    return batches
