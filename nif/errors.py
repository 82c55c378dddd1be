"""Every error the native layer raises for a caller's mistake or a lack of resources, and what to run where a library is
missing."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires


class NativeError(Exception):
    """Root of the layer's errors."""

    def __reduce__(self) -> tuple[object, ...]:
        # pickle itself would call the class with the message alone
        return Exception.__new__, (type(self), *self.args), self.__dict__


class ModelError(NativeError):
    """A model cannot be found, read or served; the message names the model and the reason."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot load model {model!r}: {reason}")
        self.model = model
        self.reason = reason


class TensorError(NativeError):
    """A tensor of a model's files has NaN or an infinity; the message names the tensor."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"its weights are not all finite: {tensor} has NaN or an infinity")
        self.tensor = tensor


class OptionError(NativeError):
    """An option's value cannot be honoured; `option` names it."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class AdapterError(NativeError):
    """An adapter cannot be read or served; the message names the file, and the tensor or the field."""

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"cannot load adapter {adapter!r}: {reason}")
        self.adapter = adapter
        self.reason = reason


class BatchError(NativeError):
    """A batch contradicts the context's state (unknown sequence, wrong position, token out of range)."""


class OutOfBlocks(NativeError):
    """The KV pool has too few free blocks for what was asked; nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class DeviceFault(NativeError):
    """The device failed in a step that it had begun: what the pool holds is not known any more."""


def how_to_install(extra: str) -> str:
    """Return a command that installs what the extra needs into this Python.

    Args:
        extra: one of those in pyproject.toml, such as "http".
    """
    try:
        declared = requires("genbatch") or []
    except PackageNotFoundError:  # run from its sources
        declared = []
    of_extra = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    requirements = [entry.partition(";")[0].strip() for entry in declared if of_extra.search(entry)]
    names = " ".join(f"'{name.replace(' ', '')}'" for name in requirements) or f"'genbatch[{extra}]'"
    return f"run: {sys.executable} -m pip install {names}"
