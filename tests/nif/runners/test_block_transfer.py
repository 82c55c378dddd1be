"""Blocks between the pool and the host, in as many parts as their memory takes."""

import pytest
import torch

from genbatch.nif.runners import block_transfer
from genbatch.nif.runners.block_transfer import BlockTransfer


@pytest.mark.parametrize("at_once", [1, 64, 100, 2**20])
def test_h16_blocks_come_back_whole_in_parts_of_any_size(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_transfer, "_MAX_GATHERED_BYTES", at_once)
    transfer = BlockTransfer(torch.device("cpu"))
    pool = torch.arange(7 * 8, dtype=torch.float32).view(7, 8)
    before = pool.clone()
    content = transfer.read(pool, [5, 0, 3])
    assert content.shape == (3, 32)
    assert content.view(torch.float32).equal(before[[5, 0, 3]])
    pool.zero_()
    transfer.write(pool, [1, 2, 6], content)
    transfer.finish()
    assert pool[[1, 2, 6]].equal(before[[5, 0, 3]])
    assert pool[[0, 3, 4, 5]].eq(0).all()


def test_h16_what_was_read_is_a_copy() -> None:
    pool = torch.ones((2, 4))
    content = BlockTransfer(torch.device("cpu")).read(pool, range(2))
    pool.zero_()
    assert content.view(torch.float32).eq(1).all()
