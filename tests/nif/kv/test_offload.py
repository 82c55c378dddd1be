"""The host store keeps what it accepted, within its budget."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.kv.offload import HostBlockStore
from genbatch.nif.runner import Content


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_h16_content_comes_back_as_it_was_put(kind: Callable[[np.ndarray], Content]) -> None:
    store = HostBlockStore(1024)
    content = [kind(np.arange(64, dtype=np.uint8).reshape(2, 32)), kind(np.zeros((1, 16), np.uint8))]
    assert store.put("request", content)
    assert (store.bytes_used, len(store), "request" in store) == (80, 1, True)
    taken = store.take("request")
    assert all(np.array_equal(one, other) for one, other in zip(taken, content, strict=True))
    assert (store.bytes_used, len(store)) == (0, 0)


def test_h16_a_full_store_refuses_and_keeps_what_it_has() -> None:
    store = HostBlockStore(100)
    assert store.put(1, [np.zeros(60, np.uint8)])
    assert not store.put(2, [np.zeros(30, np.uint8), np.zeros(11, np.uint8)])
    assert store.put(3, [np.zeros(40, np.uint8)])
    assert (store.bytes_used, 1 in store, 2 in store) == (100, True, False)
    assert store.drop(1)
    assert not store.drop(1)
    assert store.bytes_used == 40


def test_a_view_does_not_keep_all_that_it_is_a_view_of_alive() -> None:
    store = HostBlockStore(100)
    store.put(1, [torch.zeros(1000, dtype=torch.uint8)[:10], np.zeros(1000, np.uint8)[:10]])
    tensor, array = store.take(1)
    assert isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() == 10
    assert isinstance(array, np.ndarray) and array.base is None


def test_mistakes_are_named() -> None:
    store = HostBlockStore(10)
    store.put("a", [np.zeros(1, np.uint8)])
    with pytest.raises(BatchError, match="'a' is swapped out already"):
        store.put("a", [])
    with pytest.raises(BatchError, match="'b' is not swapped out"):
        store.take("b")
    with pytest.raises(OptionError, match="cpu_offload_space"):
        HostBlockStore(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin memory")
def test_h16_pinning_without_a_gpu_is_refused() -> None:
    with pytest.raises(OptionError, match="CUDA"):
        HostBlockStore(10, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_h16_content_is_pinned_with_a_gpu() -> None:
    store = HostBlockStore(100, pinned=True)
    store.put(1, [torch.ones(10, dtype=torch.uint8)])
    [kept] = store.take(1)
    assert kept.is_pinned()
    assert torch.equal(kept, torch.ones(10, dtype=torch.uint8))
