"""Engines: every engine of the comparison, started when it is first asked for."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.compare.engine_process import EngineProcess
from tests.benchmarks.compare.process_group import ProcessGroup
from tests.benchmarks.compare.service_process import ServiceProcess

N_PARALLEL = 32
# Positions of the KV pool: 32 sequences of W5 at context 1,024, or of W3, fit.
N_CTX = 49152
# llama.cpp's positions are split evenly: its longest sequence of W3 has to fit into each part.
N_CTX_SEQ = 2048
# W6: nine requests, one of them with nearly as many positions as the model has.
W6_SLOTS, W6_CTX_SEQ = 9, 8192

MODES = {
    "int8": ["--dtype", "bfloat16", "--quantize", "int8"],
    "bfloat16": ["--dtype", "bfloat16", "--quantize", "none"],
    "float32": ["--dtype", "float32", "--quantize", "none"],
}
"""genbatch's modes by name, with their flags."""

Started = TypeVar("Started", bound=ProcessGroup)


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """A way to run llama.cpp."""

    quantisation: str
    flash_attention: bool

    def __str__(self) -> str:
        return f"llama.cpp {self.quantisation}" + (" FA" if self.flash_attention else "")


class Engines:
    """Processes by name; all are ended when the block is left.

    Args:
        directory: for sockets.
        python: of the peers' environment.
        gguf: the model in llama.cpp's quantisations.
    """

    def __init__(self, directory: Path, python: Path, gguf: Mapping[str, Path]) -> None:
        self._directory = directory
        self._python = python
        self._gguf = gguf
        self._started: dict[str, ProcessGroup] = {}

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started.values():
            process.close()

    def batcher(self, mode: str) -> EngineProcess:
        """A Batcher in a process."""
        sizes = ["--n-parallel", str(N_PARALLEL), "--n-ctx", str(N_CTX)]
        return self._ours(f"genbatch {mode}", "genbatch_engine", [*MODES[mode], *sizes])

    def floor(self, mode: str) -> EngineProcess:
        """The kernels of that mode alone."""
        return self._ours(f"kernels of {mode}", "floor_engine", MODES[mode])

    def transformers(self, dtype: str) -> EngineProcess:
        """transformers in that dtype."""
        return self._ours(f"transformers {dtype}", "transformers_engine", ["--dtype", dtype])

    def service(self, mode: str) -> ServiceProcess:
        """`genbatch serve` in that mode."""
        name = f"genbatch {mode} served"
        flags = [*MODES[mode], "--n-parallel", str(N_PARALLEL), "--n-ctx", str(N_CTX), "--n-gpu-layers", "0"]
        # The peers have no deadlines: however slow the machine is, nobody's answers are cut short.
        flags += ["--default-deadline-s", "0"]
        return self._start(name, lambda: ServiceProcess(name, self._address(name), flags))

    def llama(self, variant: LlamaVariant, n_slots: int = N_PARALLEL, n_ctx_seq: int = N_CTX_SEQ) -> EngineProcess:
        """llama.cpp with so many slots; it serves at `llama_address` too."""
        address = self.llama_address(variant, n_slots)
        command = [str(self._python), "-m", "tests.benchmarks.compare.llama_engine"]
        command += [str(self._gguf[variant.quantisation]), "--address", address]
        command += ["--n-slots", str(n_slots), "--n-ctx-seq", str(n_ctx_seq)]
        command += ["--n-threads", str(len(os.sched_getaffinity(0)))]
        command += ["--flash-attention"] if variant.flash_attention else []
        return self._start(f"{variant} {n_slots}", lambda: EngineProcess(str(variant), command))

    def llama_address(self, variant: LlamaVariant, n_slots: int = N_PARALLEL) -> str:
        """Where that engine listens."""
        return self._address(f"{variant} {n_slots}")

    def close(self, process: ProcessGroup) -> None:
        """Ends one that is not wanted any more."""
        process.close()
        self._started = {name: one for name, one in self._started.items() if one is not process}

    def _ours(self, name: str, module: str, flags: list[str]) -> EngineProcess:
        command = [sys.executable, "-m", f"tests.benchmarks.compare.{module}", *flags]
        return self._start(name, lambda: EngineProcess(name, command))

    def _start(self, name: str, start: Callable[[], Started]) -> Started:
        if name not in self._started:
            print(f"  starting {name}", file=sys.stderr, flush=True)
            self._started[name] = start()
        process: Started = self._started[name]  # type: ignore[assignment]
        return process

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory / name.replace(' ', '-')}.sock"
