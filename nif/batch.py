"""What one forward pass works on: the caller's entries, and their ragged layout for a runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Logits(Enum):
    """For which of an entry's tokens the logits are wanted, or the hidden states in their place."""

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


def num_logits(entry: Entry) -> int:
    """Rows of logits that an entry wants."""
    if entry.logits is Logits.ALL:
        return len(entry.tokens)
    return 1 if entry.logits is Logits.LAST else 0


def num_states(entry: Entry) -> int:
    """Rows of hidden states that an entry wants."""
    if entry.logits is Logits.EVERY_STATE:
        return len(entry.tokens)
    return 1 if entry.logits is Logits.LAST_STATE else 0


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All entries of a step laid end to end, without padding; built by Context, read by a runner.

    B entries, T tokens in all, G layer groups. Index tensors live on the runner's device.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_starts: torch.Tensor  # [B + 1] int32, prefix sums of the entries' token counts
    kv_lens: torch.Tensor  # [B] int32, positions held once this step's tokens are written
    slots: tuple[torch.Tensor, ...]  # per group [T] int64: block id * block_size + offset to write to
    block_tables: tuple[torch.Tensor, ...]  # per group [B, max_blocks] int32, 0 where unused or evicted
    logit_rows: torch.Tensor  # [R] int64, indices into the T tokens whose logits are wanted
    max_query_len: int
    max_kv_len: int
    state_rows: torch.Tensor | None = None  # [S] int64, indices into the T tokens whose hidden states are wanted
    adapters: torch.Tensor | None = None  # [T] int64 on the CPU, each token's adapter, 0: none; None: nobody has one
