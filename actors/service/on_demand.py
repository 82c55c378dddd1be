"""Models on demand, in the process that starts engines: their options, their sizes, and their engines.

A gateway decides when a model is loaded and unloaded (loaded_models.py), and sends SwitchEngine.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import EngineStopped, ManagedModel, SwitchEngine, encode_options
from genbatch.actors.runtime.supervisor import Task
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.host import free_host_memory
from genbatch.nif.models.model_names import written_path

logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ModelOnDemand:
    """A model that is loaded by its first request.

    Args:
        engine: its options, with the name for clients.
        batcher: the options of its Batcher.
        keep_alive: seconds without requests after which it is unloaded; negative for never.
    """

    engine: EngineOptions
    batcher: BatcherOptions
    keep_alive: float

    def managed(self, place: int) -> ManagedModel:
        """Return the message for the gateway, for the engine with this index."""
        adapters = tuple(source.partition("=")[0] for source in self.engine.lora)
        size = file_bytes(self.engine.model_path)
        batcher = encode_options(self.batcher)
        return ManagedModel(self.engine.served_model_name, place, size, self.keep_alive, batcher, adapters)


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The models of a service.

    Args:
        models: the models at the start. They are loaded one after another, so that each measures the memory that the
            earlier ones left. Models on demand come last. Of several models, each has its name for clients.
        find_on_demand: returns the models on demand that there are now. It is called again and again, and models with
            a new name are served too. None if there are no others.
    """

    models: Sequence[EngineOptions | ModelOnDemand]
    find_on_demand: Callable[[], list[ModelOnDemand]] | None = None


def file_bytes(model: str) -> int:
    """Return the size of a model's weights in its files; 0 for a model that is not at a path."""
    path = written_path(model)
    files = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
    return sum([file.stat().st_size for file in files])


def model_bytes(model_memory: float, max_memory_percent: float) -> int:
    """Return the bytes for all models on demand: `model_memory` GiB, or at 0 a share of the memory that is free now."""
    if model_memory:
        return int(model_memory * _GIB)
    free = free_host_memory()
    return 2**63 - 1 if free is None else int(free * max_memory_percent)


def check_budget(models: Sequence[ManagedModel], model_memory: float) -> None:
    """Check that one model at least fits into `model_memory` GiB; 0 sets no bound.

    Raises:
        OptionError: none does.
    """
    smallest = min(models, key=lambda model: model.num_bytes, default=None)
    if smallest is not None and model_memory and smallest.num_bytes > model_memory * _GIB:
        size = f"the smallest model, {smallest.name}, takes {smallest.num_bytes / _GIB:.3g} GiB"
        raise OptionError("model_memory", f"no model fits into {model_memory:g} GiB: {size}")


class EngineOnDemand:
    """Runs the engine of one model while it is wanted; it ends no other engine and no service.

    Args:
        place: the engine's index.
        run: runs a process from its start to its end (EngineRunner.run).
        tell: called with each end of the engine.
    """

    def __init__(self, place: int, run: Task, tell: Callable[[EngineStopped], Awaitable[None]]) -> None:
        self._place = place
        self._run = run
        self._tell = tell
        self._is_wanted = trio.Event()
        self._scope = trio.CancelScope()

    def switch(self, message: SwitchEngine) -> None:
        """Start the engine, or end it."""
        if message.is_wanted:
            self._is_wanted.set()
        else:
            self._is_wanted = trio.Event()
            self._scope.cancel()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._is_wanted.wait()
            reason = ""
            with trio.CancelScope() as self._scope:
                reason = await self._run_once()
                self._is_wanted = trio.Event()
            await self._tell(EngineStopped(self._place, reason))

    async def _run_once(self) -> str:
        """Return the reason why the engine has ended."""
        try:
            await self._run()
        except Exception as error:
            logger.error("the engine of a model on demand has ended: %s", error)
            return str(error) or type(error).__name__
        return "it has ended"


def on_demand_in(directory: Path) -> dict[str, str]:
    """Return the models in a directory, by their names: GGUF files, and directories with a model."""
    paths: dict[str, str] = {}
    for entry in sorted(directory.iterdir()):
        if entry.is_file() and entry.suffix.lower() == ".gguf":
            paths[entry.stem] = str(entry)
        elif (entry / "config.json").is_file():
            paths[entry.name] = str(entry)
        elif entry.is_dir() and len(files := list(entry.glob("*.gguf"))) == 1:
            paths[entry.name] = str(files[0])
    return paths


# Seconds between two looks into a directory of models.
WATCH_S = 2.0


async def watch_models(
    find_models: Callable[[], list[ModelOnDemand]],
    names: Iterable[str],
    on_demand: Iterable[ModelOnDemand],
    add: Callable[[ModelOnDemand], Awaitable[None]],
    show: Callable[[str, bool], Awaitable[None]],
) -> None:
    """Add each model that appears, hide each one that goes, and show it when it is back, until cancelled.

    A model is added once two looks have found its files with the same size: a file that is still being copied grows.

    Args:
        find_models: returns the models that there are now.
        names: the names of all models that are served.
        on_demand: those of them that `find_models` has found.
        add: serves one more model.
        show: called with the name of a model, and whether clients see it from now on.
    """
    known = set(names)
    paths = {model.engine.served_model_name: model.engine.model_path for model in on_demand}
    hidden: set[str] = set()
    sizes: dict[str, int] = {}
    while True:
        await trio.sleep(WATCH_S)
        try:
            models = await trio.to_thread.run_sync(find_models)
            found_paths = {model.engine.served_model_name: model.engine.model_path for model in models}
            measured = {name: file_bytes(path) for name, path in found_paths.items()}
        except (OSError, OptionError) as error:
            logger.debug("the list of models cannot be read: %s", error)
            continue
        for model in models:
            name = model.engine.served_model_name
            if name not in known and sizes.get(name) == measured[name]:
                known.add(name)
                paths[name] = model.engine.model_path
                logger.info("the model %s has appeared", name)
                await add(model)
        # A name that is back at another path stays hidden: the engine has the path from before.
        there = {name for name, path in paths.items() if name in measured and path == found_paths[name]}
        for name in paths.keys() - there - hidden:
            hidden.add(name)
            logger.info("the model %s has gone", name)
            await show(name, False)
        for name in [name for name in hidden & there if sizes.get(name) == measured[name]]:
            hidden.remove(name)
            logger.info("the model %s is back", name)
            await show(name, True)
        sizes = measured
