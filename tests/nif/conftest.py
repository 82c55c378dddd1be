"""What tests of kernels and of the runners on top of them share."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genbatch.nif.models.model_source import cache_directory
from genbatch.nif.native.library import native_library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory but for the compiled kernels of the other."""
    native_library()  # compiled once, there
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "native").symlink_to(cache_directory() / "native")
    monkeypatch.setenv("GENBATCH_CACHE", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A small model in a GGUF file."""
    from tests.nif.models.gguf_files import write_llama  # a machine with a GPU may be without the package gguf

    path = tmp_path / "model" / "tiny.gguf"
    path.parent.mkdir()
    write_llama(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Leave out work of Triton's interpreter that has no effect; that was more than half of its time.

    Every call of a device function replaced the functions of `triton.language` again, and never put them back. Every
    sum of integers was computed a second time for an overflow check, which reports only to a debugger. Every operation
    made the type of its result anew, with its name.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs, language
    from triton.runtime import interpreter

    if not knobs.runtime.interpret or not hasattr(interpreter, "_LangPatchScope"):  # Triton 3.6 has none
        return
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    made: dict[object, dict[str, object]] = {}
    make = language.block_type.__init__

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = vars(self).copy()
        vars(self).update(made[key])

    language.block_type.__init__ = make_once


@pytest.fixture(scope="module")
def exact_interpreter() -> Iterator[None]:
    """An interpreter whose results depend on no lane: numpy rounds an element by where it lies in its array.

    What it computes in float64 and rounds once is the same wherever it lies, so that a difference is the kernel's own.
    """
    triton = pytest.importorskip("triton")
    from triton.runtime import interpreter

    patch = pytest.MonkeyPatch()
    if triton.knobs.runtime.interpret:
        builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

        def exp2(self: Any, arg: Any) -> Any:
            return self.unary_op(arg, lambda data: np.exp2(data.astype(np.float64)).astype(data.dtype))

        def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

        def exp(self: Any, arg: Any) -> Any:
            return self.unary_op(arg, lambda data: np.exp(data.astype(np.float64)).astype(data.dtype))

        patch.setattr(builder, "create_exp", exp)
        patch.setattr(builder, "create_exp2", exp2)
        patch.setattr(builder, "create_dot", dot)
    yield
    patch.undo()
