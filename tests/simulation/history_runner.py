"""HistoryRunner: a model whose next token is a hash of everything it reads from its KV blocks.

A block table that leads to a wrong block, a stale position, a copy that was forgotten: each changes the text or raises.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from genbatch.nif.runner import Content, Largest, LayerGroup, RaggedBatch

VOCAB = 320
# Prompts that hold these tokens do harm: a row of NaN, a step that raises, a process that dies.
NAN, RAISE, DIE = 5, 6, 7
FIRST_PLAIN = 10
LARGEST = 10.0  # logit; all others are 0
BEGIN = 1  # the hash of no tokens
_MODULUS = 2**31 - 1
_UNWRITTEN = (-1, -1, -1)
STATE = "state"  # in the place of a window: a recurrent group
_NO_STATE = 1 << 40  # at positions of a recurrent group that do not end their block
Windows = Sequence[int | str | None]


class EngineDies(BaseException):
    """What a native crash is to the process: nothing in it sees it."""


def expected(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """The continuation, alone and without faults: never an end-of-sequence token."""
    value = BEGIN
    for token in prompt:
        value = hash_with(value, token)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(likeliest(value))
        value = hash_with(value, tokens[-1])
    return tokens


def hash_with(value: int, token: int) -> int:
    """The hash of a history that had `value`, with one more token."""
    return (value * 48271 + token + 1) % _MODULUS


def likeliest(value: int) -> int:
    """The token that follows a history with this hash, unless another one is drawn."""
    return FIRST_PLAIN + value % (VOCAB - FIRST_PLAIN)


def logits_after(values: Sequence[int | None]) -> npt.NDArray[np.float32]:
    """The rows of logits after histories with these hashes, [R, VOCAB] float32; NaN after those without one."""
    rows = np.zeros((len(values), VOCAB), np.float32)
    for row, value in enumerate(values):
        if value is None:
            rows[row] = np.nan
        else:
            rows[row, likeliest(value)] = LARGEST
    return rows


class HistoryRunner:
    """Has the methods of a Runner; each position's KV is its token, its number and the hash of all tokens up to it.

    In a plain list: a world evaluates thousands of small batches, and one tensor operation takes as long as a row here.

    Args:
        is_short: asked at each step of several sequences; true: there is not enough memory for it.
        windows: of each layer group; None: it attends to all positions. At least 2, as the hash is read one back.
            STATE: it is recurrent, and has the hash at each block's end only.
        sink_tokens: first positions in sight beside every window.
    """

    name = "history"
    quantize = "none"
    vocab_size = VOCAB
    rows_are_invariant = True

    def __init__(
        self,
        is_short: Callable[[], bool] = lambda: False,
        windows: Windows = (None,),
        sink_tokens: int = 0,
    ) -> None:
        self._is_short = is_short
        self.groups = tuple(
            LayerGroup((layer,), window, sink_tokens)
            if isinstance(window, int)
            else LayerGroup((layer,), recurs=window == STATE)
            for layer, window in enumerate(windows)
        )

    def bytes_per_block(self, group: int, block_size: int) -> int:
        return 24 * block_size

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        self._block_size = block_size
        # Per group, by slot: block * block_size + offset.
        self._kv = [[_UNWRITTEN] * (count * block_size) for count in num_blocks]

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return logits_after(self._evaluate(batch))

    def _evaluate(self, batch: RaggedBatch) -> list[int | None]:
        """Writes the batch's KV; returns of each wanted row the hash of what it reads, None where that is poison."""
        tokens = batch.input_ids.tolist()
        positions, starts = batch.positions.tolist(), batch.query_starts.tolist()
        wanted = set(batch.logit_rows.tolist())
        of_groups = []
        for group in range(len(self.groups)):
            slots, tables = batch.slots[group].tolist(), batch.block_tables[group].tolist()
            kv = self._kv[group]
            values: list[int | None] = []
            for table, (start, end) in zip(tables, pairwise(starts), strict=True):
                recurs = self.groups[group].recurs
                hash_before = self._recur if recurs else self._hash_before
                value = hash_before(group, table, positions[start])
                for index in range(start, end):
                    value = hash_with(value, tokens[index])
                    kept = _NO_STATE if recurs and (positions[index] + 1) % self._block_size else value
                    kv[slots[index]] = (tokens[index], positions[index], kept)
                rows = [index for index in range(start, end) if index in wanted]
                read = self._read_state if recurs else self._read
                values += [read(group, table, positions[index] + 1) for index in rows]
            of_groups.append(values)
        values = [_agreed(of_row) for of_row in zip(*of_groups, strict=True)]
        # Not before the KV is written: a step that fails must leave no trace all the same.
        if DIE in tokens:
            raise EngineDies
        if RAISE in tokens:
            raise RuntimeError("a planted fault")
        if len(starts) > 2 and self._is_short():
            raise MemoryError("a planted shortage")
        return values

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        kv = self._kv[group]
        for source, target in pairs:
            kv[self._slots(target)] = kv[self._slots(source)]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        content = np.array([self._kv[group][self._slots(block)] for block in blocks], np.int64)
        return content.reshape(len(blocks), -1).view(np.uint8)

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        held = np.asarray(content).view(np.int64).reshape(len(blocks), self._block_size, 3).tolist()
        for block, kv in zip(blocks, held, strict=True):
            self._kv[group][self._slots(block)] = map(tuple, kv)

    def close(self) -> None:
        del self._kv

    def _slots(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)

    def _hash_before(self, group: int, table: Sequence[int], position: int) -> int:
        if position == 0:
            return BEGIN
        block, offset = divmod(position - 1, self._block_size)
        return self._kv[group][table[block] * self._block_size + offset][2]

    def _recur(self, group: int, table: Sequence[int], position: int) -> int:
        """The hash before a position: from the state at the end of the block before its own, and its own block."""
        kv, size, block = self._kv[group], self._block_size, position // self._block_size
        value = BEGIN
        if block:
            _, written_for, value = kv[table[block - 1] * size + size - 1]
            assert written_for == block * size - 1 and value < _NO_STATE, "a state belongs to another"
        for at in range(block * size, position):
            token, written_for, _ = kv[table[block] * size + at % size]
            assert written_for == at, "a position holds what belongs to another"
            value = hash_with(value, token)
        return value

    def _read_state(self, group: int, table: Sequence[int], length: int) -> int | None:
        """The hash of the first `length` positions, as a recurrent layer computes it for the last of them."""
        position = length - 1
        block, offset = divmod(position, self._block_size)
        token, written_for, state = self._kv[group][table[block] * self._block_size + offset]
        value = hash_with(self._recur(group, table, position), token)
        assert written_for == position, "a position holds what belongs to another"
        assert state in (value, _NO_STATE), "a state is not that of its block's end"
        return None if token == NAN else value

    def _read(self, group: int, table: Sequence[int], length: int) -> int | None:
        """The hash of the first `length` positions of a sequence, from those that its last one attends to."""
        window = self.groups[group].window
        first = 0 if window is None else max(0, length - window)
        held: list[tuple[int, int, int]] = []
        for block in table[first // self._block_size : -(-length // self._block_size)]:
            held += self._kv[group][self._slots(block)]
        start = first - first % self._block_size  # the position that held[0] is for
        value, is_poisoned = BEGIN, False
        for position in range(min(self.groups[group].sink_tokens, first)):
            slot = table[position // self._block_size] * self._block_size + position % self._block_size
            token, written_for, written_after = self._kv[group][slot]
            value = hash_with(value, token)
            assert written_for == position and written_after == value, "a sink holds what belongs to another"
            is_poisoned = is_poisoned or token == NAN
        if first:
            # The first of the window says what was before it.
            token, written_for, value = held[first - start]
            assert written_for == first, "a position holds what belongs to another"
            is_poisoned = is_poisoned or token == NAN
            first += 1
        for position in range(first, length):
            token, written_for, written_after = held[position - start]
            value = hash_with(value, token)
            assert written_for == position and written_after == value, "a position holds what belongs to another"
            is_poisoned = is_poisoned or token == NAN
        return None if is_poisoned else value


def _agreed(values: Sequence[int | None]) -> int | None:
    """A row's hash, which all groups have; None if one of them still reads poison."""
    read = {value for value in values if value is not None}
    assert len(read) < 2, "layer groups have seen different histories"
    return None if None in values else values[0]


class LoopingRunner(HistoryRunner):
    """Goes round in twelve tokens, and now and then says another: what comes next was often there before."""

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        values = self._evaluate(batch)
        last = batch.input_ids[batch.logit_rows].tolist()
        return logits_after(
            [
                value if value is None or not value % 8 else (token - FIRST_PLAIN + 1) % 12
                for value, token in zip(values, last, strict=True)
            ]
        )


class ChoosingHistoryRunner(HistoryRunner):
    """As runners that tell each row's largest logit by the way."""

    def forward_largest(
        self, batch: RaggedBatch, *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest]:
        values = self._evaluate(batch)
        largest = Largest(
            np.array([np.nan if value is None else LARGEST for value in values], np.float32),
            np.array([0 if value is None else likeliest(value) for value in values], np.int32),
        )
        return logits_after(values) if with_logits else None, largest
