"""What a command started in this process leaves behind is undone: its logging, and what it tells its children."""

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    environment = dict(os.environ)
    root, ours = logging.getLogger(), logging.getLogger("genbatch")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)
    for name in os.environ.keys() - environment.keys():
        if name.startswith("GENBATCH_"):
            del os.environ[name]
