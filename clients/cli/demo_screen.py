"""What the demo shows: the answers in a grid of panels, and the table at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# A panel narrower than this breaks every other word.
_MIN_PANEL_WIDTH = 28
_MIN_PANEL_HEIGHT = 4
_TABLE_MARGIN = 8  # lines of the table beside its rows


@dataclass(slots=True)
class Answer:
    """One prompt and its answer as far as it has come; times in seconds on one clock.

    Args:
        prompt: what was asked.
        asked_at: when it was sent.
    """

    prompt: str
    asked_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None
    _text: list[str] = field(default_factory=list)

    def add(self, text: str, now: float) -> None:
        """Books one token."""
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


def answer_panels(answers: Sequence[Answer], console: Console) -> RenderableType:
    """The answers in a grid that leaves room for the table below it in the console's window."""
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


def _panel(answer: Answer, console: Console, width: int, height: int) -> Panel:
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


def answers_as_text(answers: Sequence[Answer]) -> str:
    """The same for where there is no window: one answer after the other."""
    return "\n".join(f"> {answer.prompt}\n{answer.text.strip()}\n" for answer in answers)


def summary(answers: Sequence[Answer], stats: Mapping[str, Any]) -> RenderableType:
    """A row for each request, and what all of them took together."""
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
