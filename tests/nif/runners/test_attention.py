"""The plain-torch step against attention spelled out, and the registered function's refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.runner import LayerGroup
from genbatch.nif.runners.torch_runner import AttentionCall, LayerPool, TensorBatch, TorchStep, paged_attention

BLOCK_SIZE = 4
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 8


def naive(
    query: torch.Tensor,  # [n, H, D], the last n positions
    keys: torch.Tensor,  # [L, Hkv, D]
    values: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    sink_tokens: int = 0,
) -> torch.Tensor:
    """One sequence, query by query and head by head, in float64."""
    length, out = keys.shape[0], torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for row in range(query.shape[0]):
        position = length - query.shape[0] + row
        first = 0 if window is None else max(0, position - window + 1)
        seen = [*range(min(first, sink_tokens)), *range(first, position + 1)]
        for head in range(query.shape[1]):
            kv_head = head * keys.shape[1] // query.shape[1]
            scores = keys[seen, kv_head].double() @ query[row, head].double() * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = torch.softmax(scores, 0)[: len(seen)]
            out[row, head] = weights @ values[seen, kv_head].double()
    return out


class Scene:
    """Sequences with some positions in the pool already and a batch that continues them, blocks shuffled."""

    def __init__(
        self, parts: list[tuple[int, int]], window: int | None, seed: int = 0, *, sink_tokens: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parts, self.window, self.sink_tokens = parts, window, sink_tokens  # (n_past, new tokens)
        lens = [past + new for past, new in parts]
        needed = [-(-length // BLOCK_SIZE) for length in lens]
        order = torch.randperm(sum(needed) + 3, generator=generator).int()
        # NaN wherever nothing was written: a read beyond a sequence's own positions shows up at once.
        shape = (len(order), KV_HEADS, BLOCK_SIZE)
        self.pool = LayerPool(torch.full((*shape, DIM), torch.nan), torch.full((*shape, VALUE_DIM), torch.nan))
        tables = torch.zeros(len(parts), max(needed), dtype=torch.int32)
        slots, at = [], 0
        self.keys = [torch.randn(length, KV_HEADS, DIM, generator=generator) for length in lens]
        self.values = [torch.randn(length, KV_HEADS, VALUE_DIM, generator=generator) for length in lens]
        for b, (past, _) in enumerate(parts):
            blocks = order[at : at + needed[b]]
            at += needed[b]
            tables[b, : needed[b]] = blocks
            where = blocks.long().repeat_interleave(BLOCK_SIZE)[: lens[b]] * BLOCK_SIZE
            where += torch.arange(lens[b]) % BLOCK_SIZE
            self.pool.keys[where[:past] // BLOCK_SIZE, :, where[:past] % BLOCK_SIZE] = self.keys[b][:past]
            self.pool.values[where[:past] // BLOCK_SIZE, :, where[:past] % BLOCK_SIZE] = self.values[b][:past]
            slots.append(where[past:])
            if window is not None:  # blocks that no later position reaches may be gone
                tables[b, -(-sink_tokens // BLOCK_SIZE) : max(0, past - window + 1) // BLOCK_SIZE] = 0
        total = sum(new for _, new in parts)
        self.query = torch.randn(total, HEADS, DIM, generator=generator)
        self.sinks = torch.randn(HEADS, generator=generator)
        starts = torch.tensor([0, *(new for _, new in parts)]).cumsum(0).int()
        self.batch = TensorBatch(
            input_ids=torch.zeros(total, dtype=torch.int64),
            positions=torch.cat([torch.arange(past, past + new) for past, new in parts]),
            query_starts=starts,
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            slots=(torch.cat(slots),),
            block_tables=(tables,),
            logit_rows=torch.arange(total),
            max_query_len=max(new for _, new in parts),
            max_kv_len=max(lens),
        )

    def attend(self, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step = TorchStep(self.batch, (LayerGroup((0,), self.window, self.sink_tokens),), (self.pool,), BLOCK_SIZE)
        key = torch.cat([k[past:] for k, (past, _) in zip(self.keys, self.parts, strict=True)])
        value = torch.cat([v[past:] for v, (past, _) in zip(self.values, self.parts, strict=True)])
        return step.attend(AttentionCall(0, self.query, key, value, DIM**-0.5, softcap, sinks, self.window))

    def expected(self, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        queries = self.query.split([new for _, new in self.parts])
        rows = zip(queries, self.keys, self.values, strict=True)
        parts = [naive(q, k, v, self.window, DIM**-0.5, softcap, sinks, self.sink_tokens) for q, k, v in rows]
        return torch.cat(parts).float()


PARTS = st.lists(st.tuples(st.integers(0, 21), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    parts=PARTS,
    window=st.sampled_from([None, 1, 3, 8]),
    seed=st.integers(0, 99),
    sink_tokens=st.sampled_from([0, 1, 6]),
)
def test_h07_paged_attention_equals_contiguous_attention(
    parts: list[tuple[int, int]], window: int | None, seed: int, sink_tokens: int
) -> None:
    scene = Scene(parts, window, seed, sink_tokens=sink_tokens)
    torch.testing.assert_close(scene.attend(), scene.expected(), atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(parts=PARTS, window=st.sampled_from([None, 3]), seed=st.integers(0, 99))
def test_soft_cap_and_sinks_equal_their_definition(parts: list[tuple[int, int]], window: int | None, seed: int) -> None:
    scene = Scene(parts, window, seed)
    for softcap, sinks in ((1.5, None), (None, scene.sinks), (1.5, scene.sinks)):
        torch.testing.assert_close(scene.attend(softcap, sinks), scene.expected(softcap, sinks), atol=1e-5, rtol=1e-5)


def test_a_sequence_is_untouched_by_its_neighbours_in_the_batch() -> None:
    alone, beside = Scene([(6, 3)], None), Scene([(6, 3), (20, 1), (0, 9)], None)
    beside.query[:3], beside.keys[0], beside.values[0] = alone.query, alone.keys[0], alone.values[0]
    table = beside.batch.block_tables[0][0].long()
    for position in range(6):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        beside.pool.keys[block, :, offset] = alone.keys[0][position]
        beside.pool.values[block, :, offset] = alone.values[0][position]
    assert torch.equal(beside.attend()[:3], alone.attend())


def test_bfloat16_attention_accumulates_in_float32() -> None:
    scene = Scene([(500, 1)], None)
    exact = scene.expected()
    scene.query = scene.query.bfloat16()
    scene.pool = LayerPool(scene.pool.keys.bfloat16(), scene.pool.values.bfloat16())
    out = scene.attend()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=1e-2, rtol=2e-2)


class _Layer(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"genbatch_step": None}, "only the native runner"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "own attention mask"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"is_causal": False}, "later tokens"),
        ({"module": torch.nn.Module()}, "layer index"),
    ],
)
def test_what_block_tables_cannot_express_is_refused(wrong: dict[str, Any], reason: str) -> None:
    some = torch.zeros(1, 1, 1, 4)
    arguments = {"module": _Layer(), "query": some, "key": some, "value": some, "attention_mask": None}
    with pytest.raises(ValueError, match=reason):
        paged_attention(**{**arguments, "genbatch_step": object(), **wrong})
