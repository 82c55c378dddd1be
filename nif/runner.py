"""The interface between Context and the runners, which execute forward passes over the paged KV cache.

The file also defines the types of its arguments and results: groups and shapes of layers, adapters, the entries of a
step and their ragged layout, and the largest logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, Union, runtime_checkable

import numpy as np
import numpy.typing as npt

from genbatch.nif.errors import BatchError

if TYPE_CHECKING:  # a native engine does without torch
    import torch

Rows: TypeAlias = Union[npt.NDArray[np.float32], "torch.Tensor"]
"""[R, width] float32: rows of logits or of hidden states, an array on the host or a tensor on a GPU."""

Content: TypeAlias = Union[npt.NDArray[np.uint8], "torch.Tensor"]
"""[blocks, bytes_per_block] uint8 on the host: the content of KV blocks. A tensor where a GPU copies it."""


def on_host(rows: Rows) -> npt.NDArray[np.float32]:
    """Return rows as an array on the host; rows on the host are not copied."""
    if isinstance(rows, np.ndarray):
        return rows
    copied: npt.NDArray[np.float32] = rows.cpu().numpy()
    return copied


def host_copy(rows: Rows) -> npt.NDArray[np.float32]:
    """Return a copy of rows on the host: a runner may overwrite them in its next step."""
    return rows.copy() if isinstance(rows, np.ndarray) else on_host(rows)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind: what they keep of each position, and how far back a token reads it.

    Args:
        layers: indices of the model's layers in this group, ascending.
        window: how many positions a token attends to, itself included; None means all previous ones.
        sink_tokens: first positions of a sequence that a token attends to beside its window; 0 without one.
        convolves: whether they are short convolutions, which keep their inputs and read a window of them.
        recurs: whether they are recurrent. A block then holds its positions' inputs and the state at its end. A token
            reads its own block, the end of the one before, and a window of inputs, which a convolution reads.
    """

    layers: tuple[int, ...]
    window: int | None = None
    sink_tokens: int = 0
    convolves: bool = False
    recurs: bool = False

    def sized(self, block_size: int) -> "LayerGroup":
        """Return the group over blocks of this size, on which the window of a recurrent group depends."""
        return replace(self, window=max(block_size + 1, self.window or 0)) if self.recurs else self


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer, per position; a short convolution has one key, its input, and no value.

    Args:
        num_kv_heads: heads of keys and values.
        key_dim: elements of a key head.
        value_dim: elements of a value head; differs from `key_dim` in a few models.
        state: elements, in float32, of the state that a block of a recurrent layer holds; such a layer has no values.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    state: int = 0


NO_SHAPE = LayerShape(0, 0, 0)
"""The shape of a layer that keeps nothing of earlier positions."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of each row of logits, and its token id.

    Args:
        values: [R] float32; NaN where the row holds one.
        token_ids: [R] int32, the lowest id that has the value; of a row with NaN, any.
    """

    values: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int32]

    def rows(self, rows: Sequence[int]) -> "Largest":
        """Return the largest values of these rows only."""
        return Largest(self.values[rows], self.token_ids[rows])


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """The matrices that an adapter adds to one linear layer: `scale * b @ a`."""

    a: npt.NDArray[np.float32]  # [rank, inputs]
    b: npt.NDArray[np.float32]  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        """The rows of `a`."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter in memory; immutable.

    Args:
        name: its name in requests.
        path: its directory, absolute.
        digest: a digest of both files; adapters with the same digest are equal.
        handle: its number in a step's entries; above 0, and never used twice in a process.
        linears: its matrices by transformers' name of the module.
    """

    name: str
    path: Path
    digest: str
    handle: int
    linears: Mapping[str, LoraLinear]

    @property
    def rank(self) -> int:
        """The largest rank of its linears."""
        return max(linear.rank for linear in self.linears.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(linear.a.nbytes + linear.b.nbytes for linear in self.linears.values())


class Logits(Enum):
    """The tokens of an entry for which a step returns logits, or hidden states in their place."""

    NONE = "none"  # a prefill chunk that is not the last
    LAST = "last"
    ALL = "all"  # context logits, prompt log-probs, verifying drafts
    LAST_STATE = "last_state"  # no logits: the last token's hidden state, or what an encoder pools of the whole text
    EVERY_STATE = "every_state"


@dataclass(frozen=True, slots=True)
class Entry:
    """The next tokens of one sequence: one of them for a decode, many for a prefill chunk.

    Args:
        seq_id: the sequence, 0 <= seq_id < the context's number of sequences.
        tokens: token ids, at least one.
        n_past: positions that the sequence already holds; the first token gets position n_past.
        logits: which rows of logits, or of hidden states, to return.
        adapter: handle of the adapter that all of the sequence is evaluated with; 0: none.
    """

    seq_id: int
    tokens: Sequence[int]
    n_past: int
    logits: Logits = Logits.LAST
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All entries of a step laid end to end, without padding; built by Context, read by a runner.

    B entries, T tokens in all, G layer groups. The arrays are the host's; a runner on a device copies them there.
    """

    input_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    query_starts: npt.NDArray[np.int32]  # [B + 1] prefix sums of the entries' token counts
    kv_lens: npt.NDArray[np.int32]  # [B] positions held once this step's tokens are written
    slots: tuple[npt.NDArray[np.int64], ...]  # per group [T]: block id * block_size + offset to write to
    block_tables: tuple[npt.NDArray[np.int32], ...]  # per group [B, max_blocks], 0 where unused or evicted
    logit_rows: npt.NDArray[np.int64]  # [R] indices into the T tokens with requested logits
    max_query_len: int
    max_kv_len: int
    state_rows: npt.NDArray[np.int64] | None = None  # [S] indices into the T tokens with requested hidden states
    adapters: npt.NDArray[np.int64] | None = None  # [T] each token's adapter, 0 for none; None if no token has one


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The exclusive upper bounds of a batch's indices.

    Args:
        num_blocks: blocks in the pool of each layer group.
        block_size: positions a block holds.
        vocab_size: token ids are below it.
        max_position: positions one sequence may have.
    """

    num_blocks: Sequence[int]
    block_size: int
    vocab_size: int
    max_position: int


def check_batch(batch: RaggedBatch, limits: BatchLimits) -> None:
    """Check every index of a batch.

    Raises:
        BatchError: an index leads outside the pool, the block table, the vocabulary or the batch.
    """
    num_tokens, num_entries = len(batch.input_ids), len(batch.kv_lens)
    starts = batch.query_starts
    query_lens = starts[1:] - starts[:-1]
    if len(starts) != num_entries + 1 or starts[0] != 0 or starts[-1] != num_tokens or (query_lens < 1).any():
        raise BatchError(f"query_starts do not divide {num_tokens} tokens among {num_entries} entries")
    if (batch.kv_lens < query_lens).any():
        raise BatchError("an entry holds fewer positions than it has tokens")
    if int(query_lens.max()) > batch.max_query_len or int(batch.kv_lens.max()) > batch.max_kv_len:
        raise BatchError("max_query_len or max_kv_len is below an entry's length")
    _check_range("token id", batch.input_ids, limits.vocab_size)
    _check_range("position", batch.positions, limits.max_position)
    _check_range("logit row", batch.logit_rows, num_tokens)
    if len(batch.positions) != num_tokens:
        raise BatchError(f"{len(batch.positions)} positions for {num_tokens} tokens")
    for group, (table, slots) in enumerate(zip(batch.block_tables, batch.slots, strict=True)):
        num_blocks = limits.num_blocks[group]
        if table.shape[0] != num_entries or table.shape[1] * limits.block_size < batch.max_kv_len:
            raise BatchError(f"group {group}: a block table {tuple(table.shape)} does not hold the entries' positions")
        if len(slots) != num_tokens:
            raise BatchError(f"group {group}: {len(slots)} slots for {num_tokens} tokens")
        _check_range(f"group {group}: block id", table, num_blocks)
        _check_range(f"group {group}: slot", slots, num_blocks * limits.block_size)


def _check_range(what: str, values: np.ndarray, limit: int) -> None:
    if values.size == 0:
        return
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= limit:
        raise BatchError(f"{what} {lowest if lowest < 0 else highest} is outside 0..{limit - 1}")


class Runner(Protocol):
    """Runs a model over ragged batches and owns the KV tensors. No other part knows their layout.

    A block holds `block_size` positions of every layer of one group. Block ids are per group.
    """

    name: str  # for the banner: which path runs
    quantize: str  # the value of the option that took effect
    vocab_size: int  # width of the logits
    groups: tuple[LayerGroup, ...]

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Bytes of KV that one block of `group` takes."""
        ...

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Make the KV pool: `num_blocks[g]` blocks for group g; called once, before any forward."""
        ...

    def forward(self, batch: RaggedBatch) -> Rows:
        """Write the batch's keys and values to its slots, and return logits [R, vocab_size] float32."""
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) within the pool: copy on write, beam forks."""
        ...

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """Return the blocks' content; see `BackgroundCopies`."""
        ...

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Write the content that `read_blocks` returned, possibly to other blocks."""
        ...

    def close(self) -> None:
        """Release the KV pool."""
        ...


@runtime_checkable
class ChoosingRunner(Protocol):
    """A runner that finds each row's largest logit while it computes the logits, and need not write them."""

    def forward_largest(
        self, batch: RaggedBatch, *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest]:
        """As `forward`: return the logits, None unless they are requested, and each row's largest."""
        ...


@runtime_checkable
class InvariantRunner(Protocol):
    """A runner with the same logits, bit for bit, whether a sequence's tokens come one by one or together."""

    rows_are_invariant: Literal[True]


@runtime_checkable
class StateRunner(Protocol):
    """A runner that also returns the hidden states, from which embeddings are made."""

    def forward_states(self, batch: RaggedBatch) -> tuple[Rows, Rows]:
        """As `forward`, and the hidden states of `batch.state_rows`, [S, hidden] float32."""
        ...


@runtime_checkable
class PredictingRunner(Runner, Protocol):
    """A runner that may have a predictor: it guesses the token after the next one.

    The predictor is the model's own layer of multi-token prediction (MTP), or an assistant. The MTP layer has keys and
    values for each position, in the blocks of one layer group. Those of position p are of the token at p + 1 and of the
    row in front of the model's head at p. So blocks that are shared, copied, read or written bring them along. An
    assistant reads the model's own keys.
    """

    hidden_size: int  # of a row
    predicts: bool  # whether there is a predictor
    mtp_group: int | None  # of the MTP layer's keys; None without the layer
    predicted: npt.NDArray[np.bool_]  # [num_blocks, block_size]: the positions whose keys of the layer were written

    def forward_states(
        self, batch: RaggedBatch, tokens: npt.NDArray[np.int64], *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest, npt.NDArray[np.float32]]:
        """As `ChoosingRunner.forward_largest`, and the rows in front of the head of `tokens`, [tokens, hidden] float32.

        Args:
            tokens: which of the batch's tokens, each once.
        """
        ...

    def predict(
        self, batch: RaggedBatch, states: npt.NDArray[np.float32], *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest, npt.NDArray[np.float32]]:
        """Run the predictor alone.

        Args:
            batch: for the MTP layer, each position with the token that follows it. For an assistant, one token of each
                sequence, at the position behind the sequence's keys.
            states: [T, hidden] float32, the rows in front of the head one position before each token.

        Returns:
            As `forward_states`, with the rows that have logits only.
        """
        ...


class Redrawn(Protocol):
    """Draws that follow a launched step's own draws."""

    def results(self) -> list[Any]:
        """Return a `Sampled` or a `SampleFault` for each row, once `Launched.wait` has returned."""
        ...


class Launched(Protocol):
    """A decode step that was launched on the device."""

    def redraw(self, rows: Sequence[int], states: Sequence[Any], positions: Sequence[int]) -> Redrawn:
        """Draw these rows' tokens again, with the edits of their samplers; the next step's input are the new tokens.

        Call this before the next step is launched, and before `wait`.

        Args:
            states: the rows' SamplerStates.
            positions: the rows' draw counters.
        """
        ...

    def wait(self) -> list[int | None]:
        """Return the token drawn in each row, None where the row's logits are not finite; to be called once.

        Raises:
            Exception: the device failed.
        """
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner that begins a decode step, draws included, without waiting for the device."""

    def launch(
        self,
        batch: RaggedBatch,
        draws: npt.NDArray[np.float64],
        after: Launched | None,
        rows: Sequence[int] | None = None,
    ) -> Launched:
        """Begin a step; at most one other step may be under way.

        Args:
            batch: one token an entry, each with its row of logits. It may be changed once this returns.
            draws: [R, 5] float64, how each row's next token is drawn; see `DrawTable`.
            after: the step launched before this one: its tokens are this step's input, and those in `batch` are not
                read. None takes those in `batch`.
            rows: the rows of `after` that this step goes on with, one an entry; None for the same rows.

        Raises:
            BatchError: an index leads outside the pool or the model; nothing was written.
        """
        ...


@runtime_checkable
class AdaptingRunner(Protocol):
    """A runner that computes adapters: each row's own, several in one forward."""

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Prepare an adapter for batches that name it; may be called while a step runs, from another thread."""
        ...

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """Free an adapter's memory; no later batch names it, and no step with it is under way."""
        ...


@runtime_checkable
class HoldsMemory(Protocol):
    """A runner that takes memory of its own beside the pool and a step's activations."""

    def own_bytes(self, num_sequences: int, block_size: int) -> int:
        """Return the number of bytes for steps with at most `num_sequences` decodes."""
        ...


@runtime_checkable
class ReadsBlocks(Protocol):
    """A runner with blocks that another thread may read beside a step."""

    @property
    def kernels(self) -> str:
        """A digest of the code that computes the blocks."""
        ...

    def block_content(self, group: int, block: int) -> bytes:
        """Return a block's content, as a row of `read_blocks`."""
        ...


@runtime_checkable
class KnowsStep(Protocol):
    """A runner that knows the size of its steps' buffers. For other runners, the model's shape gives an estimate."""

    def step_bytes(self, num_tokens: int, num_sequences: int) -> int:
        """Return the bytes of a step that computes the logits of every token, without the logits themselves."""
        ...

    def reserve(self, num_tokens: int, num_sequences: int) -> None:
        """Allocate the buffers of such a step now, so that the first request does not wait for them.

        Raises:
            MemoryError: there is not enough memory.
        """
        ...


@runtime_checkable
class BackgroundCopies(Protocol):
    """A runner with a `read_blocks` that returns before the content has arrived; `write_blocks` takes it at once."""

    def finish_copies(self) -> None:
        """Wait until the content of every result of `read_blocks` has arrived."""
        ...
