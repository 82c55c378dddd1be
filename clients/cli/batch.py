"""`genbatch batch`: a file of requests through one model, resumable."""

from pathlib import Path
from typing import Annotated

import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genbatch.clients.cli.batch_file import BatchFile
from genbatch.clients.cli.command import UsageError, run_command
from genbatch.clients.cli.engine_flags import ModelFlags
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.connection import ConnectionFlags, open_client
from genbatch.clients.interface import Client
from genbatch.proto.errors import GenbatchError, Unavailable


@with_flag_groups
def batch(
    source: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="A request a line, as JSON.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where results go; FILE.results.jsonl if not given."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 8,
    connection: ConnectionFlags,
    engine: ModelFlags,
) -> None:
    """Run a file of requests; killed and started again, it goes on where it stopped.

    Each line is an object with prompt, token_ids or messages, the parameters by name, and an id if you like:

      {"id": "a", "prompt": "The capital of France is", "max_tokens": 8}

    Example:

      genbatch batch questions.jsonl -o answers.jsonl
    """
    if not source.is_file():
        raise typer.BadParameter(f"there is no file {source}", param_hint="FILE.jsonl")
    file = BatchFile(source, output or source.with_suffix(".results.jsonl"))

    async def run() -> None:
        if file.target.resolve() == source.resolve():
            raise UsageError("output: results cannot go into the file of requests")
        async with open_client(connection, engine, n_parallel=concurrency) as client:
            await _answer_all(client, file, concurrency)

    run_command(run)


async def _answer_all(client: Client, file: BatchFile, concurrency: int) -> None:
    """Keeps `concurrency` requests under way until every line has its outcome."""
    todo = file.todo()
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=len(file.lines), completed=len(file.done))

        async def work() -> None:
            for number, line in todo:
                identity = None
                try:
                    identity, fields = file.parse(line)
                    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
                    outcome = await client.generate(prompt, messages=messages, **fields)
                except Unavailable:
                    raise  # nobody is there: every line left would say so
                except GenbatchError as error:
                    file.write(number, identity, error)
                else:
                    file.write(number, identity, outcome)
                progress.update(task, completed=len(file.done))

        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(work)
