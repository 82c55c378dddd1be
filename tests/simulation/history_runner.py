"""HistoryRunner: a model whose next token is a hash of everything it reads from its KV blocks.

A block table that leads to a wrong block, a stale position, a copy that was forgotten: each changes the text.
"""

from collections.abc import Sequence

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.layer_group import LayerGroup

VOCAB = 320
# Prompts that hold these tokens do harm: a row of NaN, a step that raises, a process that dies.
NAN, RAISE, DIE = 5, 6, 7
FIRST_PLAIN = 10
_MODULUS = 2**31 - 1


class EngineDies(BaseException):
    """What a native crash is to the process: nothing in it sees it."""


def next_token(history: Sequence[int]) -> int:
    """What follows: never an end-of-sequence token."""
    value = 1
    for token in history:
        value = (value * 48271 + token + 1) % _MODULUS
    return FIRST_PLAIN + value % (VOCAB - FIRST_PLAIN)


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The continuation, alone and without faults."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class HistoryRunner:
    """Has the methods of a Runner; each position's KV is the token itself and its position."""

    name = "history"
    quantize = "none"
    device = torch.device("cpu")
    vocab_size = VOCAB
    groups = (LayerGroup((0,)),)

    def bytes_per_block(self, group: int, block_size: int) -> int:
        return 16 * block_size

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        self._block_size = block_size
        self._kv = torch.full(
            (num_blocks[0], block_size, 2), -1, dtype=torch.int64
        )  # [block, offset, token and position]

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        tokens = batch.input_ids.tolist()
        if DIE in tokens:
            raise EngineDies
        if RAISE in tokens:
            raise RuntimeError("a planted fault")
        flat = self._kv.view(-1, 2)
        flat[batch.slots[0]] = torch.stack([batch.input_ids, batch.positions], 1)
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        starts = batch.query_starts.tolist()
        for row, index in enumerate(batch.logit_rows.tolist()):
            entry = next(i for i in range(len(starts) - 1) if starts[i] <= index < starts[i + 1])
            history = self._read(batch, entry, int(batch.positions[index]) + 1)
            logits[row, next_token(history)] = 10.0
            if NAN in history:
                logits[row] = float("nan")
        return logits

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._kv[target] = self._kv[source]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        content = self._kv[list(blocks)].reshape(len(blocks), -1)
        return content.view(torch.uint8).clone()

    def write_blocks(self, group: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        self._kv[list(blocks)] = content.contiguous().view(torch.int64).reshape(len(blocks), self._block_size, 2)

    def close(self) -> None:
        del self._kv

    def _read(self, batch: RaggedBatch, entry: int, length: int) -> list[int]:
        table = batch.block_tables[0][entry]
        positions = torch.arange(length)
        held = self._kv[table[positions // self._block_size].long(), positions % self._block_size]
        assert torch.equal(held[:, 1], positions), "a position holds what belongs to another"
        return held[:, 0].tolist()
