"""`genbatch demo`: eight callers, one model, side by side in the terminal."""

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
import typer
from rich.console import Console
from rich.live import Live

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.command import run_command
from genbatch.clients.cli.demo_screen import Answer, answer_panels, answers_as_text, summary
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags, engine_options
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.cli.progress import LoadingBars
from genbatch.clients.connection import import_engine
from genbatch.clients.interface import Client

SYSTEM_PROMPT = (
    "You are a helpful guide in a museum of science. You speak to visitors of every age. "
    "Answer in one short paragraph of plain words, be friendly, give one example from everyday life, "
    "and never use lists, headings or formulas."
)
PROMPTS = (
    "Why is the sky blue?",
    "How do airplanes stay in the air?",
    "What is a black hole?",
    "Why do we dream?",
    "How does a magnet work?",
    "Why is the sea salty?",
    "What makes a rainbow?",
    "How do bees make honey?",
)
_FRAMES_PER_S = 12


@with_flag_groups
def demo(
    model: Annotated[
        str, typer.Argument(help="A name, a Hugging Face directory or id, or a .gguf file.")
    ] = DEFAULT_MODEL,
    *,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
    engine: ModelFlags,
) -> None:
    """Send eight prompts at once over ZeroMQ and watch the answers side by side.

    The prompts share one system prompt, which is prefilled once. Ctrl-C leaves at any point.

    Example:

      genbatch demo --max-tokens 200
    """
    run_command(partial(_demo, model, max_tokens, engine))


async def _demo(model: str, max_tokens: int, engine: ModelFlags) -> None:
    console = Console()
    batcher = BatcherOptions(n_parallel=len(PROMPTS))
    started_at = trio.current_time()
    async with AsyncExitStack() as stack:
        # Only this user can enter the directory, and it goes with the demo.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="genbatch-"))
        address = f"ipc://{Path(directory) / 'demo.sock'}"
        with LoadingBars(console) as bars:
            await import_engine(bars)
            from genbatch.actors.service.service import open_service
            from genbatch.clients.zeromq import ZeroMQClient

            await stack.enter_async_context(
                open_service(engine_options(model, engine), batcher, ServiceOptions(bind=address), progress=bars)
            )
        console.print(f"{model} is ready after {trio.current_time() - started_at:.1f} s, at {address}", style="dim")
        answers = [Answer(prompt) for prompt in PROMPTS]
        async with ZeroMQClient(address) as client:
            await _ask_all(client, answers, max_tokens, console)
            console.print(summary(answers, await client.stats()))


async def _ask_all(client: Client, answers: Sequence[Answer], max_tokens: int, console: Console) -> None:
    """Sends every prompt at once and shows the answers as they come, or at the end where there is no window."""
    if not console.is_terminal:
        await _stream_all(client, answers, max_tokens)
        console.print(answers_as_text(answers), markup=False, highlight=False, soft_wrap=True)
        return
    # Frames are drawn by a thread, at a steady pace however fast the tokens come.
    view = Live(
        console=console, get_renderable=lambda: answer_panels(answers, console), refresh_per_second=_FRAMES_PER_S
    )
    with view:
        await _stream_all(client, answers, max_tokens)


async def _stream_all(client: Client, answers: Sequence[Answer], max_tokens: int) -> None:
    async with trio.open_nursery() as nursery:
        for answer in answers:
            nursery.start_soon(_stream, client, answer, max_tokens)


async def _stream(client: Client, answer: Answer, max_tokens: int) -> None:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": answer.prompt}]
    answer.asked_at = trio.current_time()
    async with client.stream(messages=messages, max_tokens=max_tokens) as stream:
        async for token in stream:
            answer.add(token.text, trio.current_time())
    answer.finish_reason = stream.result.finish_reason
