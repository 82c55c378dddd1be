"""Packing a batch into one copy."""

import dataclasses
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.runners.launches import BatchUpload, DecodeStep, packed_size
from genbatch.nif.runners.torch_runner import TensorBatch


def batch_of(num_tokens: int, num_entries: int, num_groups: int, seed: int) -> TensorBatch:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(1000, shape, generator=generator).to(dtype)

    return TensorBatch(
        input_ids=random(num_tokens),
        positions=random(num_tokens),
        query_starts=random(num_entries + 1, dtype=torch.int32),
        kv_lens=random(num_entries, dtype=torch.int32),
        slots=tuple(random(num_tokens) for _ in range(num_groups)),
        block_tables=tuple(random(num_entries, 3, dtype=torch.int32) for _ in range(num_groups)),
        logit_rows=random(num_entries - 1),
        max_query_len=4,
        max_kv_len=9,
        adapters=random(num_tokens),
    )


def assert_equal(left: TensorBatch, right: TensorBatch) -> None:
    for field in dataclasses.fields(TensorBatch):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if ours is None or isinstance(ours, int):
            assert ours == theirs
            continue
        for a, b in zip(
            ours if isinstance(ours, tuple) else (ours,),
            theirs if isinstance(theirs, tuple) else (theirs,),
            strict=True,
        ):
            assert a.dtype == b.dtype
            assert a.equal(b)


@given(st.integers(1, 2000), st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
def test_a_batch_arrives_as_it_was_sent(num_tokens: int, num_entries: int, num_groups: int, seed: int) -> None:
    batch = batch_of(num_tokens, num_entries, num_groups, seed)
    assert_equal(BatchUpload(torch.device("cpu")).upload(batch), batch)


def test_later_uploads_leave_earlier_batches_alone() -> None:
    upload = BatchUpload(torch.device("cpu"))
    batches = [batch_of(5, 2, 1, seed) for seed in range(4)]
    for arrived, batch in zip([upload.upload(batch) for batch in batches], batches, strict=True):
        assert_equal(arrived, batch)


def test_steps_of_one_shape_land_at_the_same_addresses() -> None:
    upload = BatchUpload(torch.device("cpu"))
    first, second = (
        DecodeStep(replace(batch_of(5, 2, 2, seed), adapters=None), torch.full((5, 5), seed + 0.5, dtype=torch.float64))
        for seed in (0, 1)
    )  # a captured step has no adapters
    buffer = torch.empty(packed_size(first), dtype=torch.uint8)
    seen = upload.upload_step(first, into=buffer)
    again = upload.upload_step(second, into=buffer)
    for step in (again, seen):  # `seen` has the views that a captured graph holds
        assert_equal(step.batch, second.batch)
        assert step.draws.equal(second.draws)
