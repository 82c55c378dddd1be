"""What a caller may ask of a sequence: checks that raise BatchError with the reason, and change nothing."""

from array import array
from collections.abc import Sequence

from genbatch.nif.errors import BatchError
from genbatch.nif.kv.block_tables import BlockTables, KVSequence


def sequence_of(tables: BlockTables, seq_id: int) -> KVSequence:
    """The sequence with this id."""
    if not 0 <= seq_id < len(tables.sequences):
        raise BatchError(f"sequence {seq_id} is outside 0..{len(tables.sequences) - 1}")
    return tables.sequences[seq_id]


def check_prompt(tables: BlockTables, seq_id: int, tokens: Sequence[int], cap: int) -> None:
    """The tokens begin with what the sequence holds, go on after it, and are at most `cap`."""
    held = tables.sequences[seq_id].tokens
    if not tokens:
        raise BatchError(f"sequence {seq_id}: no tokens")
    if len(tokens) > cap:
        raise BatchError(f"sequence {seq_id}: {len(tokens)} positions are more than max_per_sequence = {cap}")
    if len(held) >= len(tokens):
        raise BatchError(f"sequence {seq_id} holds {len(held)} positions: nothing is left to evaluate")
    if array("q", tokens[: len(held)]) != held:
        raise BatchError(f"sequence {seq_id}: the prompt does not begin with the tokens that it holds")


def check_copy(tables: BlockTables, src: int, dst: int, p0: int, p1: int) -> None:
    """`dst` holds exactly the first p0 positions of `src`, which has all that is needed to go on at p1."""
    source, target = sequence_of(tables, src), sequence_of(tables, dst)
    if src == dst:
        raise BatchError(f"sequence {src} cannot be copied onto itself")
    if not 0 <= p0 <= p1 <= len(source.tokens):
        raise BatchError(f"sequence {src}: positions [{p0}, {p1}) are not within its {len(source.tokens)}")
    if len(target.tokens) != p0:
        raise BatchError(f"sequence {dst} holds {len(target.tokens)} positions, the copy starts at {p0}")
    if target.tokens != source.tokens[:p0]:
        raise BatchError(f"sequences {src} and {dst} differ before {p0}: what follows was computed from that")
    if p0 < p1:
        check_end(tables, src, p1)


def check_removal(tables: BlockTables, seq_id: int, p0: int, p1: int) -> None:
    """[p0, p1) is nothing, or a tail without which the sequence can go on at p0."""
    length = len(sequence_of(tables, seq_id).tokens)
    if not 0 <= p0 <= p1 <= length:
        raise BatchError(f"sequence {seq_id}: positions [{p0}, {p1}) are not within its {length}")
    if p0 == p1:
        return
    if p1 < length:
        raise BatchError(
            f"sequence {seq_id}: removing [{p0}, {p1}) of {length} positions leaves a hole;"
            " those after it were computed from them"
        )
    check_end(tables, seq_id, p0)


def check_end(tables: BlockTables, seq_id: int, length: int) -> None:
    """The sequence still has all that a token at position `length` attends to."""
    shortest = shortest_prefix(tables, tables.sequences[seq_id])
    if 0 < length < shortest:
        raise BatchError(
            f"sequence {seq_id} cannot end at {length}: its windows dropped positions that the next token"
            f" attends to; {shortest} is the least"
        )


def shortest_prefix(tables: BlockTables, sequence: KVSequence) -> int:
    """The fewest positions, at least 1, after which the sequence could still go on."""
    evicted = ((sequence.evicted[group], window) for group, window in tables.windows)
    return max((count * tables.block_size + window - 1 for count, window in evicted if count), default=1)
