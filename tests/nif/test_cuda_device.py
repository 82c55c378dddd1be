"""Which device a model goes to, without a GPU and beside two that compute nothing."""

import pytest
import torch

from genbatch.nif import cuda_device
from genbatch.nif.cuda_device import CPU, Device, choose_device, on_device
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from tests.nif.runners.fake_gpu import FakeGpu


def test_without_a_gpu_or_without_layers_for_it_a_model_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(0, 5) == CPU
    monkeypatch.setattr(cuda_device, "has_gpu", lambda: False)
    assert choose_device(-1, 5) == CPU


def test_the_gpu_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "has_gpu", lambda: True)
    with FakeGpu().active():
        assert choose_device(-1, 0) == Device("cuda", 0)
        assert choose_device(-1, 1) == Device("cuda", 1)
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
