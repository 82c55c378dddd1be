"""LlamaDecoder: llama.cpp's low-level API, one llama_decode a step for every sequence. Runs in the peers' environment.

The context is split by sequence (kv_unified off), which is its fastest way to decode many: each sequence reads only its
own cells.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

# Tokens of one llama_decode, its own default.
N_BATCH = 512
_MAX_PIECE = 256

Entry = tuple[int, Sequence[int], int, bool]
"""seq_id, tokens, the first one's position, whether the last one's logits are wanted."""


@llama_cpp.llama_log_callback
def _log_nothing(level: int, text: bytes, user_data: Any) -> None:
    """Its log goes to standard error line by line otherwise."""


class LlamaDecoder:
    """A model and a context.

    Args:
        path: a GGUF file.
        n_seq: sequences, each with its own cells.
        n_ctx_seq: positions of one sequence.
        flash_attention: its fused attention; which of the two is faster depends on the processor.
    """

    def __init__(self, path: Path, *, n_seq: int, n_ctx_seq: int, n_threads: int, flash_attention: bool) -> None:
        llama_cpp.llama_log_set(_log_nothing, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise OSError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_seq * n_ctx_seq, n_seq, False
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash_attention)
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise OSError(f"llama.cpp cannot make a context of {n_seq} x {n_ctx_seq} positions")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_seq = n_ctx_seq
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self._batch.token, (N_BATCH,))
        self._positions = as_array(self._batch.pos, (N_BATCH,))
        self._wanted = as_array(self._batch.logits, (N_BATCH,))
        as_array(self._batch.n_seq_id, (N_BATCH,))[:] = 1
        self._piece = ctypes.create_string_buffer(_MAX_PIECE)

    n_batch = N_BATCH

    @staticmethod
    def system_info() -> str:
        """Which instructions it was built for."""
        return llama_cpp.llama_print_system_info().decode()

    def step(self, entries: Sequence[Entry]) -> list[int]:
        """One llama_decode of at most N_BATCH tokens: the likeliest next token of each entry that wants one."""
        if len(entries) > 1 and all(len(entry[1]) == 1 and entry[3] for entry in entries):
            return self._decode_step(entries)
        row = 0
        for seq_id, tokens, position, wanted in entries:
            end = row + len(tokens)
            self._tokens[row:end] = tokens
            self._positions[row:end] = range(position, position + len(tokens))
            self._wanted[row:end] = 0
            self._wanted[end - 1] = wanted
            for index in range(row, end):
                self._batch.seq_id[index][0] = seq_id
            row = end
        self._batch.n_tokens = row
        return self._decode(sum(entry[3] for entry in entries))

    def seq_rm(self, seq_id: int) -> None:
        """Forgets a sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq_id, -1, -1)

    def seq_cp(self, source: int, target: int) -> None:
        """Makes `target`, which must be empty, a copy of all of `source`: split contexts copy whole sequences only."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def text(self, token: int) -> str:
        """A token's own text, special tokens included."""
        length = llama_cpp.llama_token_to_piece(self._vocab, token, self._piece, _MAX_PIECE, 0, True)
        return self._piece.raw[: max(length, 0)].decode(errors="replace")

    def _decode_step(self, entries: Sequence[Entry]) -> list[int]:
        """A token of each: the arrays are filled at once, which is all that Python has to do in such a step."""
        count = len(entries)
        self._tokens[:count] = [entry[1][0] for entry in entries]
        self._positions[:count] = [entry[2] for entry in entries]
        self._wanted[:count] = 1
        for index, entry in enumerate(entries):
            self._batch.seq_id[index][0] = entry[0]
        self._batch.n_tokens = count
        return self._decode(count)

    def _decode(self, num_rows: int) -> list[int]:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        if num_rows == 0:
            return []
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (num_rows, self.vocab_size)
        )
        return logits.argmax(axis=1).tolist()
