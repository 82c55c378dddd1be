"""Reads JSON files of bounded size, because a model's files may have any content."""

import json
from pathlib import Path
from typing import Any

from genbatch.nif.errors import ModelError

MAX_JSON_BYTES = 1 << 26  # for comparison, an index of a thousand shards has some megabytes


def read_json(source: str, path: Path) -> Any:
    """Read a JSON file.

    Args:
        source: the user's name of the model, for errors.

    Raises:
        ModelError: the file cannot be read, is too large, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        # guard: size of a JSON file
        if len(raw) > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
        return json.loads(raw)
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelError(source, f"{path.name} cannot be read: {one_line(fault)}") from fault


def read_object(source: str, path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        optional: whether a missing file gives an empty object.

    Raises:
        ModelError: `read_json` refuses the file, or its value is not an object.
    """
    if optional and not path.is_file():
        return {}
    value = read_json(source, path)
    if not isinstance(value, dict):
        raise ModelError(source, f"{path.name} is not a JSON object")
    return value


def one_line(fault: BaseException) -> str:
    """Return the type and the message of a library's exception, on one line."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:300]}" if text else type(fault).__name__
