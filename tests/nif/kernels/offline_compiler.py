"""Compiles kernels for a GPU that is not there: a launch compiles what it would have launched and runs nothing.

The interpreter accepts Python that the compiler refuses, so the kernels' launchers are also called under `record`, in a
process of their own where Triton is not interpreting.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that one program may use, by compute capability. A multiprocessor has one more."""

target: ContextVar[int] = ContextVar("target", default=90)
"""The compute capability that `record` compiles for."""

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


_WIDE_LOAD = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*,\s*0x10|ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64")
_ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*,\s*0x(10|8)\b")
_MATRIX_PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}


@dataclass(frozen=True)
class Compiled:
    """A kernel as the GPU would get it."""

    name: str
    variant: str  # what it was specialised for: types, constants, what divides by 16, warps and stages
    shared: int  # bytes
    registers: int  # a thread
    spilled: int  # bytes of them
    loads_wide: bool  # whether any load takes 16 bytes
    copies: int  # asynchronous ones in the code, in units of 16 bytes of every thread; those of 4 bytes are block ids
    products: str  # which instruction multiplies matrices, "" where none does


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = (re.search(rf"{field}:(\d+)", done.stdout) for field in ("REG", "STACK"))
    assert registers and stack, done.stdout
    return int(registers[1]), int(stack[1])


def variant_of(
    kernel: JITFunction, args: Sequence[object], kwargs: dict[str, object]
) -> tuple[str, dict[str, object], dict[str, str], dict[str, object], dict[tuple[int], object]]:
    """What a launch is compiled for: a key of all of it, options, types, constants, and what divides by 16."""
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    kwargs = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = f"{kernel.__name__} {signature} {constants} {attributes} {options}"
    return key, options, signature, constants, attributes


@contextlib.contextmanager
def record(capability: int, *, compiles: bool = True) -> Iterator[list[Compiled]]:
    """While open, every kernel launch is compiled (once per variant) and appended instead of run.

    Args:
        capability: of the GPU, 90 for 9.0.
        compiles: False only tells which variants there would be.
    """
    compiled: list[Compiled] = []
    seen: set[str] = set()
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        key, options, signature, constants, attributes = variant_of(self, args, kwargs)
        if key in seen:
            return
        seen.add(key)
        if not compiles:
            compiled.append(Compiled(self.__name__, key, 0, 0, 0, False, 0, ""))
            return
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        registers, spilled = _resources(binary.asm["cubin"])
        ptx = binary.asm["ptx"]
        products = next((name for name, text in _MATRIX_PRODUCTS.items() if text in ptx), "")
        wide = _WIDE_LOAD.search(ptx) is not None
        copies = sum(int(size, 16) for size in _ASYNC_COPY.findall(ptx)) // 16
        shared = binary.metadata.shared
        compiled.append(Compiled(self.__name__, key, shared, registers, spilled, wide, copies, products))

    JITFunction.run = compile_only
    before = target.set(capability)
    try:
        yield compiled
    finally:
        target.reset(before)
        JITFunction.run = launch
