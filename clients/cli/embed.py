"""`genbatch embed`: what texts mean, as vectors."""

import sys
from typing import Annotated

import msgspec
import typer

from genbatch.clients.cli.command import UsageError, run_command, with_flag_groups
from genbatch.clients.cli.connection import ConnectionFlags, open_client
from genbatch.clients.cli.option_flags import ModelFlags


@with_flag_groups
def embed(
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads standard input, a text a line.")],
    *,
    dimensions: Annotated[
        int | None, typer.Option(help="Elements of a vector, where the model was trained to have some cut off.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as one JSON object.")] = False,
    connection: ConnectionFlags,
    engine: ModelFlags,
) -> None:
    """Print an embedding for each text: a line of JSON, in their order.

    Examples:

      genbatch embed "a first text" "a second one" --model ./all-MiniLM-L6-v2

      genbatch embed - --connect tcp://127.0.0.1:5555 < texts.txt > vectors.jsonl
    """
    wanted = sys.stdin.read().splitlines() if texts == ["-"] else texts

    async def answer() -> None:
        if not wanted:
            raise UsageError("texts: there is none on standard input")
        async with open_client(connection, engine, n_parallel=8, finds_running=True) as client:
            found = await client.embed(wanted, dimensions=dimensions)
        if json:
            sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
            return
        for vector in found.embeddings:
            sys.stdout.write(msgspec.json.encode(vector).decode() + "\n")

    run_command(answer)
