"""`genbatch generate`: one prompt, one answer, streamed."""

import sys
from typing import Annotated

import msgspec
import trio
import typer
from rich.console import Console

from genbatch.clients.cli.command import UsageError, run_command
from genbatch.clients.cli.engine_flags import ModelFlags
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.cli.sampling_flags import SamplingFlags
from genbatch.clients.cli.terminal_text import printable
from genbatch.clients.connection import ConnectionFlags, open_client
from genbatch.clients.interface import Client
from genbatch.clients.request import GenerateParams
from genbatch.proto.messages import Result


@with_flag_groups
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    *,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON, at the end.")] = False,
    connection: ConnectionFlags,
    sampling: SamplingFlags,
    engine: ModelFlags,
) -> None:
    """Answer one prompt, streamed to standard output.

    Examples:

      genbatch generate "What is the capital of France?"

      genbatch generate "Once upon a time" --raw --max-tokens 40 --temperature 0.8 --seed 7

      genbatch generate - --connect tcp://127.0.0.1:5555 --json < question.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt

    async def answer() -> None:
        turns = _conversation(text, system, raw)
        async with open_client(connection, engine) as client:
            # A raw prompt travels as `prompt`, a conversation as `messages`.
            given = (text if raw else None, turns, sampling.parameters())
            if json:
                await _print_json(client, *given)
            else:
                await _stream(client, *given)

    run_command(answer)


def _conversation(text: str, system: str | None, raw: bool) -> list[dict[str, str]] | None:
    """The messages to send; None for a raw prompt.

    Raises:
        UsageError: a raw prompt with a system prompt.
    """
    if not raw:
        turns = [] if system is None else [{"role": "system", "content": system}]
        return [*turns, {"role": "user", "content": text}]
    if system is not None:
        raise UsageError("system: a raw prompt has no system prompt")
    return None


async def _print_json(
    client: Client, prompt: str | None, messages: list[dict[str, str]] | None, parameters: GenerateParams
) -> None:
    result = await client.generate(prompt, messages=messages, **parameters)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


async def _stream(
    client: Client, prompt: str | None, messages: list[dict[str, str]] | None, parameters: GenerateParams
) -> None:
    started_at = trio.current_time()
    written, is_terminal = False, sys.stdout.isatty()
    async with client.stream(prompt, messages=messages, **parameters) as stream:
        try:
            async for token in stream:
                sys.stdout.write(printable(token.text, is_terminal=is_terminal))
                sys.stdout.flush()
                written = True
        finally:
            if written:  # what comes next, perhaps an error, starts a line
                sys.stdout.write("\n")
                sys.stdout.flush()
    _print_summary(stream.result, trio.current_time() - started_at)


def _print_summary(result: Result, seconds: float) -> None:
    """One dim line for a person; nothing where standard error is not a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        count = result.usage.completion_tokens
        console.print(
            f"{result.finish_reason}: {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tok/s", style="dim"
        )
