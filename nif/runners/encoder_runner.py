"""EncoderRunner: models that read a text in both directions, such as BERT, behind the same door as decoders.

A decoder keeps keys and values of what it has read; an encoder can keep nothing of the kind, since every later token
changes every earlier state. What it keeps of a text are the token ids themselves: they lie in the paged pool where a
decoder's keys would. A chunk that is not the last one costs nothing but to be written down; with the last one the whole
text goes through the model's own modules, beside others of about its length. So chunks, pauses, shared beginnings and
turns work as they do for decoders, and know nothing of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from genbatch.nif.pooling import CLS, MEAN
from genbatch.nif.runner import RaggedBatch

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

# Tokens of one forward, padding included, unless a single text has more: bounds the memory that a step takes.
MAX_TOKENS = 4096
# A text goes beside one that is shorter by this factor at most, and a few tokens: what is padded is computed in vain.
MAX_PADDING = 1.25
SPARE_TOKENS = 8


class EncoderRunner:
    """Runs the model's own modules over whole texts. Implements `Runner` and `StateRunner`; gives no logits.

    Args:
        model: an encoder, with its pooling.
    """

    name = "encoder"
    quantize = "none"

    def __init__(self, model: "Model") -> None:
        assert model.pooling is not None, "an encoder is served for its embeddings or its scores"
        self.device = model.device
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        self._model = model
        self._pooling = model.pooling
        self._second = 0 if model.pairs is None else model.pairs.second
        self._pool = torch.empty(0, dtype=torch.int32)  # [num_blocks, block_size] token ids, in host memory

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Bytes that one block of `group` takes."""
        return block_size * self._pool.element_size()

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Makes the pool: `num_blocks[0]` zeroed blocks."""
        self._pool = torch.zeros((num_blocks[0], block_size), dtype=torch.int32)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Writes the batch's tokens to its slots; there are no logits, [0, vocab_size]."""
        assert not batch.logit_rows.numel(), "an encoder has no logits"
        self._pool.view(-1)[batch.slots[0].cpu()] = batch.input_ids.cpu().int()
        return torch.empty(0, self.vocab_size)

    @torch.inference_mode()
    def forward_states(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and for each of `state_rows`, the last token of a text, the text's pooled states [S, hidden].

        What is computed of a text depends on the others in nothing but rounding.
        """
        logits = self.forward(batch)
        assert batch.state_rows is not None, "no states are wanted"
        entries = torch.searchsorted(batch.query_starts.cpu(), batch.state_rows.cpu(), right=True) - 1
        texts = [self._text(batch, entry) for entry in entries.tolist()]
        pooled = torch.empty(len(texts), self._pooling.size)
        for together in alike([len(text) for text in texts]):
            pooled[together] = self._pooled([texts[index] for index in together])
        return logits, pooled

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination); every source is read before any block is written."""
        sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
        self._pool[destinations] = self._pool[sources]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """The blocks' content as one host tensor [len(blocks), bytes_per_block] uint8."""
        return self._pool[list(blocks)].view(torch.uint8)

    def write_blocks(self, group: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Puts back what `read_blocks` gave, possibly into other blocks."""
        self._pool[list(blocks)] = content.contiguous().view(torch.int32)

    def close(self) -> None:
        """Releases the pool."""
        self._pool = torch.empty(0, dtype=torch.int32)

    def _text(self, batch: RaggedBatch, entry: int) -> torch.Tensor:
        """The token ids of all that an entry's sequence holds, [L]."""
        length = int(batch.kv_lens[entry])
        blocks = batch.block_tables[0][entry].cpu().long()
        return self._pool[blocks[: -(-length // self._pool.shape[1])]].flatten()[:length].long()

    def _pooled(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """The pooled states of some texts in one forward, [len(texts), hidden] float32 on the CPU."""
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
        """Families like RoBERTa's count positions by what is not this id."""
        padding: int | None = self._model.config.pad_token_id
        return 0 if padding is None else padding


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of texts of such lengths, put together so that little is padded and no batch is too large."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        batch = batches[-1] if batches else []
        fits = batch and lengths[index] <= MAX_PADDING * lengths[batch[0]] + SPARE_TOKENS
        if fits and (len(batch) + 1) * lengths[index] <= MAX_TOKENS:
            batch.append(index)
        else:
            batches.append([index])
    return batches
