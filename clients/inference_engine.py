"""InferenceEngine: the model and its KV cache for offline use, stepped by hand."""

from collections.abc import Sequence

import torch

from genbatch.clients.inference_session import InferenceSession
from genbatch.nif.batch import Entry
from genbatch.nif.context import Context
from genbatch.nif.errors import BatchError
from genbatch.nif.models.model import Model, load_model
from genbatch.nif.runners.torch_runner import TorchRunner


class InferenceEngine:
    """One forward for all sessions at once, each of its own length, none padded.

    Args:
        model: a loaded model, or what `load_model` takes.
        n_ctx: positions in the KV pool, all sessions together.
        n_parallel: sessions that run at once.
        use_amp: run the forward under autocast.
        amp_dtype: autocast's precision.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: Model | str = "smollm2",
        *,
        n_ctx: int = 8192,
        n_parallel: int = 8,
        use_amp: bool = False,
        amp_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.model = load_model(model) if isinstance(model, str) else model
        self.use_amp = use_amp
        self.amp_dtype = amp_dtype
        self.context = Context(self.model, TorchRunner(self.model), n_ctx=n_ctx, n_parallel=n_parallel)
        self.free_slots = list(range(n_parallel))

    @property
    def max_positions(self) -> int:
        """Most positions one session may hold."""
        return self.context.max_positions

    def has_room(self, num_positions: int, *, spare: int) -> bool:
        """Whether the pool has the blocks for so many positions and `spare` blocks more."""
        kv = self.context.kv
        needed = kv.most_held(num_positions, self.context.n_batch)
        return all(count + spare <= free for count, free in zip(needed, kv.free_blocks, strict=True))

    def prefill(self, session: InferenceSession) -> None:
        """Gives a session a slot and evaluates all its tokens but the last, which the next step takes.

        Raises:
            OutOfBlocks: the pool has no room for it now; nothing is held.
        """
        slot = self.free_slots.pop(0)
        tokens = session.tokens
        try:
            held = self.context.attach_prefix(slot, tokens)
            if held < len(tokens) - 1:
                with self._autocast():
                    self.context.prefill(tokens[held:-1], slot, held)
        except BaseException:
            self.context.seq_rm(slot)
            self.free_slots.insert(0, slot)
            raise
        session.seq_id = slot

    @torch.inference_mode()
    def decode_step_sessions(self, sessions: Sequence[InferenceSession]) -> torch.Tensor:
        """Evaluates the last token of every session in one forward.

        Args:
            sessions: prefilled ones that have not finished, at least one.

        Returns:
            The logits of each session's next token, [len(sessions), vocab_size] float32.

        Raises:
            BatchError: a session has finished or was not prefilled; nothing was changed.
            OutOfBlocks: the pool cannot hold the new tokens; nothing was changed.
        """
        batch = []
        for session in sessions:
            if session.finished or session.seq_id is None:
                raise BatchError("a session has finished or was not prefilled")
            tokens = session.tokens
            batch.append(Entry(session.seq_id, tokens[-1:], len(tokens) - 1))
        with self._autocast():
            return torch.cat(self.context.eval(batch))

    def release_kv_blocks(self, session: InferenceSession) -> None:
        """Gives a session's slot and blocks back; fine if it holds none."""
        if session.seq_id is not None:
            self.context.seq_rm(session.seq_id)
            self.free_slots.append(session.seq_id)
            session.seq_id = None

    def close(self) -> None:
        """Releases the KV pool."""
        self.context.close()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, dtype=self.amp_dtype, enabled=self.use_amp)
