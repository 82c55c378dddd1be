"""Keeps transformers' bars, logs and warnings off the terminal while a model loads; `progress` reports."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total): "download", "convert", "load", "compile" or "pack", total 0 while unknown."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers and the Hugging Face client inside the block, and restores their settings."""
    theirs: Any = transformers_logging
    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports to nobody."""
