"""BatchFile: JSON lines of requests in, JSON lines of results out, so that a run that was killed can go on.

Each line in is an object: `prompt`, `token_ids` or `messages`, parameters by name, and an `id` if wanted. Each line out
has the number of its line in (`line`, from 0), the `id`, and either `result` or `error`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import Result


class BatchFile:
    """The two files of a run.

    Args:
        source: JSON lines; empty lines are passed over.
        target: where results are appended; what an earlier run wrote there is not done again.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.target = target
        self.lines = [line for line in source.read_text().splitlines() if line.strip()]
        self.done = self._read_done()

    def todo(self) -> Iterator[tuple[int, str]]:
        """Line numbers and lines that have no result yet."""
        return ((number, line) for number, line in enumerate(self.lines) if number not in self.done)

    @staticmethod
    def parse(line: str) -> tuple[Any, dict[str, Any]]:
        """A line's id (None without one) and its other fields, unchecked.

        Raises:
            InvalidRequest: not a JSON object.
        """
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(None, f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidRequest(None, "not a JSON object")
        identity = fields.pop("id", None)
        return identity, fields

    def write(self, number: int, identity: Any, outcome: Result | GenbatchError) -> None:
        """Appends a line's outcome; it is in the file when this returns."""
        entry: dict[str, Any] = {"line": number, "id": identity}
        if isinstance(outcome, GenbatchError):
            entry["error"] = outcome.to_wire()
        else:
            entry["result"] = outcome
        with self.target.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self.done.add(number)

    def _read_done(self) -> set[int]:
        """What an earlier run finished; a last line that a kill cut short is taken away."""
        if not self.target.exists():
            return set()
        data = self.target.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self.target.write_bytes(whole)
        entries = [json.loads(line) for line in whole.splitlines()]
        # A refusal that passes with time is tried again; one that names a parameter is not.
        return {entry["line"] for entry in entries if "retry_after_ms" not in entry.get("error", {})}
