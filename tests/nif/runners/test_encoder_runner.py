"""The encoders' runner: texts that go through together, and a pool that holds token ids."""

from pathlib import Path
from types import ModuleType

import torch
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.context.context import Context
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.runners.encoder_runner import MAX_PADDING, MAX_TOKENS, SPARE_TOKENS, EncoderRunner, alike
from tests.nif.embedders import build_embedder


@given(st.lists(st.integers(1, 6000), max_size=80))
def test_texts_go_together_with_their_like_and_none_is_left_out(lengths: list[int]) -> None:
    batches = alike(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest, shortest = max(lengths[i] for i in batch), min(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= MAX_TOKENS
        assert longest <= MAX_PADDING * shortest + SPARE_TOKENS


def test_a_text_survives_sharing_copies_and_a_stay_on_the_host(tmp_path: Path, tiny_models: ModuleType) -> None:
    model = load_model(str(build_embedder("bert mean", tmp_path, tiny_models)), dtype="float32", n_gpu_layers=0)
    ctx = Context(model, EncoderRunner(model), n_ctx=64, n_parallel=3, block_size=4)
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13]

    def embedding(seq_id: int, start: int) -> torch.Tensor:
        entry = Entry(seq_id, text[start:], start, Logits.LAST_STATE)
        [[row]] = ctx.step_and_read([entry], [None], lambda rows, _: rows)
        return torch.as_tensor(row)

    expected = embedding(0, 0)
    ctx.seq_rm(0)
    ctx.step([Entry(0, text[:6], 0, Logits.NONE)], [None])
    ctx.seq_cp(0, 1, 0, 6)  # the block that both would write to is copied
    ctx.step([Entry(0, [99], 6, Logits.NONE)], [None])
    torch.testing.assert_close(embedding(1, 6), expected)
    ctx.seq_rm(1)
    ctx.step([Entry(1, text[:6], 0, Logits.NONE)], [None])
    state = ctx.seq_save(1)
    ctx.seq_load(2, state)
    torch.testing.assert_close(embedding(2, 6), expected)
    ctx.close()
