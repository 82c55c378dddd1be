"""`genbatch demo`: eight callers, one model, side by side in the terminal, and a table at the end."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import trio
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.command import run_command, with_flag_groups
from genbatch.clients.cli.connection import LoadingBars, import_engine
from genbatch.clients.cli.option_flags import DEFAULT_MODEL, ModelFlags
from genbatch.clients.interface import Client
from genbatch.nif.models.model_names import check_source

# A panel narrower than this breaks every other word.
_MIN_PANEL_WIDTH = 28
_MIN_PANEL_HEIGHT = 4
_TABLE_MARGIN = 8  # lines of the table that are no rows


@dataclass(slots=True)
class DemoAnswer:
    """One prompt and its answer as far as it has come; times in seconds on one clock.

    Args:
        prompt: the text of the request.
        asked_at: when the request was sent.
    """

    prompt: str
    asked_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None
    _text: list[str] = field(default_factory=list)

    def add(self, text: str, now: float) -> None:
        """Book one token."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_tokens += 1
        self._text.append(text)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.asked_at

    @property
    def tokens_per_s(self) -> float | None:
        """Pace after the first token; None before the second."""
        if self.first_token_at is None or self.last_token_at is None or self.last_token_at == self.first_token_at:
            return None
        return (self.num_tokens - 1) / (self.last_token_at - self.first_token_at)


def answer_panels(answers: Sequence[DemoAnswer], console: Console) -> RenderableType:
    """Return the answers in a grid that leaves room for the table below it in the console's window."""
    columns = next(count for count in (4, 2, 1) if count == 1 or console.width // count >= _MIN_PANEL_WIDTH)
    rows = -(-len(answers) // columns)
    room = console.height - len(answers) - _TABLE_MARGIN
    if room < rows * _MIN_PANEL_HEIGHT:
        room = console.height - 1
    height = max(room // rows, _MIN_PANEL_HEIGHT)
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for start in range(0, len(answers), columns):
        panels = [
            _panel(answer, console, console.width // columns, height) for answer in answers[start : start + columns]
        ]
        grid.add_row(*panels)
    return grid


def _panel(answer: DemoAnswer, console: Console, width: int, height: int) -> Panel:
    lines = Text(answer.text.strip()).wrap(console, width - 4)
    body = Text("\n").join(lines[-(height - 2) :])  # the end, as in a terminal that scrolls
    done = answer.finish_reason is not None
    state = f"{answer.num_tokens} tokens" if answer.num_tokens else "waiting"
    return Panel(
        body,
        title=Text(answer.prompt, style="bold", overflow="ellipsis", no_wrap=True),
        title_align="left",
        subtitle=f"{state}, {answer.finish_reason}" if done else state,
        subtitle_align="right",
        border_style="green" if done else "cyan" if answer.num_tokens else "dim",
        height=height,
    )


def answers_as_text(answers: Sequence[DemoAnswer]) -> str:
    """Return the answers one after another, for an output without a window."""
    return "\n".join(f"> {answer.prompt}\n{answer.text.strip()}\n" for answer in answers)


def summary(answers: Sequence[DemoAnswer], stats: Mapping[str, Any]) -> RenderableType:
    """Return a row for each request, and the totals."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("request")
    for title in ("TTFT", "tokens", "tok/s"):
        table.add_column(title, justify="right")
    for answer in answers:
        table.add_row(
            answer.prompt,
            "-" if answer.ttft is None else f"{answer.ttft * 1000:.0f} ms",
            str(answer.num_tokens),
            "-" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f}",
        )
    num_tokens = sum(answer.num_tokens for answer in answers)
    ends = [answer.last_token_at for answer in answers if answer.last_token_at is not None]
    seconds = max(ends) - min(answer.asked_at for answer in answers) if ends else 0.0
    totals = Text.assemble(
        (f"{num_tokens / seconds:.1f} tok/s" if seconds else "no tokens", "bold green"),
        f" in all: {num_tokens} tokens in {seconds:.1f} s, {stats['steps']} steps, "
        f"mean batch size {stats['mean_batch_size']:.1f}\n",
        (f"{stats['shared_tokens']} of {stats['prompt_tokens']}", "bold green"),
        " prompt tokens not prefilled, thanks to seq_cp",
    )
    return Group(table, Text(), totals)


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
    batcher, options = BatcherOptions(n_parallel=len(PROMPTS)), engine.options(model)
    check_source(model)
    started_at = trio.current_time()
    async with AsyncExitStack() as stack:
        # Only this user can enter the directory, and it goes with the demo.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="genbatch-"))
        address = f"ipc://{Path(directory) / 'demo.sock'}"
        with LoadingBars() as bars:
            await import_engine(bars)
            from genbatch.actors.service.service import open_service
            from genbatch.clients.remote import ZeroMQClient

            await stack.enter_async_context(open_service(options, batcher, ServiceOptions(bind=address), progress=bars))
        console.print(f"{model} is ready after {trio.current_time() - started_at:.1f} s, at {address}", style="dim")
        answers = [DemoAnswer(prompt) for prompt in PROMPTS]
        async with ZeroMQClient(address) as client:
            await _ask_all(client, answers, max_tokens, console)
            console.print(summary(answers, await client.stats()))


async def _ask_all(client: Client, answers: Sequence[DemoAnswer], max_tokens: int, console: Console) -> None:
    """Send every prompt at once, and show the answers as they come; without a window, show them at the end."""
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


async def _stream_all(client: Client, answers: Sequence[DemoAnswer], max_tokens: int) -> None:
    async with trio.open_nursery() as nursery:
        for answer in answers:
            nursery.start_soon(_stream, client, answer, max_tokens)


async def _stream(client: Client, answer: DemoAnswer, max_tokens: int) -> None:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": answer.prompt}]
    answer.asked_at = trio.current_time()
    async with client.stream(messages=messages, max_tokens=max_tokens) as stream:
        async for token in stream:
            answer.add(token.text, trio.current_time())
    answer.finish_reason = stream.result.finish_reason
