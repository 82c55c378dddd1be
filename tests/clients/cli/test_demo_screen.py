"""What the demo shows, measured without a terminal."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from genbatch.clients.cli import demo
from genbatch.clients.cli.demo import DemoAnswer, answer_panels, summary


def answered(prompt: str, words: list[str], started_at: float = 0.0) -> DemoAnswer:
    answer = DemoAnswer(prompt, asked_at=started_at)
    for index, word in enumerate(words):
        answer.add(word, started_at + 0.5 + 0.25 * index)
    answer.finish_reason = "stop"
    return answer


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(56, 240),
    height=st.integers(34, 80),
    texts=st.lists(st.lists(st.text(max_size=12), max_size=20), min_size=8, max_size=8),
)
def test_panels_and_table_fit_the_window_together(width: int, height: int, texts: list[list[str]]) -> None:
    console = Console(width=width, height=height, file=io.StringIO())
    answers = [answered(f"prompt {index}", words) for index, words in enumerate(texts)]
    counted = {"steps": 1, "mean_batch_size": 1.0, "shared_tokens": 0, "prompt_tokens": 1}
    grid = console.render_lines(answer_panels(answers, console), pad=False)
    table = console.render_lines(summary(answers, counted), pad=False)
    assert len(grid) + len(table) <= height
    assert all(sum(segment.cell_length for segment in line) <= width for line in grid)


@pytest.mark.parametrize("width", [40, 100, 240])
def test_panels_leave_room_for_the_table_until_they_are_too_small_for_it(width: int) -> None:
    answers = [DemoAnswer(f"prompt {index}", asked_at=0.0) for index in range(8)]

    def lines(height: int) -> int:
        console = Console(width=width, height=height, file=io.StringIO())
        return len(console.render_lines(answer_panels(answers, console), pad=False))

    rows = {40: 8, 100: 4, 240: 2}[width]
    enough = rows * demo._MIN_PANEL_HEIGHT + len(answers) + demo._TABLE_MARGIN
    assert lines(enough) == rows * demo._MIN_PANEL_HEIGHT
    assert lines(enough - 1) == max((enough - 2) // rows, demo._MIN_PANEL_HEIGHT) * rows  # one line is the prompt's


def test_a_panel_shows_the_end_of_a_long_answer() -> None:
    console = Console(width=40, height=40, file=io.StringIO())
    answer = answered("prompt", [f"word{index} " for index in range(500)])
    with console.capture() as captured:
        console.print(answer_panels([answer], console))
    assert "word499" in captured.get() and "word0 " not in captured.get()


def test_the_table_counts_each_request_and_all_together() -> None:
    answers = [answered("first", ["a", "b", "c"]), answered("second", ["d"], started_at=1.0), DemoAnswer("none", 1.0)]
    counted = {"steps": 3, "mean_batch_size": 1.5, "shared_tokens": 7, "prompt_tokens": 20}
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(summary(answers, counted))
    rows = [line.split() for line in captured.get().splitlines()]
    assert rows[1] == ["first", "500", "ms", "3", "4.0"]
    assert rows[2] == ["second", "500", "ms", "1", "-"]
    assert rows[3] == ["none", "-", "0", "-"]
    # From the first prompt at 0 s to the last token at 1.5 s.
    assert "2.7 tok/s in all: 4 tokens in 1.5 s, 3 steps, mean batch size 1.5" in captured.get()
    assert "7 of 20 prompt tokens not prefilled, thanks to seq_cp" in captured.get()
