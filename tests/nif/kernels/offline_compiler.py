"""Compiles kernels for a GPU that is not there: a launch compiles what it would have launched and runs nothing.

The interpreter accepts Python that the compiler refuses, so the kernels' launchers are also called under `record`, in a
process of their own where Triton is not interpreting.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes that one program may use on compute capability 9.0

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Compiled:
    """A kernel as the GPU would get it: bytes of shared memory, registers a thread, bytes of them spilled."""

    name: str
    shared: int
    registers: int
    spilled: int


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = (re.search(rf"{field}:(\d+)", done.stdout) for field in ("REG", "STACK"))
    assert registers and stack, done.stdout
    return int(registers[1]), int(stack[1])


@contextlib.contextmanager
def record() -> Iterator[list[Compiled]]:
    """While open, every kernel launch is compiled (once per signature) and appended instead of run."""
    compiled: list[Compiled] = []
    seen: set[str] = set()
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
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
        key = f"{self.__name__} {signature} {constants} {options}"
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=HOPPER, options=options)
        registers, spilled = _resources(binary.asm["cubin"])
        compiled.append(Compiled(self.__name__, binary.metadata.shared, registers, spilled))

    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
