"""Context: the interface to a model, its paged KV cache and its forward pass; it has all state.

    model = load_model("smollm2")
    ctx = Context(model, open_runner(model), n_ctx=8192, n_parallel=8)
    logits = ctx.prefill(tokens, seq_id=0, n_past=0)
    ctx.decode_batch([(0, int(logits.argmax()), len(tokens))])

`prefill` and `decode_batch` are for callers that step a context by hand. The Batcher mixes prefill chunks and decodes
in one forward, so the Batcher calls `step_and_read` and `decode_run`. All four methods share the same check, the same
reservation of blocks, the same forward and the same choice of tokens.

A Context is synchronous. Only `eval` and its callers touch the tensors, always on one thread. The sequence operations
(`seq_cp`, `seq_rm`, `attach_prefix`) move block ids only, and may be called between two steps.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np

from genbatch.nif.context.assistant import Assistant
from genbatch.nif.context.drafters import Drafter, StateDrafter
from genbatch.nif.context.multi_token_head import MultiTokenHead
from genbatch.nif.context.overlapped_run import OverlappedRun
from genbatch.nif.context.runs import DecodeRun, Read, RunRows, lay_out, num_logits, num_states
from genbatch.nif.cuda_device import is_out_of_memory
from genbatch.nif.errors import AdapterError, BatchError, OptionError
from genbatch.nif.kv.block_tables import Reservation, RunReservation
from genbatch.nif.kv.cache_size import group_blocks
from genbatch.nif.kv.disk_cache import DiskCache
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.kv.offload import fingerprint, pack, unpack
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.lora import Adapters
from genbatch.nif.runner import (
    AdaptingRunner,
    BackgroundCopies,
    ChoosingRunner,
    Entry,
    InvariantRunner,
    Largest,
    LaunchingRunner,
    Logits,
    LoraAdapter,
    PredictingRunner,
    RaggedBatch,
    ReadsBlocks,
    Rows,
    Runner,
    StateRunner,
)
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, SamplingParams
from genbatch.nif.text.detokenizer import Detokenizer, open_detokenizer

T = TypeVar("T")
Draws: TypeAlias = list[Sampled | SampleFault | None]

GREEDY = SamplingParams(seed=0)


class _Rehearsed(Exception):
    """A rehearsal has ended: `_forward` rolls the step back."""


_N_CTX = 8192  # positions, if neither n_ctx nor num_blocks is set


class Context:
    """A model's KV pool and the sequences that live in it.

    Args:
        model: the loaded model; its tokenizer gives the text that `decode_batch` returns.
        runner: executes the forward pass and owns the KV tensors.
        n_ctx: positions in the pool, all sequences together.
            None: the positions that `num_blocks` hold, or 8192.
        num_blocks: the blocks of every layer group; groups with a window need fewer than n_ctx asks for.
        n_parallel: sequences that callers use; their ids are 0 .. n_parallel - 1.
        n_held: further sequences for held prompts, which other sequences share; their ids follow the callers' ids.
        block_size: positions a KV block holds.
        n_batch: most tokens `prefill` evaluates in one forward.
        max_per_sequence: most positions one sequence may take; None means that only the pool limits a sequence.
        allow_block_sharing: whether finished blocks may be reused by content (the prefix cache).
        adapters: the model's loaded adapters; they outlive the context.
        drafter: guesses tokens for decode runs to verify; the context closes it. None: the runner's predictor guesses,
            if the runner has one.
        disk: keeps the blocks of the prefix cache, for a model of one layer group; the context closes it.

    Raises:
        OptionError: an option is out of range.
    """

    def __init__(
        self,
        model: Model,
        runner: Runner,
        *,
        n_ctx: int | None = None,
        num_blocks: Sequence[int] | None = None,
        n_parallel: int = 8,
        n_held: int = 0,
        block_size: int = 16,
        n_batch: int = 512,
        max_per_sequence: int | None = None,
        allow_block_sharing: bool = True,
        adapters: Adapters | None = None,
        drafter: Drafter | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        for option, value in (("n_ctx", n_ctx), ("n_parallel", n_parallel), ("block_size", block_size)):
            if value is not None and value < 1:
                raise OptionError(option, f"must be at least 1, not {value}")
        if n_batch < 1:
            raise OptionError("n_batch", f"must be at least 1, not {n_batch}")
        self.model = model
        self.runner = runner
        self.n_batch = n_batch
        self.num_sequences = n_parallel + n_held
        if num_blocks is None:
            n_ctx = _N_CTX if n_ctx is None else n_ctx
            num_blocks = [
                group_blocks(group, n_ctx, block_size, n_batch, self.num_sequences) for group in runner.groups
            ]
        self.n_ctx = max(num_blocks) * block_size if n_ctx is None else n_ctx
        self.kv = KVCache(
            runner.groups,
            num_blocks=num_blocks,
            block_size=block_size,
            num_sequences=self.num_sequences,
            max_per_sequence=max_per_sequence,
            allow_block_sharing=allow_block_sharing,
        )
        runner.allocate(num_blocks, block_size)
        self.block_bytes = sum(runner.bytes_per_block(group, block_size) for group in range(len(runner.groups)))
        self.disk = disk
        if disk is not None:
            assert isinstance(runner, ReadsBlocks), "the disk is for runners with readable blocks"
            self.kv.follow(disk, partial(runner.block_content, 0))
        self.adapters = adapters if adapters is not None else Adapters(model)
        for adapter in self.adapters.values():
            self.prepare_adapter(adapter)
        self._adapter_handles = frozenset({0, *(adapter.handle for adapter in self.adapters.values())})
        self._follower = self._open_follower()
        self.drafter: Drafter | None = drafter or self._follower
        self._chooser = runner if isinstance(runner, ChoosingRunner) else None
        self._launcher = runner if isinstance(runner, LaunchingRunner) else None
        self._texts: dict[int, Detokenizer] = {}

    @property
    def max_positions(self) -> int:
        """Return the most positions that one sequence may hold, prompt and output together."""
        bounds = [self.n_ctx, self.model.max_position]
        if self.kv.max_per_sequence is not None:
            bounds.append(self.kv.max_per_sequence)
        return min(bounds)

    @property
    def can_verify(self) -> bool:
        """Whether decode runs can verify drafts and still draw the same tokens as without drafts."""
        return isinstance(self.runner, InvariantRunner) and self._launcher is None

    @property
    def overlaps(self) -> bool:
        """Whether each step of a decode run is launched before the one before is read."""
        return self._launcher is not None

    # Adapters

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """Pack an adapter before `add_adapter`. Any thread may call this, also during a step.

        Raises:
            AdapterError: the runner computes no adapters, or has no memory for this adapter.
        """
        if not isinstance(self.runner, AdaptingRunner):
            raise AdapterError(adapter.name, f"the runner {self.runner.name} computes no adapters")
        try:
            self.runner.add_adapter(adapter)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise AdapterError(adapter.name, f"there is no memory for its {adapter.nbytes} bytes") from error

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Add a prepared adapter to the model, so that entries can name the adapter.

        Raises:
            AdapterError: as `Adapters.check`.
        """
        try:
            self.adapters.add(adapter)
        except AdapterError:
            self._unprepare(adapter)
            raise
        self._adapter_handles |= {adapter.handle}

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """Unload an adapter and free its memory. No entry may name the adapter from now on."""
        self.adapters.remove(adapter.name)
        self._adapter_handles -= {adapter.handle}
        self._unprepare(adapter)

    # Evaluating

    def eval(self, batch: Sequence[Entry]) -> list[Rows]:
        """Run one forward over all entries, decodes and prefill chunks mixed.

        Returns:
            Per entry its logits, [rows, vocab_size] float32: an array, or a tensor on a GPU. They have 0, 1 or
            len(tokens) rows, as `entry.logits` says.

        Raises:
            BatchError: an entry contradicts the context (position, sequence, token id); nothing was changed.
            OutOfBlocks: the pool cannot hold the new positions; nothing was changed.
        """
        logits, _ = self.step(batch, [None] * len(batch))
        return logits

    def step(
        self, batch: Sequence[Entry], samplers: Sequence[SamplerState | None], *, with_logits: bool = True
    ) -> tuple[list[Rows], list[Sampled | SampleFault | None]]:
        """Evaluate a batch and draw the next token of every entry that has a sampler.

        Samplers are read, not changed: the caller that accepts a token must update the sampler.

        Args:
            with_logits: whether to return the logits, too; greedy draws cost less without them.

        Returns:
            Per entry its logits as `eval` returns them (none at all without `with_logits`), and its draw (None
            without a sampler).
        """
        return self.step_and_read(batch, samplers, lambda *read: read, with_logits=with_logits)

    def step_and_read(
        self,
        batch: Sequence[Entry],
        samplers: Sequence[SamplerState | None],
        read: Callable[[list[Rows], Draws], T],
        *,
        with_logits: bool = True,
    ) -> T:
        """Run a step and return `read(logits, draws)`. If `read` raises, the step is rolled back.

        An entry that asks for hidden states gets the states in the place of its logits.
        """
        chosen = [i for i, state in enumerate(samplers) if state is not None]
        states = [state for state in samplers if state is not None]
        reads = with_logits or not chosen or any(state.reads_logits for state in states)
        counts = [num_logits(entry) for entry in batch]
        num_hidden = [num_states(entry) for entry in batch]

        def draw(rows: Rows | None, largest: Largest | None, hidden: Rows | None = None) -> T:
            drawn: Draws = [None] * len(batch)
            if chosen:
                ends = list(accumulate(counts))
                last = [ends[i] - 1 for i in chosen]
                of_last = rows, largest
                if len(last) < ends[-1]:
                    of_last = None if rows is None else rows[last], None if largest is None else largest.rows(last)
                positions = [batch[i].n_past + len(batch[i].tokens) for i in chosen]
                for i, result in zip(chosen, choose(*of_last, states, positions), strict=True):
                    drawn[i] = result
            parts = _split(rows, counts) if with_logits and rows is not None else []
            if hidden is not None and parts:
                states_of = _split(hidden, num_hidden)
                parts = [
                    ours if count else part for part, ours, count in zip(parts, states_of, num_hidden, strict=True)
                ]
            return read(parts, drawn)

        return self._evaluate(batch, draw, with_logits=reads)

    def decode_run(
        self,
        batch: Sequence[Entry],
        samplers: Sequence[SamplerState],
        *,
        max_steps: int,
        num_draws: Sequence[int] | None = None,
    ) -> DecodeRun | OverlappedRun:
        """Open a run of decode steps over the same sequences. Each step's draws are the next step's tokens.

        The steps overlap if the runner can launch them.

        Args:
            batch: an entry of one token for each sequence.
            max_steps: most steps that the caller will run.
            num_draws: the most tokens that each sequence may draw. The run then frees the sequence and goes on with the
                others. None: all sequences stay to the end.
        """
        self._check(batch)
        rows = RunRows(batch, [max_steps + 1] * len(batch) if num_draws is None else num_draws, self.seq_rm)
        if self._launcher is not None:
            return OverlappedRun(self.kv, self._launcher, batch, samplers, max_steps, rows)
        return DecodeRun(self.kv, batch, samplers, self._forward, max_steps, rows)

    def rehearse(self, num_tokens: int) -> None:
        """Evaluate a prompt of `num_tokens` tokens and a greedy draw, then roll both back; sequence 0 must be empty.

        The first forward starts threads, allocates buffers and reads the weights' pages. Later forwards show the cost
        of a step.
        """

        def forget(*_: object) -> None:
            raise _Rehearsed

        entry = Entry(0, (0,) * num_tokens, 0, Logits.LAST)
        with suppress(_Rehearsed):
            self.step_and_read([entry], [SamplerState(GREEDY, ())], forget, with_logits=False)

    def prefill(self, tokens: Sequence[int], seq_id: int, n_past: int) -> Rows:
        """Evaluate a prompt in chunks of `n_batch` tokens.

        Returns:
            The logits of the last token, [vocab_size] float32.

        Raises:
            BatchError: no tokens, or they do not continue the sequence.
            OutOfBlocks: the pool cannot hold the prompt; the earlier chunks stay evaluated.
        """
        if not tokens:
            raise BatchError("prefill needs at least one token")
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            last = start + len(chunk) == len(tokens)
            [logits] = self.eval([Entry(seq_id, chunk, n_past + start, Logits.LAST if last else Logits.NONE)])
        return logits[-1]

    def decode_batch(self, entries: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, str]]:
        """Run one forward over one token of each sequence, and draw each sequence's next token greedily.

        Args:
            entries: (seq_id, token_id, position) triples, one a sequence.

        Returns:
            (seq_id, next_token_id, token_text) triples. The text is the part of the output that became final with
            this token, so the joined texts of a sequence are its output and no code point is split.

        Raises:
            BatchError: as `eval`; or a sequence's logits held no number that could be drawn from.
            OutOfBlocks: as `eval`.
        """
        batch = [Entry(seq_id, (token_id,), position) for seq_id, token_id, position in entries]
        self._check(batch)
        _, drawn = self.step(batch, [SamplerState(GREEDY, ()) for _ in batch])
        decoded = []
        for (seq_id, _, _), draw in zip(entries, drawn, strict=True):
            if not isinstance(draw, Sampled):
                raise BatchError(f"sequence {seq_id}: {draw.reason if draw else 'nothing drawn'}")
            text = self._texts.setdefault(seq_id, open_detokenizer(self.model.tokenizer.backend))
            decoded.append((seq_id, draw.token_id, text.push(draw.token_id)))
        return decoded

    # Sequences

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Share positions [p0, p1) of `src` with `dst`, without copying or evaluating them.

        Whole blocks are shared; a partly covered last block is shared until one of the two writes to it.

        Args:
            p0: where `dst` continues; it must hold exactly p0 positions.
            p1: one past the last position; None means all that `src` holds.

        Raises:
            BatchError: the range does not fit either sequence.
        """
        self.kv.seq_cp(src, dst, p0, p1)
        if self._follower is not None:
            self._follower.copied(src, dst)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Remove positions [p0, p1) of a sequence, its tail or all of it; the blocks return to the pool.

        Raises:
            BatchError: the range would leave a hole: later positions were computed from it.
        """
        self.kv.seq_rm(seq_id, p0, p1)
        if self._follower is not None:
            self._follower.missed([seq_id])
        if self.kv.length(seq_id) == 0:
            # The next sequence in this slot must not inherit half of a code point.
            # guard: a slot forgets
            self._texts.pop(seq_id, None)

    def attach_prefix(self, seq_id: int, tokens: Sequence[int], key: bytes = b"") -> int:
        """Attach the cached blocks of this prompt's prefix to the sequence; returns the prefix hit in positions.

        Args:
            tokens: the whole prompt; its last token never counts as a hit, as its logits must be computed.
            key: separates owners: only blocks written under the same key match.
        """
        return self.kv.attach_prefix(seq_id, tokens, key)

    def seq_save(self, seq_id: int, adapter: LoraAdapter | None = None) -> bytes:
        """Return the sequence's tokens and KV as bytes, for `seq_load` of a context over the same model.

        Args:
            adapter: the adapter that the sequence was evaluated with.

        Raises:
            BatchError: the sequence is empty.
        """
        tokens, blocks = self.kv.export(seq_id)
        if not tokens:
            raise BatchError(f"sequence {seq_id} is empty")
        contents = [self.runner.read_blocks(group, ids) for group, ids in enumerate(blocks)]
        if isinstance(self.runner, BackgroundCopies):
            self.runner.finish_copies()
        return pack(tokens, contents, self._identity(adapter))

    def seq_load(self, seq_id: int, data: bytes, key: bytes | None = None, adapter: LoraAdapter | None = None) -> int:
        """Fill an empty sequence with the bytes of `seq_save`; returns the number of positions.

        Args:
            key: the prefix cache's key for the sequence and its continuation, for trusted data.
                None keeps the sequence and its continuation out of the prefix cache, for data that is not trusted.
            adapter: the adapter that the sequence was evaluated with.

        Raises:
            BatchError: the sequence is not empty, or the data is damaged or of another model.
            OutOfBlocks: the pool has no room for it; nothing was changed.
        """
        tokens, contents = unpack(data, self._identity(adapter), len(self.runner.groups))
        width = self.runner.vocab_size
        if not all(0 <= token < width for token in tokens):
            raise BatchError("the saved sequence holds token ids that the model does not have")
        for group, content in enumerate(contents):
            expected = self.runner.bytes_per_block(group, self.kv.block_size)
            if content.dtype != np.uint8 or content.ndim != 2 or content.shape[1] != expected:
                raise BatchError("the saved sequence's blocks have another size")
        blocks = self.kv.import_(seq_id, tokens, key)
        if [len(ids) for ids in blocks] != [len(content) for content in contents]:
            self.kv.seq_rm(seq_id)
            raise BatchError("the saved sequence lacks blocks")
        for group, (ids, content) in enumerate(zip(blocks, contents, strict=True)):
            self.runner.write_blocks(group, ids, content)
        return len(tokens)

    def restore_prefix(self, names: Sequence[bytes], contents: Sequence[bytes]) -> int:
        """Cache blocks of a prefix that were read from the disk; returns how many of the first blocks are cached now.

        Args:
            names: the names of the prefix's first blocks.
            contents: the content of the last of these blocks. The blocks before them were cached, and may be evicted.
        """
        first = len(names) - len(contents)

        def write(places: list[int], blocks: list[int]) -> None:
            if places:
                content = np.frombuffer(b"".join(contents[place - first] for place in places), np.uint8)
                self.runner.write_blocks(0, blocks, content.reshape(len(places), -1))

        return self.kv.restore(names, first, write)

    def close(self) -> None:
        """Release the KV pool."""
        if self.disk is not None:
            self.disk.close()
        self.runner.close()
        if self.drafter is not None:
            self.drafter.close()

    # Helpers

    def _open_follower(self) -> StateDrafter[Any] | None:
        """Return the drafter that reads the model's rows, if the runner has a predictor."""
        runner = self.runner
        if not isinstance(runner, PredictingRunner) or not runner.predicts:
            return None
        kind = Assistant if runner.mtp_group is None else MultiTokenHead
        return kind(runner, self.kv, self.model.vocab_size)

    def _identity(self, adapter: LoraAdapter | None) -> str:
        digest = "" if adapter is None else adapter.digest
        return fingerprint(self.model, self.runner, self.kv.block_size, digest)

    def _unprepare(self, adapter: LoraAdapter) -> None:
        if isinstance(self.runner, AdaptingRunner):
            self.runner.drop_adapter(adapter)

    def _check(self, batch: Sequence[Entry]) -> None:
        if not batch:
            raise BatchError("an empty batch")
        width = self.runner.vocab_size
        for entry in batch:
            if not entry.tokens:
                raise BatchError(f"sequence {entry.seq_id}: an entry without tokens")
            if entry.adapter not in self._adapter_handles:
                raise BatchError(f"sequence {entry.seq_id}: no adapter has the handle {entry.adapter}")
            for token in entry.tokens:
                # guard: token ids of an entry
                if not 0 <= token < width:
                    raise BatchError(f"sequence {entry.seq_id}: token id {token} is outside 0..{width - 1}")

    def _evaluate(self, batch: Sequence[Entry], read: Read[T], *, with_logits: bool) -> T:
        self._check(batch)
        reservation = self.kv.reserve([(entry.seq_id, entry.tokens, entry.n_past) for entry in batch])
        return self._forward(reservation, lambda: lay_out(batch, self.kv), read, with_logits=with_logits)

    def _forward(
        self,
        reservation: Reservation | RunReservation,
        layout: Callable[[], RaggedBatch],
        read: Read[T],
        *,
        with_logits: bool,
    ) -> T:
        """Run one forward; see `runs.Forward`."""
        steps = () if self._follower is None else reservation.steps
        follower = self._follower if self._follower is not None and self._follower.follows(len(steps)) else None
        seen: tuple[np.ndarray, np.ndarray] | None = None
        try:
            for group, pairs in enumerate(reservation.copies):
                if pairs:
                    self.runner.copy_blocks(group, pairs)
            laid_out = layout()
            if laid_out.state_rows is not None:
                assert isinstance(self.runner, StateRunner), "a runner without states is not asked for them"
                logits, hidden = self.runner.forward_states(laid_out)
                result = read(logits, None, hidden)
            elif follower is not None:
                tokens = follower.reads(laid_out)
                *chosen, states = follower.runner.forward_states(laid_out, tokens, with_logits=with_logits)
                seen = tokens, states
                result = read(*chosen)
            elif self._chooser is not None:
                result = read(*self._chooser.forward_largest(laid_out, with_logits=with_logits))
            else:
                result = read(self.runner.forward(laid_out), None)
        except BaseException:
            # A failed step must change nothing, because the caller may evaluate the same entries again.
            # guard: a step that failed is undone
            reservation.rollback()
            raise
        reservation.commit()
        if self._follower is not None:
            if seen is None:
                self._follower.missed([seq_id for seq_id, _, _ in steps])
            else:
                self._follower.stepped(steps, reservation.evaluated, *seen)
        return result


def _split(rows: Rows, counts: Sequence[int]) -> list[Rows]:
    """Cut rows into consecutive parts of these lengths."""
    ends = list(accumulate(counts))
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]
