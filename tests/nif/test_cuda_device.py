"""Which device a model goes to, without a GPU and beside two that compute nothing."""

import pytest
import torch

from genbatch.nif.cuda_device import choose_device, on_device
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from tests.nif.runners.fake_gpu import FakeGpu


def test_without_a_gpu_or_without_layers_for_it_a_model_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(0, 5) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(-1, 5) == torch.device("cpu")


def test_the_gpu_that_is_named_is_taken() -> None:
    with FakeGpu().active():
        assert choose_device(-1, 0) == torch.device("cuda", 0)
        assert choose_device(-1, 1) == torch.device("cuda", 1)
        with pytest.raises(OptionError, match=r"main_gpu: 2 is not a GPU of this machine: it has 2"):
            choose_device(-1, 2)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(OptionError, match="main_gpu: must be at least 0"):
        EngineOptions(main_gpu=-1)


def test_the_guard_makes_a_device_current_while_it_is_open() -> None:
    gpu = FakeGpu()
    with gpu.active(), on_device(torch.device("cuda", 1)):
        gpu.check_current("a kernel")
    with on_device(torch.device("cpu")):
        pass
