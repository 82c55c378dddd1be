"""What a child of `gpu.py` reports: one JSON line an event, appended at once to the part's file."""

import json
import os
from pathlib import Path
from typing import Any


def report(event: str, case: str, **fields: Any) -> None:
    """Appends an event: "begin", "figure", "failed" or "end"."""
    with Path(os.environ["GPU_EVENTS"]).open("a") as file:
        file.write(json.dumps({"event": event, "case": case, **fields}) + "\n")


def done() -> set[str]:
    """The cases that ended before, which are not run again."""
    return set(json.loads(os.environ.get("GPU_DONE", "[]")))


IS_DRY = "GPU_DRY_RUN" in os.environ
