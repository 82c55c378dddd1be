"""Clocks at the borders that a request crosses; for the processes of a service that `borders.py` started.

`install()` runs from a sitecustomize.py, before anything of genbatch is imported. It wraps the functions below as their
modules are imported; each call writes a line `SECONDS BORDER` to a file of its process. All processes of a machine
share the monotonic clock.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = "GENBATCH_BORDERS"  # the variable with the folder of the files

# module: (function, the border at its call, the border at its return)
BORDERS = {
    "genbatch.actors.gateways.http.http_gateway": [("HTTPGateway._serve", "connection accepted", "")],
    "genbatch.actors.gateways.http.generating": [("Generating._asked", "request read", "")],
    "genbatch.actors.gateways.session": [("RPCSession.receive", "request read", "")],
    "genbatch.actors.engine.remote_batcher": [
        ("RemoteBatcher._work", "request at the link", ""),
        ("RemoteBatcher._hear", "tokens at the gateway", ""),
    ],
    "genbatch.actors.engine.link": [("EngineSession._act", "request at the engine", "")],
    "genbatch.actors.batcher.arrivals": [("Arrivals.take", "request in the Batcher's mailbox", "")],
    "genbatch.actors.batcher.slots": [("Slots.enqueue", "prompt rendered and tokenized", "")],
    "genbatch.actors.batcher.planner": [("Planner.plan", "window closed", "step planned")],
    "genbatch.actors.batcher.stepper": [
        ("Stepper.evaluate", "worker awake", "first token drawn"),
        ("Stepper.take", "event loop awake", "token booked"),
    ],
}


class _Clock:
    """Appends to the file of this process, which is opened at the first border."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{os.getpid()}"
        self._file = -1

    def cross(self, border: str) -> None:
        line = f"{time.monotonic():.6f} {border}\n".encode()
        if self._file < 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, line)


class _Finder(MetaPathFinder):
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in BORDERS:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._exec, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        self._wrap(module)

    def _wrap(self, module: ModuleType) -> None:
        for function, at_call, at_return in BORDERS[module.__name__]:
            owner, _, name = function.partition(".")
            kind = getattr(module, owner)
            setattr(kind, name, _timed(getattr(kind, name), self._clock, at_call, at_return))


def _timed(function: Callable[..., Any], clock: _Clock, at_call: str, at_return: str) -> Callable[..., Any]:
    @wraps(function)
    def timed(*args: Any, **named: Any) -> Any:
        clock.cross(at_call)
        result = function(*args, **named)
        if at_return:
            clock.cross(at_return)
        return result

    return timed


def install() -> None:
    """Sets the clocks of this process."""
    sys.meta_path.insert(0, _Finder(_Clock(os.environ[FOLDER])))
