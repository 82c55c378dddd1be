"""`genbatch batch`: run a file of requests; a run that was killed continues where it stopped.

Each line of the input is an object with `prompt`, `token_ids` or `messages`, parameters by name, and an optional `id`;
or a request in the form of OpenAI's batch files, with `custom_id`, `url` and `body`. Each line of the results has the
number of its request's line (`line`, from 1) and an answer in the same form.
"""

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genbatch.actors.gateways.http.batch_runner import BatchLine
from genbatch.clients.cli.batch_api import BatchAPI
from genbatch.clients.cli.command import FAILURE, UsageError, report, run_command, with_flag_groups
from genbatch.clients.cli.connection import ConnectionFlags, open_client
from genbatch.clients.cli.option_flags import ModelFlags
from genbatch.clients.interface import Client
from genbatch.proto.errors import ErrorInfo, GenbatchError, InvalidRequest, Unavailable, from_wire
from genbatch.proto.messages import Result
from genbatch.proto.validation import check_type

_MAX_LISTED = 10  # failed lines that are listed one by one


class BatchFile:
    """The two files of a run.

    Args:
        source: JSON lines; empty lines are skipped.
        target: results are appended here; requests with a result of an earlier run are skipped.

    Raises:
        UsageError: the source cannot be read, or the target cannot be written or contains something else.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.source = source
        self.target = target
        if target.resolve() == source.resolve():
            raise UsageError("output: the results and the requests cannot share a file")
        # Not splitlines, since a JSON string may contain U+2028 and other line ends.
        lines = enumerate(_text_of(source).split("\n"), 1)  # as an editor counts
        self.lines = {place: line for place, line in lines if line.strip()}
        self.failed: dict[int, str] = {}
        self.done = self._read_done()

    def todo(self) -> Iterator[tuple[int, str]]:
        """Return the numbers and the lines of requests without a result."""
        return ((number, line) for number, line in self.lines.items() if number not in self.done)

    @staticmethod
    def parse(line: str) -> dict[str, Any]:
        """Return the unchecked fields of a line.

        Raises:
            InvalidRequest: not a JSON object.
        """
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(None, f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidRequest(None, "not a JSON object")
        return fields

    def write(self, number: int, identity: Any, outcome: Result | GenbatchError) -> None:
        """Append a line's outcome to the file."""
        entry: dict[str, Any] = {"line": number, "id": identity}
        if isinstance(outcome, GenbatchError):
            entry["error"] = outcome.to_wire()
            self.failed[number] = str(outcome)
        else:
            entry["result"] = outcome
        self._finish(number, entry)

    def write_response(self, number: int, custom_id: Any, outcome: tuple[int, dict[str, Any]] | GenbatchError) -> None:
        """Append the outcome of a line in OpenAI's form, in the form of its answers."""
        name = f"batch_req_{number}"
        entry: dict[str, Any] = {"line": number, "id": name, "custom_id": custom_id, "response": None, "error": None}
        if isinstance(outcome, GenbatchError):
            entry["error"] = outcome.to_wire()
            self.failed[number] = str(outcome)
        else:
            status, body = outcome
            entry["response"] = {"status_code": status, "request_id": name, "body": body}
            if status != HTTPStatus.OK:
                self.failed[number] = _message(body)
        self._finish(number, entry)

    def _finish(self, number: int, entry: dict[str, Any]) -> None:
        self._append(msgspec.json.encode(entry) + b"\n")
        self.done.add(number)

    def summary(self) -> str:
        """Return a summary of the run for a person, with the numbers and errors of failed lines."""
        whole = f"{len(self.done) - len(self.failed)} of {len(self.lines)} requests are answered, in {self.target}"
        if not self.failed:
            return whole
        failures = [f"  line {number}: {self.failed[number]}" for number in sorted(self.failed)[:_MAX_LISTED]]
        if len(self.failed) > _MAX_LISTED:
            failures.append(f"  and {len(self.failed) - _MAX_LISTED} more, each with its error in {self.target}")
        return "\n".join([whole, f"{len(self.failed)} of {self.source} failed:", *failures])

    def _append(self, data: bytes) -> None:
        try:
            with self.target.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise UsageError(f"output: {self.target} cannot be written: {error.strerror}") from error

    def _read_done(self) -> set[int]:
        """Return the lines that an earlier run finished, and remove an incomplete last line."""
        self._append(b"")  # creates the file, so that no request is sent if it cannot be written
        data = self.target.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        rest = data[len(whole) :]
        try:
            entries = [msgspec.json.decode(line, type=_Entry) for line in whole.splitlines()]
            if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
                raise ValueError("its last line is not a result")
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise UsageError(f"output: {self.target} contains something other than results: {error}") from error
        if rest:
            self.target.write_bytes(whole)
        kept = [entry for entry in entries if not entry.is_passing]
        self.failed = {entry.line: fault for entry in kept if (fault := entry.fault) is not None}
        return {entry.line for entry in kept}


_BEGINNING = b'{"line":'  # of each line of results


class _Response(msgspec.Struct):
    """The API's answer in a line of results."""

    status_code: int
    body: dict[str, Any]


class _Entry(msgspec.Struct):
    """The part of a line of results that a later run reads."""

    line: int
    error: ErrorInfo | None = None
    response: _Response | None = None

    @property
    def is_passing(self) -> bool:
        """Whether the request was refused for a while, and is tried again."""
        if self.response is not None:
            return self.response.status_code in _PASSING
        return self.error is not None and self.error.retry_after_ms is not None

    @property
    def fault(self) -> str | None:
        """The reason of a failure; None for an answer."""
        if self.error is not None:
            return str(from_wire(self.error))
        if self.response is not None and self.response.status_code != HTTPStatus.OK:
            return _message(self.response.body)
        return None


_PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def _message(body: dict[str, Any]) -> str:
    """Return the message of an error of OpenAI's API."""
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def _text_of(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8-sig")  # Windows programs begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{source}, line {line}: not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from None


@with_flag_groups
def batch(
    source: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="The requests: one JSON object in each line.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file of results; the default is FILE.results.jsonl."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="The number of requests at once.")] = 8,
    connection: ConnectionFlags,
    engine: ModelFlags,
) -> None:
    """Run a file of requests. A run that was killed continues where it stopped.

    The exit code is 0 if all requests are answered, and 1 if some failed; their lines are printed. Each line of the
    results has the number of its request's line, from 1.

    Each line is an object with prompt, token_ids or messages, the parameters by name, and an optional id:

      {"id": "a", "prompt": "The capital of France is", "max_tokens": 8}

    or a request of OpenAI's batch files, with an answer in their form:

      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

    Example:

      genbatch batch questions.jsonl -o answers.jsonl
    """
    if not source.is_file():
        raise typer.BadParameter(f"there is no file {source}", param_hint="FILE.jsonl")
    try:
        file = BatchFile(source, output or source.with_suffix(".results.jsonl"))
    except UsageError as error:
        raise typer.Exit(report(error)) from None

    async def run() -> None:
        async with open_client(connection, engine, n_parallel=concurrency) as client:
            await _answer_all(client, file, concurrency)

    run_command(run)
    Console(stderr=True, highlight=False, soft_wrap=True).print(file.summary(), markup=False)
    if file.failed:
        raise typer.Exit(FAILURE)


async def _answer_all(client: Client, file: BatchFile, concurrency: int) -> None:
    """Run `concurrency` requests at once until every line has its outcome."""
    todo, api = file.todo(), BatchAPI(client)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=len(file.lines), completed=len(file.done))

        async def work() -> None:
            for number, line in todo:
                await _answer(client, api, file, number, line)
                progress.update(task, completed=len(file.done))

        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(work)


async def _answer(client: Client, api: BatchAPI, file: BatchFile, number: int, line: str) -> None:
    """Answer one line in its form.

    Raises:
        Unavailable: no service answers, so every other line would fail, too.
    """
    fields: dict[str, Any] = {}
    outcome: Any
    try:
        fields = file.parse(line)
        if "custom_id" in fields:
            outcome = await api.answer(check_type(fields, BatchLine))
        else:
            asked = {name: value for name, value in fields.items() if name != "id"}
            outcome = await client.generate(asked.pop("prompt", None), messages=asked.pop("messages", None), **asked)
    except Unavailable:
        raise
    except GenbatchError as error:
        outcome = error
    if "custom_id" in fields:
        file.write_response(number, fields["custom_id"], outcome)
    else:
        file.write(number, fields.get("id"), outcome)
